"""The dense ops together: what all refuse, mixed calls back to back, the memory they hold, and ranks that are lost."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import signal
import time
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tileflux
from tileflux import GemmConfig
from tileflux.config import CONTROL
from tileflux.errors import GroupBroken, MismatchError, PeerTimeout
from tileflux.kernels import dense, direct, gemm_host, scatter
from tileflux.kernels.turns import Turn
from tileflux.ops import _dense
from tileflux.symm.group import Group
from tileflux.testing import Died, assert_close, run_ranks
from tileflux.testing.dense import DENSE_DTYPES, ag_case, rs_case

from .dense_cases import (
    SMALL,
    STRATEGIES,
    check_call,
    drawn_case,
    drawn_settings,
    install_interpreter,
    interpreted,
    needs_interpreter,
)

OPS = ("gemm", "ag_gemm", "gemm_rs", "gemm_ar")
GROUP_OPS = OPS[1:]
INT8 = {"x": torch.ones(4, 3, dtype=torch.int8), "weight": torch.ones(6, 3, dtype=torch.int8)}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": torch.ones(4)}, r"x should be two-dimensional, not \(4,\); flatten the others"),
        ({"x": torch.ones(2, 4, 3)}, r"x should be two-dimensional, not \(2, 4, 3\)"),
        ({"weight": torch.ones(3)}, r"weight should be two-dimensional, not \(3,\)"),
        ({"weight": torch.ones(3, 6)}, r"x \(4, 3\) and weight \(3, 6\) differ in K; weight is \[N, K\], so pass w.t"),
        ({"weight": torch.ones(12, 6)[::2, ::2]}, r"weight has strides \(12, 2\); one of its dimensions must be"),
        ({"x": torch.ones(4, 3).double()}, "x is torch.float64; what can be multiplied is float32, float16, "),
        ({"x": torch.ones(4, 3).int()}, "x is torch.int32; what can be multiplied is float32"),
        ({"weight": torch.ones(6, 3).half()}, "x is torch.float32 and weight torch.float16; they must be of one type"),
        (INT8 | {"weight": torch.ones(6, 3).to(torch.float8_e5m2)}, "x is torch.int8 and weight torch.float8_e5m2"),
        ({"scale_x": 0.5}, "scales belong to fp8 and int8; x is torch.float32, so multiply it beforehand"),
        ({"scale_weight": torch.ones(6)}, "scales belong to fp8 and int8; x is torch.float32"),
        ({"bias": torch.ones(5)}, r"bias should have shape \(6,\) and type float32, float16 or bfloat16, not \(5,\)"),
        ({"bias": torch.ones(6, 1)}, r"bias should have shape \(6,\)"),
        ({"bias": torch.ones(6).double()}, r"bias should have .* not \(6,\) torch.float64"),
        (INT8 | {"bias": torch.ones(6, dtype=torch.int8)}, r"bias should have .* not \(6,\) torch.int8"),
        (INT8 | {"scale_x": "half"}, "scale_x should be a number or a float32 tensor, not str"),
        (INT8 | {"scale_x": torch.ones(6)}, r"scale_x should be float32 on cpu, a scalar or of shape \(4,\)"),
        (INT8 | {"scale_x": torch.ones(4, 1)}, r"scale_x should be .* not \(4, 1\)"),
        (INT8 | {"scale_weight": torch.ones(4)}, r"scale_weight should be float32 on cpu, a scalar or of shape \(6,\)"),
        (INT8 | {"scale_weight": torch.ones(6).half()}, "scale_weight should be .* torch.float16 on cpu"),
        (INT8 | {"scale_weight": torch.ones(6, device="meta")}, "scale_weight should be .* on meta"),
        ({"out_dtype": torch.float64}, "out_dtype=torch.float64 should be torch.float32, torch.float16 or"),
        (INT8 | {"out_dtype": torch.int32}, "out_dtype=torch.int32 should be"),
    ],
)  # fmt: skip
def test_refusals(op: str, given: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.ones(4, 3), "weight": torch.ones(6, 3)} | given
    (group,) = tileflux.local_groups(1)
    with group, pytest.raises(ValueError, match=f"{op}: {message}"):
        getattr(tileflux, op)(**arguments, **({} if op == "gemm" else {"group": group}))


@pytest.mark.parametrize("op", ["gemm", "ag_gemm"])
def test_refusals_of_activations(op: str) -> None:
    (group,) = tileflux.local_groups(1)
    placed = {} if op == "gemm" else {"group": group}
    with group:
        with pytest.raises(ValueError, match=f"{op}: activation='tanh' should be None or one of relu, gelu, silu,"):
            getattr(tileflux, op)(torch.ones(4, 3), torch.ones(6, 3), activation="tanh", **placed)
        with pytest.raises(ValueError, match=rf"{op}: swiglu wants gate and up packed as \[2 F, K\]; weight has 5"):
            getattr(tileflux, op)(torch.ones(4, 3), torch.ones(5, 3), activation="swiglu", **placed)


def test_fp8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        x = torch.empty(4, 4, dtype=torch.float8_e4m3fn, device="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ValueError, match="gemm: torch.float8_e4m3fn needs a GPU of compute capability 8.9 or later"):
        _dense._check_types("gemm", x, x, has_scales=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    _dense._check_types("gemm", x, x, has_scales=False)


def test_a_refused_call_leaves_the_group_usable() -> None:
    (group,) = tileflux.local_groups(1)
    with group:
        for op in GROUP_OPS:
            with pytest.raises(ValueError, match="differ in K"):
                getattr(tileflux, op)(torch.ones(4, 3), torch.ones(6, 2), group=group)
            getattr(tileflux, op)(torch.ones(4, 3), torch.ones(6, 3), group=group)


def test_configurations_survive_the_dispatcher() -> None:
    numbers = GemmConfig(32, 64, 16, 1, 2, 3, 4, 5, 6, 7, 8)
    for config in (
        None,
        GemmConfig(),
        SMALL,
        numbers,
        GemmConfig(hopper=True),
        GemmConfig(fetches=True),
        GemmConfig(sums_apart=True),
    ):
        # By what they say: a switch that has become a number is equal to one, and none.
        assert repr(_dense.config_from(_dense.config_text(config))) == repr(config)
    assert _dense.config_text(dataclasses.replace(numbers, hopper=True)).startswith("32 64 16 1 2 3 4 5 6 7 8 0 0 1")


def test_a_fallback_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    _dense._say_once.cache_clear()
    problem = tileflux.config.GemmProblem("gemm_rs", 64, 64, 64, 4, "bfloat16", arch=90, num_sms=132)
    with caplog.at_level(logging.INFO, logger="tileflux"):
        for _ in range(3):
            assert _dense.choose(problem, "auto", None).strategy == "sequential"
        _dense.choose(problem, "fused", None)
    assert [record.getMessage() for record in caplog.records] == [
        "gemm_rs runs sequential: 16 rows per rank are less than one tile of 128: nothing to overlap"
    ]


def _strategies(group: Group) -> None:
    """Each strategy leaves other traces: in the regions, and in how many products the host makes."""
    products: list[int] = []
    product = gemm_host._Weight.product

    def counted(*arguments: Any) -> torch.Tensor:
        products.append(1)
        return product(*arguments)

    gemm_host._Weight.product = counted  # type: ignore[method-assign]
    x, weight = torch.ones(32, 8), torch.ones(32, 8)
    for op in GROUP_OPS:
        name = {"gemm_ar": "gemm_rs"}.get(op, op)
        rows = 64 if op == "ag_gemm" else 32
        shot = {"algorithm": "two_shot"} if op == "gemm_ar" else {}
        for strategy, num_products in (("sequential", rows // 16 * 2), ("pipelined", 2), ("fused", rows // 16 * 2)):
            products.clear()
            getattr(tileflux, op)(x, weight, group=group, strategy=strategy, config=SMALL, **shot)
            assert len(products) == num_products, f"{op}, {strategy}"
            assert op == "gemm_ar" or (f"{name}.data" in group.memory_summary().region_bytes) == (
                strategy != "sequential"
            )
    assert "gemm_ar.data" not in group.memory_summary().region_bytes
    tileflux.gemm_ar(x, weight, group=group, strategy="fused", algorithm="one_shot")
    assert "gemm_ar.data" in group.memory_summary().region_bytes


def test_the_strategy_asked_for_is_what_runs() -> None:
    run_ranks(_strategies, 2)


def _spied(module: Any, name: str, ran: list[str]) -> None:
    real = getattr(module, name)

    def spy(*arguments: Any, **named: Any) -> Any:
        ran.append(name)
        return real(*arguments, **named)

    setattr(module, name, spy)


def _kernels_by_strategy(group: Group) -> dict[str, list[str]]:
    ran: list[str] = []
    for name in ("_multiply_arriving", "launch_gemm", "move"):
        _spied(dense, name, ran)
    for name in ("_push_finished", "launch_gemm", "reduce"):
        _spied(scatter, name, ran)
    for name in ("gather", "pull"):
        _spied(direct, name, ran)
    found = {}
    with interpreted():
        for op in ("ag_gemm", "gemm_rs"):
            for strategy in STRATEGIES:
                ran.clear()
                getattr(tileflux, op)(torch.ones(4, 4), torch.ones(4, 4), group=group, strategy=strategy, config=SMALL)
                found[f"{op} {strategy}"] = list(ran)
    return found


@needs_interpreter
def test_the_strategy_asked_for_is_what_is_launched() -> None:
    install_interpreter()
    for found in run_ranks(_kernels_by_strategy, 2):
        assert found == {
            "ag_gemm sequential": ["gather"],
            "ag_gemm pipelined": ["_multiply_arriving"],
            "ag_gemm fused": ["launch_gemm"],
            "gemm_rs sequential": ["pull"],
            "gemm_rs pipelined": ["_push_finished"],
            "gemm_rs fused": ["launch_gemm"],
        }


def _soak(group: Group, num_calls: int, seed: int) -> None:
    """Mixed ops of random sizes, each checked; ranks dawdle at random, so that each is now ahead, now behind."""
    draws, pauses = random.Random(seed), random.Random(group.rank)
    for _ in range(num_calls):
        op = draws.choice(GROUP_OPS)
        shape = (draws.randrange(0, 70), draws.randrange(0, 50), draws.randrange(0, 40))
        case = drawn_case(op, group.world_size, shape, draws.choice(DENSE_DTYPES), draws)
        settings = drawn_settings(op, draws)
        if pauses.random() < 0.2:
            time.sleep(0.003 * pauses.random())
        check_call(group, op, case, draws, **settings)


def test_mixed_calls_back_to_back() -> None:
    run_ranks(_soak, 4, args=(200, 1))


def _virtual(rank: int, world_size: int) -> None:
    run_ranks(_soak, 3, args=(60, 2), where="virtual")


def test_mixed_calls_of_virtual_ranks() -> None:
    # In a process of its own: a fork soon after several threads have multiplied may find a lock of the BLAS held.
    run_ranks(_virtual, 1, make_group=False)


def test_mixed_calls_with_checking_on() -> None:
    run_ranks(_soak, 2, args=(40, 3), group_kwargs={"check": True})


def _memory(group: Group) -> dict[str, int]:
    world_size, rank = group.world_size, group.rank
    case = ag_case(world_size, (50, 40, 24), torch.bfloat16, 1, ragged=True)
    tileflux.ag_gemm(**case.arguments("ag_gemm", rank), group=group, strategy="fused")
    assert group.memory_summary().region_bytes["ag_gemm.data"] == 50 * 24 * 2
    case = rs_case(world_size, (50, 40, 24), torch.bfloat16, 1)
    tileflux.gemm_rs(**case.arguments("gemm_rs", rank), group=group, strategy="fused")
    held = group.memory_summary().region_bytes
    assert 2 * 50 * 40 * 2 <= held["gemm_rs.data"] <= -(-2 * world_size * -(-50 // world_size) * 40 * 2 // 512) * 512
    return held


def test_an_op_holds_its_rows_or_two_partial_sums() -> None:
    for held in run_ranks(_memory, 4):
        assert {name for name in held if name.startswith(("ag_gemm", "gemm_rs"))} == {
            f"{op}.{part}" for op in ("ag_gemm", "gemm_rs") for part in ("control", "flags", "data")
        }
        assert held["ag_gemm.control"] == CONTROL.nbytes(4)


def _scaled_memory(group: Group) -> int:
    case = ag_case(group.world_size, (50, 40, 25), torch.int8, 1, scales="tensor")
    tileflux.ag_gemm(**case.arguments("ag_gemm", group.rank), group=group, strategy="fused")
    return group.memory_summary().region_bytes["ag_gemm.data"]


def test_scales_take_four_bytes_a_row() -> None:
    assert run_ranks(_scaled_memory, 2) == [1280 + 4 * 50] * 2


def _layers(group: Group) -> None:
    """Layers of one model share the buffers; a larger batch makes them grow, and a smaller one finds room."""
    draws, held = random.Random(8), []
    for layer in range(80):
        for op in ("ag_gemm", "gemm_rs", "gemm_ar"):
            case = drawn_case(op, group.world_size, (30, 48, 40), torch.bfloat16, random.Random(layer))
            settings = {"algorithm": "one_shot"} if op == "gemm_ar" else {}
            case = dataclasses.replace(case, out_dtype=torch.bfloat16)
            check_call(group, op, case, draws, strategy="fused", **settings)
        held.append(group.memory_summary())
    assert all(later.heap_bytes == held[0].heap_bytes and later.retired_bytes == 0 for later in held)
    before = held[0].region_bytes
    for rows in (150, 30, 151, 7):
        for op, settings in (("ag_gemm", {}), ("gemm_rs", {}), ("gemm_ar", {"algorithm": "one_shot"})):
            case = drawn_case(op, group.world_size, (rows, 48, 40), torch.float32, draws)
            check_call(group, op, case, draws, strategy="fused", **settings)
    after = group.memory_summary()
    assert after.retired_bytes > 0
    assert all(after.region_bytes[f"{op}.data"] >= 4 * before[f"{op}.data"] for op in GROUP_OPS)


def test_eighty_layers_hold_what_one_does_and_grow_together() -> None:
    run_ranks(_layers, 2)


def _other_tiles(group: Group, op: str, cut: str) -> str:
    x, weight = torch.ones(8, 8), torch.ones(8, 8)
    changes = {"tiles": {"block_m": 16 << group.rank}, "slabs": {"num_chunks": 1 + group.rank}}[cut]
    with pytest.raises(MismatchError) as caught:
        config = GemmConfig(**{"block_m": 16, "block_n": 16, "block_k": 16, **changes})
        getattr(tileflux, op)(x, weight, group=group, strategy="fused", config=config)
    return str(caught.value)


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
@pytest.mark.parametrize("cut", ["tiles", "slabs"])
def test_ranks_that_cut_differently_are_told_when_checking_is_on(op: str, cut: str) -> None:
    for message in run_ranks(_other_tiles, 2, args=(op, cut), group_kwargs={"check": True}):
        assert op in message


def _die_in_the_next(group: Group, op: str) -> None:
    """Before the rows are sent, or after the first tile is."""
    raise_flag = Turn.raise_flag

    def raise_and_die(self: Turn, owner: int, index: int) -> None:
        raise_flag(self, owner, index)
        os.kill(os.getpid(), signal.SIGKILL)

    if op == "ag_gemm":
        group.copy_async = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    else:
        Turn.raise_flag = raise_and_die  # type: ignore[method-assign]


def _until_killed(group: Group, victim: int, op: str) -> tuple[PeerTimeout, float]:
    """Calls ``op`` until the victim, which kills itself in the middle of one, is missed."""
    x, weight = torch.randn(64, 8), torch.randn(64, 8)
    for call in range(1000):
        if group.rank == victim and call == 3:
            _die_in_the_next(group, op)
        start = time.monotonic()
        try:
            getattr(tileflux, op)(x, weight, group=group, strategy="fused", config=SMALL)
        except PeerTimeout as error:
            seconds = time.monotonic() - start
            with pytest.raises(GroupBroken, match="make a new one"):
                getattr(tileflux, op)(x, weight, group=group)
            return error, seconds
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("op", GROUP_OPS)
def test_a_killed_rank_is_named_by_all_others(op: str) -> None:
    results = run_ranks(_until_killed, 3, args=(1, op), group_kwargs={"timeout_s": 10.0}, may_die={1})
    assert isinstance(results[1], Died)
    for rank in (0, 2):
        error, seconds = results[rank]
        assert (error.peer, error.rank, error.op) == (1, rank, op), str(error)
        assert error.flag.startswith((f"{op}.flags.", f"{op}.control.ack[rank")), error.flag
        assert "is gone" in str(error) and seconds < 5.0


def _empty_everywhere(group: Group) -> None:
    """Nothing to compute is still a result: of the right shape, with the bias where there are no terms."""
    for strategy in ("auto", *STRATEGIES):
        none = tileflux.ag_gemm(torch.ones(3, 0), torch.ones(4, 0), torch.arange(4.0), group=group, strategy=strategy)
        assert_close(none, torch.arange(4.0).expand(3 * group.world_size, 4).contiguous(), reduction=0)
        for op in ("gemm_rs", "gemm_ar"):
            y = getattr(tileflux, op)(
                torch.ones(2 * group.world_size, 0), torch.ones(4, 0), torch.arange(4.0), group=group, strategy=strategy
            )
            rows = 2 if op == "gemm_rs" else 2 * group.world_size
            assert_close(y, torch.arange(4.0).expand(rows, 4).contiguous(), reduction=0, what=f"{op} {strategy}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_sums_of_no_terms(world_size: int) -> None:
    run_ranks(_empty_everywhere, world_size)
