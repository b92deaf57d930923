"""The main loop interpreted: types, layouts, epilogues and odd sizes, through pointers and through TMA descriptors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import tileflux
from tileflux import env
from tileflux.config import CONTROL, GemmConfig
from tileflux.errors import PeerTimeout
from tileflux.kernels import gemm_host, gemm_launch
from tileflux.kernels.gemm_launch import launch_gemm
from tileflux.kernels.operands import Operands, Role
from tileflux.kernels.roles import PLAIN, SCATTER
from tileflux.kernels.shards import gather_shards, scatter_shards
from tileflux.kernels.turns import turn
from tileflux.lang import signal as lang_signal
from tileflux.lang.policy import store_tile, wait_for_nothing
from tileflux.lang.schedule import arrival_order, replay
from tileflux.lang.turn import _FETCHED, RANK, _control, word
from tileflux.symm.group import Group
from tileflux.testing import assert_close, nan_like, poisoned
from tileflux.testing.dense import (
    DENSE_DTYPES,
    SCALED_DTYPES,
    DenseCase,
    dense_shapes,
    expected,
    gemm_case,
    reduction,
)
from tileflux.testing.dense_protocols import Call

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")

CONFIG = GemmConfig(block_m=16, block_n=32, block_k=16, group_m=2, num_warps=4, num_sms=3)
"""Three programs: tiles do not divide evenly among them."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def repaired_interpreter() -> None:
    from tileflux.testing import interpreter

    interpreter.install()


def make_operands(case: DenseCase) -> Operands:
    """The operands of a case for one rank, with a poisoned output."""
    scales = (None if each is None else torch.as_tensor(each) for each in (case.scales_x[0], case.scales_weight[0]))
    out = poisoned(case.shape[:2], case.out_dtype)
    return Operands(case.xs[0], case.weights[0], out, case.biases[0], *scales, case.activation)


def run(operands: Operands, *, use_tma: bool, config: GemmConfig = CONFIG) -> torch.Tensor:
    """The result, in a poisoned tensor of its own."""
    operands = dataclasses.replace(operands, out=nan_like(operands.out))
    launch_gemm(operands, PLAIN, config, use_tma=use_tma)
    return operands.out


def check(case: DenseCase, what: str = "") -> None:
    """Pointers, descriptors and the host twin agree with the exact result; the first two to the bit."""
    operands = make_operands(case)
    right, terms = expected(case, "gemm"), reduction(case, "gemm")
    through_pointers, through_tma = run(operands, use_tma=False), run(operands, use_tma=True)
    assert_close(through_pointers, right, dtype=case.out_dtype, reduction=terms, what=what)
    assert_close(through_tma, through_pointers, reduction=0, what=f"{what}: through TMA")
    gemm_host.run_gemm(operands, PLAIN, CONFIG)
    assert_close(operands.out, right, dtype=case.out_dtype, reduction=terms, what=f"{what}: host twin")


@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("transposed", [False, True])
def test_types_and_layouts(dtype: torch.dtype, activation: str | None, transposed: bool) -> None:
    seed = int(torch.randint(2**31, ()))
    scales = "channel" if dtype in SCALED_DTYPES else "none"
    case = gemm_case(
        (37, 48, 64), dtype, seed, bias=True, activation=activation, scales=scales, transposed_weight=transposed
    )
    check(case, f"seed {seed}")


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("bias", [False, True])
def test_activations(activation: str, bias: bool) -> None:
    seed = int(torch.randint(2**31, ()))
    check(gemm_case((20, 40, 32), torch.float32, seed, bias=bias, activation=activation), f"seed {seed}")


