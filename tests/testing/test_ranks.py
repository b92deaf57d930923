"""The rank runner: results, and above all what it says and leaves behind when ranks fail."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tileflux.errors import GroupClosed, PeerTimeout, RankFailed
from tileflux.testing.ranks import Died, run_ranks

THREADS_TOO = pytest.mark.parametrize("where", ["fork", "virtual"])


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No rank runs on, none is a zombie, and the private folder is gone, whatever the test did."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert _rank_processes() == []
    assert list(tmp_path.glob("tileflux*")) == []


def _rank_processes() -> list[str]:
    """Children of this process, less the one multiprocessing keeps for ``spawn``."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            after_name = stat.read_text().rpartition(")")[2].split()
            if int(after_name[1]) == os.getpid():
                command = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if "resource_tracker" not in command:
                    found.append(f"{stat.parent.name} {after_name[0]} {command}")
    return found


def ranked(rank: int, world_size: int, offset: int) -> tuple[int, int, int]:
    time.sleep(0.02 * (world_size - rank))  # the last rank first
    return rank, world_size, rank + offset


@THREADS_TOO
def test_results_come_in_rank_order(where: Any) -> None:
    results = run_ranks(ranked, 3, args=(10,), where=where, make_group=False)
    assert results == [(0, 3, 10), (1, 3, 11), (2, 3, 12)]


def test_four_forked_ranks_start_quickly() -> None:
    start = time.perf_counter()
    run_ranks(lambda group: group.barrier(), 4)
    assert time.perf_counter() - start < 2.0


def gathered(group: Any) -> tuple[int, list[int]]:
    group.barrier()
    parts = [-1] * group.world_size
    dist.all_gather_object(parts, group.rank)
    return group.rank, parts


@pytest.mark.parametrize("where", ["fork", "spawn"])
def test_processes_get_a_group_and_a_process_group(where: Any) -> None:
    assert run_ranks(gathered, 2, where=where, device="cpu") == [(rank, [0, 1]) for rank in range(2)]


def test_virtual_ranks_get_groups_of_one_world_which_are_closed_behind_them() -> None:
    results = run_ranks(lambda group: (group.rank, group.transport, group.barrier(), group), 3, where="virtual")
    assert [result[:3] for result in results] == [(rank, "local", None) for rank in range(3)]
    for *_, group in results:
        with pytest.raises(GroupClosed):
            group.barrier()


@THREADS_TOO
def test_group_keywords_reach_the_group(where: Any) -> None:
    results = run_ranks(lambda group: group.timeout_s, 2, where=where, group_kwargs={"timeout_s": 7.5})
    assert results == [7.5, 7.5]


def test_tensors_come_back_by_value() -> None:
    results = run_ranks(lambda rank, _: torch.full((1000, 300), float(rank)), 2, make_group=False)
    assert [result.shape for result in results] == [(1000, 300)] * 2
    assert [result.unique().tolist() for result in results] == [[0.0], [1.0]]
    assert not any(result.is_shared() for result in results)


def test_forked_ranks_draw_different_numbers_that_the_callers_seed_decides() -> None:
    def draws() -> list[float]:
        torch.manual_seed(3)
        return run_ranks(lambda rank, _: torch.rand(()).item(), 3, make_group=False)

    first = draws()
    assert len(set(first)) == 3
    assert draws() == first


def test_an_unpicklable_result_comes_back_as_text() -> None:
    results = run_ranks(lambda rank, _: threading.Lock(), 2, make_group=False)
    assert all(isinstance(result, str) and "lock" in result for result in results)


@THREADS_TOO
def test_the_first_failure_in_time_comes_first(where: Any) -> None:
    cause = multiprocessing.get_context("fork").Event()

    def fail_in_turn(rank: int, world_size: int) -> None:
        """Rank 2 fails first, rank 0 a little later, rank 1 returns, rank 3 would go on."""
        if rank == 0:
            assert cause.wait(10)  # a busy machine may start rank 2 late
            time.sleep(0.1)
            raise KeyError("a consequence")
        if rank == 2:
            cause.set()
            raise LookupError("the cause\nin two lines")
        if rank == 3:
            wait_for_godot()

    start = time.perf_counter()
    with pytest.raises(RankFailed) as caught:
        run_ranks(fail_in_turn, 4, where=where, make_group=False)
    assert time.perf_counter() - start < 2.5
    message = str(caught.value)
    assert message.startswith("rank 2 of 4 failed first: LookupError: the cause\n\nTraceback")
    assert "in fail_in_turn" in message
    told, stack = message.split("\n  rank 3: still running")
    assert told.endswith("\n  rank 0: KeyError: 'a consequence'\n  rank 1: returned")
    assert "wait_for_godot" in stack, "whom others may have waited for in vain"
    assert message.count("Traceback") == 1
    assert caught.value.rank == 2
    assert isinstance(caught.value.__cause__, LookupError)
    assert caught.value.cause is caught.value.__cause__


