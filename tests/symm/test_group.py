"""Groups: from whom they are made, what they refuse, and how they end."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tileflux
from tileflux import CommConfig, env
from tileflux.errors import GroupBroken, GroupClosed, MismatchError, PeerTimeout, TransportUnavailable
from tileflux.symm.group import Group, group_by_name, virtual_rank_on
from tileflux.testing import run_ranks


def _several_groups(world: Group) -> None:
    """Odd and even ranks in groups of their own beside the world, all in use at once."""
    rank = dist.get_rank()
    parts = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 2), (1, 3), (3, 0))}
    groups = {}
    for ranks, process_group in parts.items():
        if rank in ranks:
            groups[ranks] = Group.from_process_group(process_group)
        else:
            with pytest.raises(ValueError, match=f"global rank {rank} is not in this process group"):
                Group.from_process_group(process_group)
    again = Group.from_process_group()
    for _ in range(5):
        for ranks, group in groups.items():
            members = dist.get_process_group_ranks(parts[ranks])
            assert group.world_size == 2 and members[group.rank] == rank
            gathered = tileflux.all_gather(torch.tensor([rank]), group=group)
            assert gathered.tolist() == members
        assert tileflux.all_gather(torch.tensor([rank]), group=world).tolist() == [0, 1, 2, 3]
        assert tileflux.all_reduce(torch.ones(3), group=again).tolist() == [4.0] * 3
    for group in (*groups.values(), again):
        group.close()


def test_subgroups_and_several_groups_in_one_process() -> None:
    run_ranks(_several_groups, 4)


def test_a_group_needs_torch_distributed() -> None:
    with pytest.raises(ValueError, match="not initialised"):
        Group.from_process_group()
    with env.scoped({"RANK": None}), pytest.raises(ValueError, match="start with torchrun"):
        Group.from_env()


def test_torchrun_environment() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = textwrap.dedent(
        """
        import torch, torch.distributed as dist, tileflux
        with tileflux.Group.from_env(device="cpu") as group:
            total = tileflux.all_reduce(torch.ones(5) * (group.rank + 1), group=group)
            assert total.tolist() == [3.0] * 5, total
        dist.destroy_process_group()
        """
    )
    settings = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    settings["TILEFLUX_TRANSPORT"] = "shm"
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], env={**settings, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    assert [process.wait(timeout=60) for process in ranks] == [0, 0]


def test_traits_of_cpu_groups() -> None:
    groups = tileflux.local_groups(3)
    assert groups[1].traits.links == ("same process", "self", "same process")
    assert not groups[1].traits.copies_need_sms and not groups[1].traits.has_multicast
    assert groups[1].transport == "local" and groups[1].stream is None
    assert "rank1of3" in repr(groups[1])
    for group in groups:
        group.close()


def _shm_traits(group: Group) -> None:
    assert group.transport == "shm" and group.device == torch.device("cpu")
    assert sorted(group.traits.links) == ["self", "shared memory"]


def test_traits_of_process_groups() -> None:
    run_ranks(_shm_traits, 2)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="world_size=0"):
        tileflux.local_groups(0)
    for seconds in (-1, 0, float("inf"), float("nan"), 1e11):
        with pytest.raises(ValueError, match=f"timeout_s={seconds} should be"):
            tileflux.local_groups(2, timeout_s=seconds)


def test_a_forgotten_group_ends_its_thread() -> None:
    (group,) = tileflux.local_groups(1)
    group.copy_async(torch.zeros(3), torch.ones(3)).wait()
    assert any(thread.name.startswith("tileflux-copy") for thread in threading.enumerate())
    del group
    gc.collect()
    assert not any(thread.name.startswith("tileflux-copy") for thread in threading.enumerate())


def test_closed_groups_say_so_and_free_their_memory() -> None:
    groups = tileflux.local_groups(2)
    name = groups[0].name
    assert group_by_name(name) is groups[0]
    for group in groups:
        group.close()
        group.close()
    for call in (lambda: tileflux.all_gather(torch.ones(1), group=groups[0]), groups[0].barrier, groups[0].synchronize):
        with pytest.raises(GroupClosed, match="was closed"):
            call()
    with pytest.raises(GroupClosed, match=name):
        group_by_name(name)
    assert groups[0].memory_summary().heap_bytes == 0


def test_a_virtual_rank_is_found_by_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = tileflux.local_groups(3)
    assert virtual_rank_on(0) is None, "ranks on the CPU have no streams"
    streams = {group.name: SimpleNamespace(cuda_stream=10 + group.rank) for group in groups}
    monkeypatch.setattr(Group, "stream", property(lambda group: streams.get(group.name)))
    assert [virtual_rank_on(10 + rank) for rank in range(3)] == groups and virtual_rank_on(13) is None
    groups[1].close()
    assert virtual_rank_on(11) is None
    for group in groups:
        group.close()


def test_a_group_closes_with_its_block() -> None:
    (group,) = tileflux.local_groups(1)
    with group as entered, pytest.raises(ZeroDivisionError):
        assert entered is group
        raise ZeroDivisionError
    with pytest.raises(GroupClosed):
        group.barrier()


def _interrupted(group: Group) -> None:
    x = torch.ones(100_000)
    if group.rank == 0:
        publish, calls = group.channels.publish, [0]

        def interrupt(lane: int, peer: int) -> None:
            publish(lane, peer)
            calls[0] += 1
            if calls[0] == 2:
                raise KeyboardInterrupt

        group.channels.publish = interrupt  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            tileflux.all_gather(x, group=group)
        with pytest.raises(GroupBroken, match="KeyboardInterrupt"):
            tileflux.all_gather(x, group=group)
    else:
        with pytest.raises(PeerTimeout):
            tileflux.all_gather(x, group=group)


def test_a_call_cut_short_breaks_the_group() -> None:
    """Its channels have counted messages that were never sent; the next call would take old ones for new."""
    config = CommConfig(num_lanes=1, slot_bytes=1024)
    run_ranks(_interrupted, 2, group_kwargs={"timeout_s": 0.5, "config": config})


def _refused_then_right(group: Group) -> None:
    """A call refused on one rank alone must not have moved it out of step: made rightly, it pairs with its peer's."""
    for number in (1, 2):
        x = torch.full((3,), float(10 * number + group.rank))
        if group.rank == 1:
            with pytest.raises(ValueError, match="out should be"):
                tileflux.all_gather(x, group=group, out=torch.empty(1))
        gathered = tileflux.all_gather(x, group=group)
        assert gathered[::3].tolist() == [10.0 * number, 10.0 * number + 1]