@pytest.mark.parametrize("scales", ["none", "tensor", "channel"])
@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
def test_scales_and_types_of_the_result(scales: str, out_dtype: torch.dtype) -> None:
    seed = int(torch.randint(2**31, ()))
    for dtype, weight_dtype in ((torch.int8, None), (torch.float8_e4m3fn, torch.float8_e5m2)):
        case = gemm_case(
            (18, 36, 48), dtype, seed, bias=True, scales=scales, out_dtype=out_dtype, weight_dtype=weight_dtype
        )
        check(case, f"{dtype}, seed {seed}")


@pytest.mark.parametrize("bias_dtype", FLOATS, ids=str)
def test_a_bias_of_another_type(bias_dtype: torch.dtype) -> None:
    case = gemm_case((17, 33, 16), torch.bfloat16, int(torch.randint(2**31, ())), bias=True)
    case = dataclasses.replace(case, biases=tuple(each.to(bias_dtype) for each in case.biases))
    check(case)


def test_a_bias_that_another_rank_adds() -> None:
    case = gemm_case((17, 33, 16), torch.float32, int(torch.randint(2**31, ())), bias=True)
    without = dataclasses.replace(case, biases=(None,))
    operands = dataclasses.replace(make_operands(case), adds_bias=False)
    for use_tma in (False, True):
        assert_close(run(operands, use_tma=use_tma), expected(without, "gemm"), dtype=torch.float32, reduction=16)
    gemm_host.run_gemm(operands, PLAIN, CONFIG)
    assert_close(operands.out, expected(without, "gemm"), dtype=torch.float32, reduction=16)


@settings(max_examples=25, deadline=None)
@given(dense_shapes(40).filter(lambda shape: 0 not in shape[:2]), st.sampled_from(DENSE_DTYPES), st.data())
def test_odd_sizes(shape: tuple[int, int, int], dtype: torch.dtype, data: st.DataObject) -> None:
    gated = data.draw(st.booleans())
    case = gemm_case(
        shape, dtype, data.draw(st.integers(0, 2**31)), bias=data.draw(st.booleans()),
        activation="swiglu" if gated else None, transposed_weight=data.draw(st.booleans()),
        scales=data.draw(st.sampled_from(["none", "tensor", "channel"])) if dtype in SCALED_DTYPES else "none",
    )  # fmt: skip
    operands = make_operands(case)
    found = run(operands, use_tma=False)
    assert_close(found, expected(case, "gemm"), dtype=case.out_dtype, reduction=reduction(case, "gemm"))


def test_rows_that_lie_apart_and_results_that_are_not_aligned() -> None:
    """Strides of x and of the weight are their own; an address that is no multiple of 16 takes the narrow way."""
    x, weight = torch.randn(20, 64)[:, 3:36], torch.randn(50, 40)[:, :33]
    right = x.double() @ weight.double().t()
    for offset in range(3):
        buffer = poisoned((20 * 50 + 3,), torch.float32)
        out = buffer[offset : offset + 1000].view(20, 50)
        launch_gemm(Operands(x, weight, out), PLAIN, CONFIG, use_tma=False)
        assert_close(out, right, dtype=torch.float32, reduction=33)
        assert buffer[:offset].isnan().all() and buffer[offset + 1000 :].isnan().all()


@pytest.mark.parametrize("num_sms", [3, 64])
@pytest.mark.parametrize("group_m", [1, 3])
def test_any_number_of_programs_gives_the_same_bits(num_sms: int, group_m: int) -> None:
    case = gemm_case((70, 40, 32), torch.bfloat16, int(torch.randint(2**31, ())), bias=True)
    operands = make_operands(case)
    one = run(operands, use_tma=False, config=dataclasses.replace(CONFIG, num_sms=None))
    config = dataclasses.replace(CONFIG, num_sms=num_sms, group_m=group_m)
    assert_close(run(operands, use_tma=False, config=config), one, reduction=0)