def test_the_clock_of_the_ranks_decides_and_not_the_order_of_arrival() -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank == 1:
            raise SlowToPickle("first")
        time.sleep(0.5)
        raise LookupError("second")

    with pytest.raises(RankFailed, match=r"\Arank 1 of 2 failed first: SlowToPickle: first"):
        run_ranks(fn, 2, make_group=False)


class SlowToPickle(Exception):
    def __reduce__(self) -> Any:
        time.sleep(0.25)
        return super().__reduce__()


def test_an_error_of_ours_keeps_its_fields_on_the_way() -> None:
    def fn(group: Any) -> None:
        if group.rank == 0:
            group.barrier()

    with pytest.raises(RankFailed) as caught:
        run_ranks(fn, 2, group_kwargs={"timeout_s": 0.2})
    assert isinstance(caught.value.__cause__, PeerTimeout)
    assert caught.value.__cause__.peer == 1


class Unpicklable(Exception):
    def __init__(self, *, detail: str) -> None:
        super().__init__(detail)


def test_an_unpicklable_error_comes_back_as_text() -> None:
    def fn(rank: int, world_size: int) -> None:
        raise Unpicklable(detail="only words")

    with pytest.raises(RankFailed, match="Unpicklable: only words") as caught:
        run_ranks(fn, 2, make_group=False)
    assert caught.value.__cause__ is None


@THREADS_TOO
def test_leaving_by_sys_exit_is_a_failure(where: Any) -> None:
    with pytest.raises(RankFailed, match="failed first: SystemExit: 0"):
        run_ranks(lambda rank, _: sys.exit(0), 2, where=where, make_group=False)


def get_stuck(rank: int, world_size: int) -> None:
    if rank % 2:
        wait_for_godot()


def wait_for_godot() -> None:
    time.sleep(5)


@THREADS_TOO
def test_the_deadline_names_the_ranks_and_shows_their_stacks(where: Any) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(get_stuck, 4, where=where, make_group=False, timeout_s=0.5)
    message = str(caught.value)
    assert message.startswith("ranks 1, 3 of 4 did not finish within 0.5 s\n")
    for rank in (1, 3):
        stack = message.split(f"rank {rank} was at:")[1].split("\n\n")[0]
        assert "wait_for_godot" in stack and "get_stuck" in stack
        assert where == "virtual" or re.search(r"\(state S, \d+\.\d s of CPU so far\)", stack), "it sleeps"
        assert "test_the_deadline_names" not in stack and "_rank_child" not in stack and "threading.py" not in stack
    assert "\n  rank 0: returned\n  rank 2: returned" in message
    assert caught.value.rank == 1