@pytest.mark.parametrize("check", [False, True])
def test_a_refusal_on_one_rank_keeps_ranks_in_step(check: bool) -> None:
    run_ranks(_refused_then_right, 2, group_kwargs={"check": check})


def _barrier_without_one(group: Group) -> None:
    if group.rank == 1:
        time.sleep(1.2)
        return
    with pytest.raises(PeerTimeout) as caught:
        group.barrier()
    assert caught.value.peer == 1 and caught.value.op == "Group.barrier"
    with pytest.raises(GroupBroken):
        group.barrier()


@pytest.mark.parametrize("where", ["fork", "virtual"])
def test_barrier_names_who_did_not_come(where: str) -> None:
    run_ranks(_barrier_without_one, 2, where=where, group_kwargs={"timeout_s": 0.5})  # type: ignore[arg-type]


def _differ_in_settings(world: Group) -> str:
    with pytest.raises(MismatchError) as caught:
        Group.from_process_group(config=CommConfig(num_lanes=world.rank + 1), device="cpu")
    return str(caught.value)


def test_ranks_must_agree_on_settings() -> None:
    for text in run_ranks(_differ_in_settings, 2):
        assert "num_lanes=1" in text and "num_lanes=2" in text


def _disagree(group: Group, by: str) -> str:
    x = torch.ones(4, 2)
    with pytest.raises(MismatchError) as caught:
        if by == "dtype":
            tileflux.all_gather(x.to(torch.float32 if group.rank else torch.float16), group=group)
        elif by == "shape":
            tileflux.all_reduce(x[: 3 + group.rank], group=group)
        elif by == "op":
            (tileflux.all_reduce if group.rank else tileflux.all_gather)(x, group=group)
        elif by == "gradient":
            tileflux.broadcast(x.requires_grad_(group.rank == 0), group=group)
        elif by == "root":
            tileflux.broadcast(x, group=group, root=group.rank)
        else:
            # Rank 0 sends 2 rows to rank 1, which expects 3 of it.
            sizes = [([2, 2], [2, 1]), ([1, 3], [3, 3])][group.rank]
            tileflux.all_to_all(x, group=group, input_sizes=sizes[0], output_sizes=sizes[1])
    return str(caught.value)


