"""Compiled ahead: by the key that the launch asks for, for what is launched, and never in the way of a launch."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs

from tileflux import ops
from tileflux.config import GemmConfig, GemmProblem
from tileflux.kernels import dense, gemm_launch, gemm_shared, roles, scatter
from tileflux.kernels.gemm_shared import Launch
from tileflux.kernels.operands import Operands
from tileflux.testing import compiling, run_ranks
from tileflux.testing.compiling import Compilers, Variant, shipped_variants, variants
from tileflux.testing.ghost import ghost_group
from tileflux.testing.ghost_contenders import ghost_task
from tileflux.testing.hopper_cases import hopper_config
from tileflux.tune.lookup import problem_for
from tileflux.tune.search import Candidate, candidates
from tileflux.tune.store import Entry

ROOT = Path(__file__).parents[2]
CONFIG = GemmConfig(64, 64, 32, num_warps=4, num_stages=2, num_feeders=8, num_chunks=2)


def make_problem(op: str = "ag_gemm", m: int = 4096, n: int = 6144, k: int = 12288, world_size: int = 4) -> GemmProblem:
    return GemmProblem(op, m, n, k, world_size, "bfloat16", False, 90, 132, "PCIe", "A GPU")


def make_group(by_copies: bool, is_virtual: bool = False) -> Any:
    traits = SimpleNamespace(copies_need_sms=not by_copies, num_sms=132, links=())
    return SimpleNamespace(
        stream=object() if is_virtual else None, traits=traits,
        device=torch.device("cuda"), world_size=4, rank=0,
    )  # fmt: skip


FUSED = {
    ("ag_gemm", "", True): "ARRIVING",
    ("ag_gemm", "", False): "GATHER",
    ("gemm_rs", "", True): "STAGE",
    ("gemm_rs", "", False): "SCATTER",
    ("gemm_ar", "one_shot", True): "SPREAD",
    ("gemm_ar", "one_shot", False): "SPREAD",
    ("gemm_ar", "two_shot", True): "STAGE",
    ("gemm_ar", "two_shot", False): "SCATTER",
}
APART = dataclasses.replace(CONFIG, sums_apart=True)


@pytest.mark.parametrize(
    ("op", "algorithm", "by_copies", "config", "wanted"),
    [(*call, CONFIG, role) for call, role in FUSED.items()]
    + [("gemm_rs", "", False, APART, "SEND"), ("gemm_rs", "", True, APART, "STAGE")],
)
def test_what_is_compiled_is_what_the_op_launches(
    op: str, algorithm: str, by_copies: bool, config: GemmConfig, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op's launches on a GPU, with all of them noted and none made."""
    launched: list[tuple[object, GemmConfig, bool]] = []

    def note(operands: object, role: object, config: GemmConfig, *, releases: bool = False, **rest: object) -> None:
        launched.append((role, config, releases))

    @contextlib.contextmanager
    def nothing(*arguments: object, **named: object) -> Iterator[None]:
        yield

    for module in (dense, scatter):
        monkeypatch.setattr(module, "launch_gemm", note)
        monkeypatch.setattr(
            module, "turn", lambda group, plan: SimpleNamespace(
                plan=plan, count_call=lambda: None, staged_slabs=None, announce=lambda *place: None
            ),
        )  # fmt: skip
        monkeypatch.setattr(module, "beside", nothing)
        for name in ("load_steps", "load_slab_steps", "_feed_apart", "join", "copy_slabs"):
            monkeypatch.setattr(module, name, lambda *_, **__: None, raising=False)
    names = ("launch_open", "launch_close", "launch_await_everyone", "launch_sum", "launch_sum_slabs")
    monkeypatch.setattr(scatter, "steps", SimpleNamespace(**dict.fromkeys(names, lambda *_, **__: None)))
    stream = SimpleNamespace(record_event=lambda: None, wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    group = make_group(by_copies)
    operands = Operands(torch.empty(64, 32), torch.empty(48, 32), torch.empty(64, 48))
    if op == "ag_gemm":
        dense.run_gather(group, [operands], (64,) * 4, "fused", config)
    elif algorithm == "one_shot":
        scatter.run_spread(group, operands, config)
    else:
        scatter.run_scatter(group, operands, (16,) * 4, "fused", config)
    assert launched == [(getattr(roles, wanted), config, wanted not in ("SEND", "STAGE"))]
    plain, fused = variants(make_problem(op), [Candidate("fused", algorithm, config)], group)
    assert (plain.role, plain.world_size) == ("PLAIN", 1) and (fused.role, fused.world_size) == (wanted, 4)
    assert fused.config.num_feeders == (8 if wanted == "GATHER" else 1)


def test_each_is_compiled_once_and_nothing_on_the_cpu() -> None:
    problem, group = make_problem(), make_group(True)
    tried = candidates(problem)
    found = variants(problem, tried, group)
    assert len(found) == len(set(found)) == 2 * len({each.config for each in tried})
    assert variants(GemmProblem("ag_gemm", 64, 64, 64, 4, "float32"), tried, group) == []
    # Chunks are no variant of the kernel, and neither is a shape that is cut as evenly.
    changed = Candidate("fused", "", dataclasses.replace(tried[0].config, num_chunks=8))
    assert set(variants(problem, [changed], group)) <= set(found)
    assert variants(make_problem(m=2048, n=2048, k=4096), tried, group) == found
    assert not set(variants(make_problem(k=12281), tried, group)) & set(found)
    alone = variants(make_problem("gemm", world_size=1), [Candidate("sequential", "", CONFIG)], group)
    assert [each.role for each in alone] == ["PLAIN"]


def test_virtual_ranks_multiply_with_our_own_kernel() -> None:
    found = variants(make_problem(), [Candidate("sequential", "", CONFIG)], make_group(False, is_virtual=True))
    assert [(each.role, each.world_size, each.is_virtual) for each in found] == [
        ("PLAIN", 1, False),
        ("PLAIN", 4, True),
    ]


@pytest.mark.parametrize(
    ("role", "link", "fetches", "shares"),
    [
        ("SCATTER", "same GPU", True, True),
        ("SCATTER", "same GPU", False, False),
        ("SCATTER", "NVLink", True, False),
        ("PLAIN", "same GPU", True, False),
    ],
)
def test_who_fetches_tiles_is_compiled_as_one_who_shares_a_gpu(
    role: str, link: str, fetches: bool, shares: bool
) -> None:
    problem, config = dataclasses.replace(make_problem(), link=link), dataclasses.replace(CONFIG, fetches=fetches)
    assert compiling._variant(problem, config, role, 4, False).shares_gpu is shares


def make_entry(problem: GemmProblem, strategy: str = "sequential", algorithm: str = "") -> Entry:
    return Entry(problem, strategy, algorithm, CONFIG, {strategy: 1.0}, "2026-11-16", {})


def test_of_what_is_shipped_each_is_compiled_once_fused_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = make_problem()
    sharing = dataclasses.replace(apart, link="same GPU", num_sms=32)
    entries = [
        make_entry(apart),
        make_entry(apart, "fused"),
        make_entry(sharing),
        make_entry(dataclasses.replace(sharing, op="gemm_ar"), "fused", "one_shot"),
        make_entry(make_problem("gemm", world_size=1)),
        make_entry(dataclasses.replace(apart, arch=0)),
    ]
    monkeypatch.setattr(compiling, "load_shipped", lambda: tuple(entries))
    found = [(each.role, each.world_size, each.shares_gpu) for each in shipped_variants()]
    assert found == [("PLAIN", 1, False), ("ARRIVING", 4, False), ("GATHER", 4, False), ("SPREAD", 4, True)]


PLANNED = [
    *(
        Variant(role, "bfloat16", CONFIG, 1024, 1024, 4, 32, 90, False)
        for role in ("GATHER", "ARRIVING", "SEND", "STAGE")
    ),
    Variant("GATHER", "bfloat16", CONFIG, 1024, 1024, 4, 8, 90, False),
    Variant("PLAIN", "bfloat16", CONFIG, 1024, 1024, 1, 0, 90, False),
    Variant("SPREAD", "bfloat16", CONFIG, 1024, 1024, 4, 32, 90, False, shares_gpu=True),
    Variant("SEND", "bfloat16", dataclasses.replace(CONFIG, fetches=True), 1024, 1024, 4, 32, 90, False, True),
    Variant("ARRIVING", "bfloat16", CONFIG, 1024, 1025, 4, 32, 90, False),
    Variant("ARRIVING", "bfloat16", CONFIG, 1024, 1024, 4, 32, 80, False),
    *(Variant("STAGE", "bfloat16", hopper_config(128, 256), 1024, depth, 4, 0, 90, False) for depth in (1024, 1025)),
    Variant("STAGE", "bfloat16", hopper_config(128, 256), 1024, 1024, 4, 0, 100, False),
    Variant("SPREAD", "bfloat16", hopper_config(64, 128), 1024, 1024, 4, 32, 90, False, shares_gpu=True),
]


@pytest.mark.parametrize("variant", PLANNED, ids=lambda each: f"{each.role} {each.depth} {each.arch}")
def test_a_plan_is_what_the_launch_decides(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher as in a process that pretends, with neither loop to go on with."""
    decided: list[tuple[bool, Launch]] = []

    def noting(is_hopper: bool) -> Callable[..., None]:
        return lambda operands, how, *_, **__: decided.append((is_hopper, how))

    monkeypatch.setattr(gemm_launch, "launch_hopper", noting(True))
    monkeypatch.setattr(gemm_launch, "_launch_triton", noting(False))
    monkeypatch.setattr(gemm_launch, "is_hopper", lambda device: variant.arch == 90)
    monkeypatch.setattr(gemm_launch, "_has_tma", lambda device: variant.arch >= 90)
    monkeypatch.setattr(gemm_shared, "_is_interpreted", lambda group: False)
    monkeypatch.setattr(gemm_shared, "sms_for", lambda group: 1024 if group is None else group.traits.num_sms)
    variant.compile()
    monkeypatch.undo()
    plan = variant.plan()
    assert decided == [(variant.is_for_hopper(), plan)]
    assert plan.num_feeders == (min(8, variant.num_sms // 2) if variant.role == "GATHER" else 0)


LAUNCHED = [
    ("PLAIN", (300, 200, 96), 1, False),
    ("ARRIVING", (1024, 2048, 256), 4, False),
    ("GATHER", (1024, 200, 256), 4, False),
    ("STAGE", (256, 2048, 96), 8, False),
    ("SCATTER", (256, 2048, 101), 2, False),
    ("SPREAD", (64, 512, 256), 4, False),
    ("PLAIN", (300, 200, 96), 4, True),
    ("GATHER", (1024, 200, 101), 4, True),
]
"""Sizes as they come: aligned and not, and K that is no multiple of a tile's."""


def _launch(config: GemmConfig, launches: list[Any]) -> tuple[int, int]:
    """(kernels that had to be compiled, launches), in a process of its own."""
    asked = [(role, config, shape, world, is_virtual) for role, shape, world, is_virtual in launches]
    done = subprocess.run(
        [sys.executable, "-m", "tests.testing.launching_child"],
        cwd=ROOT, input=pickle.dumps(asked), capture_output=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    num_compiled, num_launches = map(int, done.stdout.split())
    return num_compiled, num_launches


def test_a_launch_finds_what_was_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wanted = []
    for role, (m, n, k), world_size, is_virtual in LAUNCHED:
        problem = make_problem("ag_gemm", m, n, k, world_size)
        wanted.append(compiling._variant(problem, CONFIG, role, world_size, is_virtual))
    with Compilers(2) as compilers:
        assert compilers.compile(wanted, 150.0) == len(wanted)
        assert compilers.compile(wanted, 150.0) == 0, "asked for again"
    num_compiled, num_launches = _launch(CONFIG, LAUNCHED)
    assert num_compiled == 0 and num_launches >= len(wanted)
    num_compiled, _ = _launch(GemmConfig(64, 64, 32, num_warps=4, num_stages=3, num_feeders=8), LAUNCHED[1:2])
    assert num_compiled == 1, "of others nothing is there"


ON_HOPPER = [
    ("PLAIN", (1536, 4096, 448), 1, False),
    ("PLAIN", (300, 200, 96), 1, False),
    ("ARRIVING", (1024, 2048, 256), 4, False),
    ("ARRIVING", (1000, 2048, 256), 4, False),
    ("STAGE", (2048, 2048, 96), 8, False),
    ("GATHER", (1024, 2048, 256), 4, True),
]
"""As above, with rows that end within a tile."""


def test_hoppers_loop_is_compiled_ahead_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = dataclasses.replace(hopper_config(64, 128), num_feeders=8)
    wanted = []
    for role, (m, n, k), world_size, is_virtual in ON_HOPPER:
        problem = dataclasses.replace(make_problem("ag_gemm", m, n, k, world_size), link="same GPU" * is_virtual)
        wanted.append(compiling._variant(problem, config, role, world_size, is_virtual))
    with Compilers(2) as compilers:
        assert compilers.compile(wanted, 150.0) == len(set(wanted))
    num_compiled, num_launches = _launch(config, ON_HOPPER)
    assert num_compiled == 0 and num_launches >= len(wanted)
    num_compiled, _ = _launch(dataclasses.replace(config, group_m=4), ON_HOPPER[:1])
    assert num_compiled == 1, "of others nothing is there"


class Fake:
    """In the place of a process: takes a while, and dies of some variants."""

    made: list[Fake] = []

    def __init__(self) -> None:
        self.compiled: list[Variant] = []
        self.is_closed, self.is_dead = False, False
        self.is_killed = threading.Event()
        Fake.made.append(self)

    def compile(self, variant: Variant) -> bool:
        if variant.num_columns == -1:
            self.is_dead = True
            raise EOFError
        if variant.num_columns == -2:
            assert self.is_killed.wait(30)
            raise EOFError
        time.sleep(0.02)
        self.compiled.append(variant)
        return variant.num_columns != -3

    def is_alive(self) -> bool:
        return not self.is_dead

    def kill(self) -> None:
        self.is_killed.set()

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Fake]:
    monkeypatch.setattr(compiling, "_Process", Fake)
    monkeypatch.setattr(Fake, "made", [])
    monkeypatch.setattr(compiling, "_GRACE_S", 0.2)
    return Fake.made


def some(*sizes: int) -> list[Variant]:
    return [Variant("PLAIN", "bfloat16", CONFIG, size, 64, 1, 0, 90, False) for size in sizes]


def test_the_work_is_shared_and_processes_are_kept(made: list[Fake]) -> None:
    with Compilers(3) as compilers:
        assert compilers.compile(some(*range(9)), 60.0) == 9
        assert len(Fake.made) == 3 and all(each.compiled for each in Fake.made)
        assert compilers.compile(some(*range(7, 15)), 60.0) == 6
        assert len(Fake.made) == 3 and not any(each.is_closed for each in Fake.made)
    assert all(each.is_closed for each in Fake.made)
    compiled = [variant.num_columns for each in Fake.made for variant in each.compiled]
    assert sorted(compiled) == list(range(15))


@pytest.mark.parametrize(("num_processes", "sizes", "limit_s"), [(0, (1, 2, 3), 9.0), (4, (1,), 9.0), (4, (1, 2), 0.0)])
def test_what_the_launch_does_as_quickly_is_left_to_it(
    num_processes: int, sizes: tuple[int, ...], limit_s: float, made: list[Fake]
) -> None:
    with Compilers(num_processes) as compilers:
        assert compilers.compile(some(*sizes), limit_s) == 0 and Fake.made == []


def test_when_the_time_is_over_the_rest_is_left_out(made: list[Fake]) -> None:
    with Compilers(2) as compilers:
        num_compiled = compilers.compile(some(*range(1000)), 0.3)
    assert 2 <= num_compiled < 100
    first = [variant.num_columns for each in Fake.made for variant in each.compiled]
    assert sorted(first) == list(range(num_compiled)), "the first come first"
    with compilers:
        assert compilers.compile(some(*range(num_compiled + 3)), 60.0) == 3, "what was left out may be asked for again"


def test_who_dies_gives_up_or_does_not_end_is_done_without(made: list[Fake]) -> None:
    with Compilers(2) as compilers:
        assert compilers.compile(some(-1, 1, 2, 3), 60.0) == 3
        assert compilers.compile(some(-3, 4, 5), 60.0) == 2
        start = time.monotonic()
        compilers.compile(some(-2, 6, 7), 0.3)
        assert time.monotonic() - start < 10 and all(each.is_killed.is_set() for each in Fake.made)


def test_the_process_answers_for_each_and_ends_with_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that cannot be compiled is given up, and the next one is taken; what is printed is no answer."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    process = compiling._Process()
    wrong = Variant("PLAIN", "no such type", CONFIG, 64, 64, 1, 0, 90, False)
    assert process.compile(wrong) is False and process.compile(wrong) is False
    process.close()
    assert not process.is_alive()


def _num_missed(rank: int, world_size: int, op: str) -> tuple[int, int]:
    """(GEMMs that a call had to compile, GEMMs that it found), the call being fused among ghosts."""
    found: list[bool] = []

    def listen(src: Any, cache_hit: bool, **rest: object) -> None:
        if src.name == "_gemm_kernel":
            found.append(cache_hit)

    with ghost_group(4, timeout_s=10) as group:
        problem = problem_for(op, 2048, 1024, 1024, torch.bfloat16, group.device, group)
        wanted = variants(problem, [Candidate("fused", "", CONFIG)], group)
        with Compilers(2) as compilers:
            assert compilers.compile(wanted, 100.0) == len(wanted) == 2
        knobs.compilation.listener = listen
        task = ghost_task(group, op, (2048, 4096 if op == "ag_gemm" else 1024, 1024), torch.bfloat16)
        ops.gemm(task.x, task.weight, config=CONFIG)
        task.caller("fused", CONFIG)()
        group.synchronize()
        task.check_ours()
    return len(found) - sum(found), sum(found)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_on_a_gpu_a_call_finds_what_was_compiled_ahead(
    op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (missed,) = run_ranks(_num_missed, 1, args=(op,), where="spawn", device="cuda:0", make_group=False, timeout_s=150)
    assert missed == (0, 2)