def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    def fn(rank: int, world_size: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    start = time.perf_counter()
    with pytest.raises(RankFailed, match="ranks 0, 1 of 2 did not finish"):
        run_ranks(fn, 2, make_group=False, timeout_s=0.3)
    assert time.perf_counter() - start < 5


def kill_rank_one(rank: int, world_size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def test_a_killed_rank_is_reported_with_its_signal() -> None:
    with pytest.raises(RankFailed, match=r"\Arank 1 of 3 failed first: was killed by SIGKILL\n") as caught:
        run_ranks(kill_rank_one, 3, make_group=False)
    assert caught.value.rank == 1
    assert "rank 0: returned" in str(caught.value)


def test_a_death_comes_before_the_errors_it_causes() -> None:
    def fn(group: Any) -> None:
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()  # fails as soon as the connection to rank 1 breaks

    with pytest.raises(RankFailed, match=r"\Arank 1 of 2 failed first: was killed by SIGKILL"):
        run_ranks(fn, 2)


def test_a_rank_that_may_die_leaves_its_signal_as_its_result() -> None:
    assert run_ranks(kill_rank_one, 3, make_group=False, may_die={1}) == [0, Died(signal.SIGKILL), 2]


def test_a_rank_that_may_die_may_also_live_but_not_raise() -> None:
    assert run_ranks(lambda rank, _: rank, 2, make_group=False, may_die={1}) == [0, 1]
    with pytest.raises(RankFailed, match="rank 1 of 2 failed first: ZeroDivisionError"):
        run_ranks(lambda rank, _: 1 // (1 - rank), 2, make_group=False, may_die={1})


def test_survivors_go_on_after_a_permitted_death() -> None:
    def fn(group: Any) -> str:
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerTimeout, match="rank 1"):
            group.barrier()
        return "survived"

    assert run_ranks(fn, 2, may_die={1}, group_kwargs={"timeout_s": 1.0}) == ["survived", Died(signal.SIGKILL)]


def test_a_rank_that_exits_without_a_result_is_reported_with_its_code() -> None:
    with pytest.raises(RankFailed, match="rank 0 of 1 failed first: exited with code 3 instead of returning"):
        run_ranks(lambda rank, _: os._exit(3), 1, make_group=False)


def test_a_crash_after_returning_is_a_failure() -> None:
    def fn(rank: int, world_size: int) -> None:
        multiprocessing.util.Finalize(None, os.kill, (os.getpid(), signal.SIGKILL), exitpriority=1)

    with pytest.raises(RankFailed, match="returned, and then was killed by SIGKILL while shutting down"):
        run_ranks(fn, 1, make_group=False)


def test_an_interrupt_stops_the_ranks() -> None:
    main = threading.get_ident()
    timer = threading.Timer(0.4, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(lambda rank, _: time.sleep(60), 2, make_group=False)
    timer.join()  # what is left is looked for by the fixture


def test_ranks_do_not_outlive_a_killed_runner(tmp_path: Path) -> None:
    script = f"""
import os, pathlib, time
from tileflux.testing.ranks import run_ranks
def fn(rank, world_size):
    pathlib.Path({str(tmp_path)!r}, f"pid{{rank}}").write_text(str(os.getpid()))
    time.sleep(60)
run_ranks(fn, 2, make_group=False)
"""
    with subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)}) as runner:
        files = [tmp_path / "pid0", tmp_path / "pid1"]
        assert _eventually(lambda: all(file.exists() and file.read_text() for file in files), 30)
        runner.kill()
    pids = [int(file.read_text()) for file in files]
    assert _eventually(lambda: not any(_runs(pid) for pid in pids), 5)
    for left in tmp_path.glob("tileflux*"):  # nobody was there to remove it
        shutil.rmtree(left)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _eventually(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"where": "threads"}, "where='threads' should be one of fork, virtual, mps, spawn"),
        ({"timeout_s": 0}, "timeout_s=0 should be"),
        ({"sm_share": 50}, "sm_share=50 needs where='mps'"),
        ({"sm_share": 0, "where": "mps"}, "sm_share=0 should be between 1 and 100"),
        ({"may_die": {2}}, "names rank 2, and there are only 2 ranks"),
        ({"may_die": {0}, "where": "virtual"}, "needs ranks that are processes"),
        ({"device": "cuda"}, "CUDA does not survive a fork"),
        ({"device": "cpu", "where": "mps"}, "where='mps' shares a GPU"),
        ({"device": "meta"}, "device='meta' should be cpu, cuda or cuda:N"),
        ({"device": "cuda:99", "where": "spawn"}, "needs 100 GPUs"),
        ({"device": "cpu", "where": "spawn"}, "must be a function they can import"),
    ],
)
def test_mistakes_of_the_caller(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run_ranks(lambda rank, _: None, 2, **keywords)


@pytest.mark.parametrize("world_size", [0, 101])
def test_world_sizes_out_of_range(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size={world_size} should be"):
        run_ranks(get_stuck, world_size)


def test_a_fork_of_a_process_with_torch_distributed_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="use where='spawn'"):
            run_ranks(get_stuck, 2)
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize(("where", "device"), [("virtual", "cuda"), ("mps", None), ("spawn", "cuda:0")])
def test_ranks_on_one_gpu(where: Any, device: str | None) -> None:
    results = run_ranks(add_one_on_gpu, 2, where=where, device=device, timeout_s=120)
    assert results == [("cuda", 1.0), ("cuda", 2.0)]


def add_one_on_gpu(group: Any) -> tuple[str, float]:
    value = torch.full((4,), float(group.rank), device=group.device) + 1
    return value.device.type, value.max().item()


@pytest.mark.gpu
def test_mps_divides_the_sms() -> None:
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    shares = run_ranks(num_sms, 2, where="mps", make_group=False, sm_share=25, timeout_s=120)
    assert all(0 < share <= whole // 4 + 2 for share in shares)


def num_sms(rank: int, world_size: int) -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count
