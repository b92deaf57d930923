"""Launching again: the launcher gets what Triton would have handed it, and Triton is asked where it must be.

There is no GPU here, so a stand-in notes what a kernel and its launcher get.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc
from triton.runtime.driver import driver

import tileflux
from tileflux import GemmConfig
from tileflux.kernels import gemm_hopper_launch, gemm_launch, prepared
from tileflux.kernels.gemm_launch import launch_gemm
from tileflux.kernels.operands import Operands, Role
from tileflux.kernels.prepared import OUT, SCALE_X, Kept, Launcher, Tile, Tiles, X, launch_step
from tileflux.kernels.recording import recording
from tileflux.kernels.roles import ARRIVING, GATHER, GATHERED, PLAIN, SCATTER, SPREAD, STAGE
from tileflux.kernels.shards import gather_shards, scatter_shards, spread_shards
from tileflux.kernels.turns import Turn, turn

from .stand_in import Kernel, plain, stand_in, stand_in_for_gemm

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
CONFIGS = (GemmConfig(block_m=16, block_n=32), GemmConfig(block_m=16, block_n=32, block_k=32, num_sms=5))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return stand_in(monkeypatch)


def test_what_is_kept_is_bounded_and_only_found_by_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_MAX_KEPT", 3)
    kept: Kept[int] = Kept()
    for number in range(7):
        kept.keep(number, -number)
        assert kept.find(number) == -number and len(kept) <= 3
    assert kept.find(0) is None and kept.find(([],)) is None


def test_a_step_asks_triton_once_for_each_set_of_constants(kernel: Kernel) -> None:
    table = torch.zeros(3, dtype=torch.int64)
    for number in range(3):
        launch_step(kernel, number, (number, 5, table), (2, True), 4)
        launch_step(kernel, 9, (number, 6, table), (4, True), 4)
    assert kernel.through_triton == [(0, 0, 5, table, 2, True), (9, 0, 6, table, 4, True)]
    expected = [(1, 1, 5, table, 2, True), (9, 1, 6, table, 4, True), (2, 2, 5, table, 2, True)]
    assert kernel.past_it == [*expected, (9, 2, 6, table, 4, True)]


def test_a_step_is_repeated_with_where_tensors_are_now(kernel: Kernel) -> None:
    """Whether Triton was asked for it, or not; with the turn's table of then, of which it holds nothing."""
    table, moved = (torch.zeros(3, dtype=torch.int64) for _ in range(2))
    here = SimpleNamespace(table=moved)
    x, scale_x, out = (torch.zeros(2) for _ in range(3))
    moving = ((0, X), (1, SCALE_X), (3, OUT))
    arguments = (x.data_ptr(), scale_x.data_ptr(), 7, out.data_ptr(), table)
    repeats = [launch_step(kernel, 5, arguments, (2, True), 4, moving) for _ in range(2)]
    fixed = launch_step(kernel, 1, (8, table), (2, True), 4, ())
    assert launch_step(kernel, 1, (8, table), (2, True), 4) is None, "nobody has asked for what repeats it"
    kernel.past_it.clear()
    others = [torch.zeros(2) for _ in range(3)]
    for repeat in (*repeats, fixed):
        assert repeat is not None
        repeat(None, here, *others)
    first = (5, others[0].data_ptr(), others[1].data_ptr(), 7, others[2].data_ptr(), moved.data_ptr(), 2, True)
    assert kernel.past_it == [first, first, (1, 8, moved.data_ptr(), 2, True)]
    assert repeats[0] is not None
    repeats[0](None, here, x, None, out)
    assert kernel.past_it[-1][1:5] == (x.data_ptr(), 0, 7, out.data_ptr())
    assert not any(part is table or part == table.data_ptr() for part in repeats[0]._fixed if part is not None)


def test_a_step_that_passes_through_triton_is_not_repeated(kernel: Kernel) -> None:
    table = torch.zeros(3, dtype=torch.int64)
    kernel.pre_run_hooks.append(print)
    assert launch_step(kernel, 1, (table,), (2, True, 3), 4, ()) is None
    kernel.pre_run_hooks.clear()
    assert launch_step(kernel, 1, (table,), (2, True, 3), 4, ()) is not None


