"""What is compared among ranks: every contender gives the right result, and a wrong one does not pass its check."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tileflux import ops
from tileflux.symm.group import Group
from tileflux.testing import contenders as module
from tileflux.testing import run_ranks
from tileflux.testing.contenders import draw, gemm_suite, group_suite, product
from tileflux.tune.lookup import STRATEGIES

from .suites import passes, try_all

OURS = tuple(f"ours {strategy}" for strategy in STRATEGIES if strategy != "pipelined")
SHAPES = {2: (64, 48, 32), 3: (65, 50, 34)}
"""By world size; with three ranks nothing divides."""
OPS = ("ag_gemm", "gemm_rs", "gemm_ar")


def _try_all(group: Group, op: str, shape: tuple[int, int, int], dtype: str) -> dict[str, object]:
    suite = group_suite(group, op, shape, dtype, STRATEGIES)
    try_all(group, suite)
    return {
        "names": [contender.name for contender in suite.contenders],
        "parts": list(suite.parts),
        "skipped": suite.skipped,
        "auto": suite.auto,
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_contender_is_right(world_size: int, op: str, dtype: str) -> None:
    for found in run_ranks(_try_all, world_size, args=(op, SHAPES[world_size], dtype)):
        assert found["names"] == ["sequential", "pipelined", *OURS]
        assert found["parts"] == ["gemm", "comm", "beside"]
        assert found["auto"] in STRATEGIES and found["auto"] != "auto"
        assert list(found["skipped"]) == ["torch"]
        reason = "no fused matmul and all-reduce" if op == "gemm_ar" else "need ranks that are processes with GPUs"
        assert reason in found["skipped"]["torch"]


def _run_parts(group: Group, op: str, shape: tuple[int, int, int]) -> None:
    """The parts alone do what the whole is made of."""
    task = module._TASKS[op](group, op, shape, torch.float32)
    parts = task.parts()
    whole = product(task.factor, task.weight)
    for name in ("gemm", "beside"):
        task.whole.fill_(torch.nan)
        group.barrier()
        parts[name]()
        module.assert_close(task.whole, whole, reduction=shape[2])
    group.barrier()
    task.poison()
    if op == "ag_gemm":
        task._gathered.fill_(torch.nan)
        parts["comm"]()
        assert torch.equal(task._gathered, task.factor)
    else:
        parts["comm"]()
        task.check()


@pytest.mark.parametrize("op", OPS)
def test_the_parts_are_the_product_and_the_collective(op: str) -> None:
    run_ranks(_run_parts, 3, args=(op, SHAPES[3]))


def _ours_of(group: Group, strategies: tuple[str, ...]) -> list[str]:
    return [each.name for each in group_suite(group, "gemm_rs", (8, 8, 8), "float32", strategies).contenders]


def test_only_the_strategies_asked_for() -> None:
    for names in run_ranks(_ours_of, 2, args=(("fused", "pipelined"),)):
        assert names == ["sequential", "pipelined", "ours fused"], "ours pipelined is the baseline"


def _off_by_a_little(group: Group, op: str, at: int) -> list[str]:
    """One element of one rank's result is wrong, after the right call. Who notices?"""
    right = getattr(ops, op)

    def wrong(*arguments: object, out: torch.Tensor, **named: object) -> None:
        right(*arguments, out=out, **named)
        if group.rank == at:
            out[-1, -1] += 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, op, wrong)
        suite = group_suite(group, op, SHAPES[2], "float32", STRATEGIES)
        failed = []
        for contender in suite.contenders:
            suite.poison()
            group.barrier()
            contender.run()
            if not passes(suite, contender.name):
                failed.append(contender.name)
    return failed


@pytest.mark.parametrize("op", OPS)
def test_one_wrong_element_on_one_rank_is_seen_there(op: str) -> None:
    assert run_ranks(_off_by_a_little, 2, args=(op, 1)) == [[], ["pipelined", *OURS]]