def test_int8_is_summed_in_integers() -> None:
    """The sums need more than the 24 bits of fp32."""
    x, weight = (torch.full((3, 2000), 127, dtype=torch.int8) for _ in range(2))
    weight[:, ::2] = 126
    weight[1, 7] = 1
    out = poisoned((3, 3), torch.float32)
    launch_gemm(Operands(x, weight, out, scale_x=torch.tensor(2.0**-6)), PLAIN, CONFIG, use_tma=False)
    right = (x.double() @ weight.double().t()).float() * 2.0**-6
    assert torch.equal(out, right)


@triton.jit
def _store_count(value, out, place, table, SPEC: tl.constexpr):
    """Instead of the product: how many steps had been fetched when it was finished."""
    fetched = tl.load(_control(table, word(table, RANK), SPEC.world_size) + _FETCHED)
    store_tile(value * 0 + fetched, out, place, table, SPEC)


@pytest.mark.parametrize("releases", [False, True])
def test_a_program_fetches_one_step_ahead_and_no_more(monkeypatch: pytest.MonkeyPatch, releases: bool) -> None:
    """Interpreted programs run one after the other, so the first has all tiles; the others leave at once."""
    monkeypatch.setattr(gemm_launch, "fetches_tiles", lambda group, config, role: True)
    groups = tileflux.local_groups(2)
    here = turn(groups[0], gather_shards("counts", (30, 40), 64, False, 1))
    operands = Operands(torch.randn(70, 16), torch.randn(90, 16), poisoned((70, 90), torch.float32))
    role = Role("counts", arrival_order, wait_for_nothing, _store_count, is_sharded=False)
    num_m, num_n = 5, 3
    order = replay(arrival_order)
    for _ in range(2):
        operands.out.fill_(float("nan"))
        launch_gemm(operands, role, CONFIG, group=groups[0], turn=here, releases=releases)
        for step in range(num_m * num_n):
            _, _, m, n, _ = order(step, 0, 1, 1, num_m, num_n, CONFIG.group_m, (1, 0))
            tile = operands.out[16 * m : 16 * (m + 1), 32 * n : 32 * (n + 1)]
            assert tile.eq(step + 2).all(), f"step {step}: itself, those before, and the next one"
        words = here._control.view(dtype=torch.int32)
        assert words[CONTROL.fetched] == words[CONTROL.done] == 0, "ready for the next launch"
    assert here.epoch() == (2 if releases else 0)
    for group in groups:
        group.close()


def test_a_call_that_gives_up_leaves_no_count_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_launch, "fetches_tiles", lambda group, config, role: True)
    groups = tileflux.local_groups(2, timeout_s=0.2)
    turns = [turn(group, scatter_shards("gemm_rs", (30, 40), 90, 4, CONFIG)) for group in groups]
    operands = Operands(torch.randn(70, 16), torch.randn(90, 16), poisoned((30, 90), torch.float32))
    launch_gemm(operands, SCATTER, CONFIG, group=groups[0], turn=turns[0], releases=True)
    with pytest.raises(PeerTimeout, match="rank 1"):
        groups[0].synchronize()
    words = turns[0]._control.view(dtype=torch.int32)
    assert words[CONTROL.fetched] == words[CONTROL.done] == 0 and words[CONTROL.epoch] == 1
    for group in groups:
        group.close()


def _gather_whole_tiles(group: Group, seed: int) -> None:
    """TMA also loads rows behind the end of a shard, which may still be on their way, and drops them."""
    Call("ag_gemm", 16, dtype=torch.bfloat16).run(group, seed)
    Call("ag_gemm", 32, dtype=torch.int8, scales="channel", num_weights=2, returns_rows=True).run(group, seed)


def test_gathered_rows_are_read_through_a_descriptor_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from tileflux.testing import interpreter
    from tileflux.testing.simulator import simulate

    interpreter.register_asm(lang_signal.PROXY_FENCE.value, lambda lanes: None)
    monkeypatch.setattr(gemm_launch, "_has_tma", lambda device: True)
    for seed in range(3):
        simulate(_gather_whole_tiles, 2, seed=seed, args=(seed,))