@pytest.mark.parametrize(
    ("by", "parts"),
    [
        ("dtype", ("float16", "float32", "all ranks of a group must make the same call")),
        ("shape", ("(3, 2)", "(4, 2)")),
        ("op", ("all_reduce", "all_gather")),
        ("root", ("torch.float32, 0", "torch.float32, 1")),
        ("gradient", ("torch.float32, 0, True", "torch.float32, 0, False")),
        ("pairs", ("all_to_all, rows from rank 0 to 1", "rank 0 has 2", "rank 1 has 3")),
    ],
)
def test_checking_finds_calls_that_differ(by: str, parts: tuple[str, ...]) -> None:
    for text in run_ranks(_disagree, 2, args=(by,), group_kwargs={"check": True}):
        for part in parts:
            assert part in text


def test_checking_between_virtual_ranks() -> None:
    first, second = tileflux.local_groups(2, check=True, timeout_s=0.5)

    def call() -> None:
        with pytest.raises(PeerTimeout):
            tileflux.all_reduce(torch.ones(4), group=first)

    caller = threading.Thread(target=call)
    caller.start()
    time.sleep(0.1)
    with pytest.raises(MismatchError, match=r"rank 1 has \(\(5,\).*but rank 0 has \(\(4,\)"):
        tileflux.all_reduce(torch.ones(5), group=second)
    caller.join()
    for group in (first, second):
        group.close()


def _wrong_devices(world: Group) -> None:
    with env.scoped({"TILEFLUX_TRANSPORT": "shm"}), pytest.raises(ValueError, match="carries CPU tensors"):
        Group.from_process_group(device="cuda")
    with env.scoped({"TILEFLUX_TRANSPORT": "cuda"}), pytest.raises(ValueError, match="carries CUDA tensors"):
        Group.from_process_group(device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(TransportUnavailable, match="needs a GPU"):
            Group.from_process_group(device="cuda")


def test_transports_refuse_the_wrong_device() -> None:
    run_ranks(_wrong_devices, 1)


def test_the_stream_is_asked_for_when_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its handle: making torch's object of it takes several microseconds."""
    asked: list[str] = []

    class Stream(str):
        def wait_stream(self, other: str) -> None:
            asked.append(f"{self} waits for {other}")

    handles = {"first": 7, "second": 0}
    current = Stream("first")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: handles[current], raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: (asked.append(str(current)), current)[1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device = torch.device("cuda", 0)
    group: Any = SimpleNamespace(device=device, stream=None, rank=0, _last_stream=None, _last_handle=None)
    for name in ("first", "first", "second", "second", "first"):
        current = Stream(name)
        Group.order_stream(group)
    assert asked == ["first", "second", "second waits for first", "first", "first waits for second"]
    group.stream = Stream("second")
    group._last_handle = None
    with pytest.raises(ValueError, match="must be driven on its own stream"):
        Group.order_stream(group)