def _split_sums(group: Group, op: str, shape: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the rank expects, and what the whole problem is: every rank can draw it."""
    task = module._TASKS[op](group, op, shape, torch.float32)
    return task.expected, task.x


@pytest.mark.parametrize("op", OPS)
def test_what_is_expected_is_the_sum_or_the_product_of_what_all_ranks_hold(op: str) -> None:
    """Put together from what ranks bring, not from what the module says of its peers."""
    m, n, k = SHAPES[3]
    found = run_ranks(_split_sums, 3, args=(op, (m, n, k)))
    expected = [each for each, _ in found]
    xs = [x for _, x in found]
    assert [tuple(x.shape) for x in xs] == (
        [(22, k), (22, k), (21, k)] if op == "ag_gemm" else [(m, 12), (m, 11), (m, 11)]
    )
    assert not torch.equal(xs[1], xs[2]), "ranks hold different numbers"
    if op == "ag_gemm":
        assert [tuple(each.shape) for each in expected] == [(m, 17), (m, 17), (m, 16)]
        everything = torch.cat(xs)
        for rank, each in enumerate(expected):
            weight = draw(100 + rank, (each.shape[1], k), torch.float32, torch.device("cpu"))
            assert torch.equal(each, product(everything, weight))
        return
    weights = [draw(100 + rank, (n, x.shape[1]), torch.float32, torch.device("cpu")) for rank, x in enumerate(xs)]
    whole = sum(x.double() @ weight.double().t() for x, weight in zip(xs, weights, strict=True))
    together = torch.cat(expected) if op == "gemm_rs" else expected[0]
    assert tuple(together.shape) == (m, n)
    module.assert_close(together, whole, reduction=k)
    if op == "gemm_ar":
        assert all(torch.equal(each, expected[0]) for each in expected)
    else:
        assert [len(each) for each in expected] == [22, 22, 21]


def test_drawn_numbers_depend_on_the_seed_alone() -> None:
    cpu = torch.device("cpu")
    one, other = draw(5, (3, 4), torch.float32, cpu), draw(6, (3, 4), torch.float32, cpu)
    torch.manual_seed(int(torch.randint(1000, ())))
    assert torch.equal(one, draw(5, (3, 4), torch.float32, cpu)) and not torch.equal(one, other)
    assert torch.equal(draw(5, (3, 4), torch.bfloat16, cpu), one.bfloat16())


def test_a_product_is_summed_in_fp32() -> None:
    x, weight = torch.randn(5, 300).bfloat16(), torch.randn(7, 300).bfloat16()
    found = product(x, weight)
    assert found.dtype == torch.float32
    module.assert_close(found, x.double() @ weight.double().t(), reduction=300)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_plain_product_against_the_librarys(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = gemm_suite(torch.device("cpu"), 33, 17, 40, dtype)
    assert [each.name for each in suite.contenders] == ["torch", "ours"] and list(suite.parts) == ["gemm"]
    assert suite.auto == "" and suite.skipped == {}
    for contender in suite.contenders:
        suite.poison()
        assert not passes(suite, contender.name)
        contender.run()
        contender.check()
    monkeypatch.setattr(ops, "gemm", lambda x, weight, out: out.copy_(torch.mm(x, weight.t()).roll(1, 0)))
    for name, is_right in (("torch", True), ("ours", False)):
        suite.poison()
        next(each for each in suite.contenders if each.name == name).run()
        assert passes(suite, name) == is_right


@pytest.mark.parametrize(
    ("op", "transport", "rows", "reason"),
    [
        ("ag_gemm", "cuda", (4, 4), ""),
        ("gemm_rs", "cuda", (4, 4), ""),
        ("gemm_ar", "cuda", (4, 4), "no fused matmul and all-reduce"),
        ("ag_gemm", "local", (4, 4), "processes with GPUs"),
        ("gemm_rs", "cuda", (4, 3), "rows that divide by the ranks"),
    ],
)
def test_why_torch_is_not_tried(op: str, transport: str, rows: tuple[int, ...], reason: str) -> None:
    task = object.__new__(module._TASKS[op])
    task.op, task.rows, task.group = op, rows, SimpleNamespace(transport=transport)  # type: ignore[assignment]
    found = task.why_not_torch()
    assert reason in found and bool(reason) == bool(found)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_on_a_shared_gpu(op: str) -> None:
    for found in run_ranks(_try_all_on_gpu, 2, args=(op, (256, 128, 128)), where="mps", timeout_s=120):
        assert found["names"][:2] == ["sequential", "pipelined"] and set(OURS) <= set(found["names"])


def _try_all_on_gpu(group: Group, op: str, shape: tuple[int, int, int]) -> dict[str, object]:
    suite = group_suite(group, op, shape, "bfloat16", STRATEGIES)
    try_all(group, suite, skips=("torch",))
    return {"names": [contender.name for contender in suite.contenders]}