def test_triton_launches_while_somebody_listens_or_its_launcher_is_unknown(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = torch.zeros(3, dtype=torch.int64)

    def num_asked() -> int:
        before = len(kernel.through_triton)
        for _ in range(3):
            launch_step(kernel, 1, (table,), (2, True, 3), 4)
        return len(kernel.through_triton) - before

    assert num_asked() == 1
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hook.add(print)
        assert num_asked() == 3
        hook.remove(print)
        assert num_asked() == 0
    kernel.pre_run_hooks.append(print)
    assert num_asked() == 3
    kernel.pre_run_hooks.clear()
    monkeypatch.setattr(prepared, "_KNOWS_LAUNCHER", False)
    assert num_asked() == 3
    monkeypatch.setattr(prepared, "_KNOWS_LAUNCHER", True)
    monkeypatch.setattr(prepared, "JITFunction", type("AnotherKind", (), {}))
    assert num_asked() == 3


@pytest.fixture
def gemm_kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return stand_in_for_gemm(monkeypatch)


class Device:
    """Stands in for Triton's driver: notes what descriptors it fills."""

    def __init__(self) -> None:
        self.filled: list[tuple[Any, ...]] = []
        self.utils = SimpleNamespace(fill_tma_descriptor=self._fill)

    def _fill(self, *given: Any) -> object:
        self.filled.append(given)
        return ("map", *given)


META = {"swizzle": 3, "elem_size": 2, "elem_type": 8, "block_size": [64, 32], "fp4_padded": False}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("metas", [(), (META, META | {"swizzle": 1}), (None, None)])
def test_the_innermost_launcher_gets_what_tritons_own_would_hand_it(
    monkeypatch: pytest.MonkeyPatch, metas: tuple[Any, ...]
) -> None:
    got: list[tuple[Any, ...]] = []
    run = CudaLauncher.__new__(CudaLauncher)
    kind = "tensordesc<bf16[64, 32]>" if metas else "i64"
    signature = {0: "i64", 1: kind, 2: "*i64", 3: kind, 4: "constexpr"}
    run.launch = wrap_handle_tensordesc(
        lambda *given: got.append(given), signature, list(metas) if any(metas) else None
    )
    run.num_ctas, run.global_scratch_size, run.profile_scratch_size = 1, 0, 0
    run.global_scratch_align = run.profile_scratch_align = 1
    run.launch_cooperative_grid, run.launch_pdl = True, False
    launcher = Launcher(SimpleNamespace(run=run, function=11, packed_metadata=(4, 1, 0)), 0, ("constant",))
    device = Device()
    monkeypatch.setattr(driver, "_active", device)
    first, second = Tiles((64, 128), (128, 1)), Tiles((96, 64), (80, 1))
    addresses = ((4096, 512), (4096, 1024), (4096, 512))
    for number, (x, y) in enumerate(addresses):
        arguments = (number, first[x], "table", second[y]) if metas else (number, x, "table", y)
        launcher.launch(number, *arguments)
    mine, num_filled = got[:], len(device.filled)
    got.clear()
    for number, (x, y) in enumerate(addresses):
        tiles = (Tile(x, (64, 128), (128, 1)), "table", Tile(y, (96, 64), (80, 1))) if metas else (x, "table", y)
        run(number, 1, 1, 77, 11, (4, 1, 0), None, None, None, number, *tiles, "constant")
    assert [as_addresses(each) for each in mine] == [as_addresses(each) for each in got]
    assert num_filled == (3 if any(metas) else 0), "once for each tile, and not for each launch"


def as_addresses(launch: tuple[Any, ...]) -> list[object]:
    """With tiles, which stand for themselves where nothing is filled, as where they begin."""
    return [part.data_ptr() if isinstance(part, Tile) else part for part in launch]


@pytest.mark.usefixtures("kernel")
def test_a_kernel_that_needs_memory_is_launched_by_triton() -> None:
    run = CudaLauncher.__new__(CudaLauncher)
    run.launch, run.global_scratch_size, run.profile_scratch_size = print, 64, 0
    run.launch_cooperative_grid = run.launch_pdl = False
    compiled = SimpleNamespace(run=run, function=11, packed_metadata=(4, 1, 0))
    assert Launcher(compiled, 0, ())._run is run
    run.global_scratch_size = 0
    assert Launcher(compiled, 0, ())._run is print


def test_tiles_are_kept_by_address_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_MAX_KEPT", 3)
    tiles = Tiles((4, 8), (8, 1))
    for number in range(7):
        made = tiles[16 * number]
        assert made is tiles[16 * number] and made.data_ptr() == 16 * number and len(tiles) <= 3
        assert (made.shape, made.strides) == ((4, 8), (8, 1))


CHOICES: dict[str, tuple[Any, ...]] = {
    "depth": (32, 40, 64),
    "columns": (16, 48),
    "dtype": DTYPES,
    "out_dtype": (torch.bfloat16, torch.float32),
    "activation": (None, "relu", "swiglu"),
    "x_offset": (0, 1),
    "weight_offset": (0, 1),
    "out_offset": (0, 1),
    "gap": (0, 3, 16),
    "k_major": (True, False),
    "bias": (None, torch.float32, torch.bfloat16),
    "adds_bias": (True, False),
    "scale_x": (None, 0, 1),
    "scale_weight": (None, 0, 1),
    "config": CONFIGS,
    "releases": (False, True),
    "use_tma": (None, False),
    "precision": ("ieee", "tf32"),
}
"""Everything a variant of the kernel, or a launch of it, may depend on, but for the role."""


def make_operands(case: dict[str, Any]) -> Operands:
    """Operands of a case in fresh memory. 24 rows, whatever the role."""
    depth, columns, dtype, gap = case["depth"], case["columns"], case["dtype"], case["gap"]
    size = columns * (2 if case["activation"] == "swiglu" else 1)
    x = torch.zeros(24 * (depth + gap) + 1, dtype=dtype)[case["x_offset"] :][: 24 * (depth + gap)]
    weight = torch.zeros(size * depth + 1, dtype=dtype)[case["weight_offset"] :][: size * depth]
    out = torch.zeros(24 * columns + 1, dtype=case["out_dtype"])[case["out_offset"] :][: 24 * columns]
    lengths = {"scale_x": {None: None, 0: (), 1: (24,)}, "scale_weight": {None: None, 0: (), 1: (size,)}}
    shapes = {name: lengths[name][case[name]] if dtype in DTYPES[2:] else None for name in lengths}
    return Operands(
        x.view(24, depth + gap)[:, :depth],
        weight.view(size, depth) if case["k_major"] else weight.view(depth, size).t(),
        out.view(24, columns),
        bias=None if case["bias"] is None else torch.zeros(size, dtype=case["bias"]),
        activation=case["activation"], adds_bias=case["adds_bias"],
        **{name: None if shape is None else torch.zeros(shape) for name, shape in shapes.items()},
    )  # fmt: skip


@contextlib.contextmanager
def restored_precision() -> Iterator[None]:
    """What this machine multiplies fp32 with is set back at the end."""
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def turns_of(group: tileflux.Group) -> Iterator[tuple[Role, Turn | None]]:
    """Every kind of launch."""
    yield PLAIN, None
    gathered = turn(group, gather_shards("ag_gemm", (24,), 256, True, 1))
    yield from ((role, gathered) for role in (GATHER, ARRIVING, GATHERED))
    yield SCATTER, turn(group, scatter_shards("gemm_rs", (24,), 48, 4, CONFIGS[0]))
    yield STAGE, turn(group, scatter_shards("gemm_rs", (24,), 48, 4, CONFIGS[0], True))
    yield SPREAD, turn(group, spread_shards("gemm_ar", 1, 24, 48, 4, CONFIGS[0]))


def test_a_repeated_gemm_is_launched_as_triton_would(gemm_kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one launch another that differs in one thing, and the first again: each as if it were the first."""
    (group,) = tileflux.local_groups(1)
    draws = random.Random(5)

    def check(case: dict[str, Any], role: Role, here: Turn | None) -> bool:
        torch.backends.cuda.matmul.fp32_precision = case["precision"]
        operands, num_again = make_operands(case), len(gemm_kernel.past_it)

        def launch() -> tuple[Any, ...]:
            launch_gemm(
                operands, role, case["config"], group=None if here is None else group, turn=here,
                releases=case["releases"], use_tma=case["use_tma"],
            )  # fmt: skip
            is_again = len(gemm_kernel.past_it) > num_again
            return (gemm_kernel.past_it if is_again else gemm_kernel.through_triton)[-1]

        launched, is_again = launch(), len(gemm_kernel.past_it) > num_again
        with monkeypatch.context() as patch:
            patch.setattr(prepared, "_KNOWS_LAUNCHER", False)
            launch()
        assert plain(launched) == plain(gemm_kernel.through_triton[-1])
        return is_again

    with group, restored_precision():
        for role, here in turns_of(group):
            for number in range(3):
                # The first is what fits TMA, with all its descriptors.
                case = {name: choices[0] if number == 0 else draws.choice(choices) for name, choices in CHOICES.items()}
                check(case, role, here)
                for name, choices in CHOICES.items():
                    check(case | {name: draws.choice(choices)}, role, here)
                assert check(case, role, here), "a launch like an earlier one asked Triton"


def test_what_is_recorded_or_only_loaded_is_not_launched_again(gemm_kernel: Kernel) -> None:
    operands = Operands(torch.zeros(4, 32), torch.zeros(8, 32), torch.zeros(4, 8))
    launch_gemm(operands, PLAIN, CONFIGS[0])
    launch_gemm(operands, PLAIN, CONFIGS[0], load_only=True)
    assert (len(gemm_kernel.through_triton), len(gemm_kernel.past_it)) == (1, 0)
    with recording():
        launch_gemm(operands, PLAIN, CONFIGS[0])
        launch_gemm(operands, PLAIN, CONFIGS[0])
    assert (len(gemm_kernel.through_triton), len(gemm_kernel.past_it)) == (3, 0)
    assert all(launch[-1].records for launch in gemm_kernel.through_triton[1:])
    launch_gemm(operands, PLAIN, CONFIGS[0])
    assert (len(gemm_kernel.through_triton), len(gemm_kernel.past_it)) == (3, 1)
    assert not gemm_kernel.past_it[0][-1].records


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_hoppers_loop_is_launched_again_as_triton_would(
    gemm_kernel: Kernel, monkeypatch: pytest.MonkeyPatch, out_dtype: torch.dtype
) -> None:
    """With its descriptors: of x, of rows that arrive, of the weight, and of a result that leaves by TMA, or stays."""
    monkeypatch.setattr(gemm_hopper_launch, "_gemm_hopper_kernel", gemm_kernel)
    monkeypatch.setattr(gemm_launch, "is_hopper", lambda device: True)
    config = GemmConfig(64, 64, 64, num_warps=4, hopper=True)
    (group,) = tileflux.local_groups(1)
    with group:
        gathered = turn(group, gather_shards("ag_gemm", (128,), 256, False, 1))
        slabs = dataclasses.replace(config, num_chunks=3)
        staged = turn(group, scatter_shards("gemm_rs", (128,), 192, out_dtype.itemsize, slabs, by_copies=True))
        kept = []  # so that addresses differ
        for role, here in ((PLAIN, None), (GATHER, gathered), (STAGE, staged)):
            for number in range(3):
                x, weight = (torch.zeros(rows, 128, dtype=torch.bfloat16) for rows in (128, 192))
                operands = Operands(x, weight, torch.zeros(128, 192, dtype=out_dtype), bias=torch.zeros(192))
                kept.append(operands)
                num_again = len(gemm_kernel.past_it)
                launch_gemm(operands, role, config, group=None if here is None else group, turn=here)
                assert len(gemm_kernel.past_it) == num_again + (number > 0)
                with monkeypatch.context() as patch:
                    patch.setattr(prepared, "_KNOWS_LAUNCHER", False)
                    launch_gemm(operands, role, config, group=None if here is None else group, turn=here)
                assert number == 0 or plain(gemm_kernel.past_it[-1]) == plain(gemm_kernel.through_triton[-1])
            spec = gemm_kernel.past_it[-1][-1]
            assert spec.is_hopper and spec.out_by_tma == (out_dtype is torch.bfloat16)
