"""What is compared among ranks: every contender gives the right result, and a wrong one does not pass its check."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tileflux
from tileflux import ops
from tileflux.symm import cuda
from tileflux.symm.group import Group
from tileflux.testing import contenders as module
from tileflux.testing import run_ranks
from tileflux.testing.contenders import Suite, draw, gemm_suite, group_suite, product
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
        assert "need ranks that are processes with GPUs" in found["skipped"]["torch"]


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


class StandIn:
    """Torch's sums of symmetric memory without a GPU: as its kernels add, part by part in the order of ranks."""

    group: Group

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.empty(shape, dtype=dtype, device=device)

    def all_reduce(self, way: str, out: torch.Tensor) -> torch.Tensor:
        parts = ops.all_gather(self.buffer, group=self.group).chunk(self.group.world_size)
        found = out if way == "one-shot" else self.buffer
        found.copy_(sum(parts[1:], start=parts[0]))
        return found


def _with_stand_in(group: Group, dtype: str, break_it: str) -> dict[str, object]:
    """What is tried where ranks have GPUs, and which of torch's results pass."""

    class Broken(StandIn):
        def all_reduce(self, way: str, out: torch.Tensor) -> torch.Tensor:
            found = super().all_reduce(way, out)
            if way == break_it and group.rank == 1:
                found[-1, -1] += 4.0
            return found

    StandIn.group = group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "SymmetricSum", Broken)
        task = module._TASKS["gemm_ar"](group, "gemm_ar", SHAPES[2], getattr(torch, dtype))
        with patch.context() as on_gpus:
            on_gpus.setattr(Group, "transport", "cuda")
            found, skipped = task.by_torch()
        suite = Suite({}, found, task.poison, "")
        if not break_it:
            try_all(group, suite)
        right = []
        for each in found:
            suite.poison()
            assert not passes(suite, each.name)
            each.run()
            right += [each.name] if passes(suite, each.name) else []
    return {"names": [each.name for each in found], "skipped": skipped, "right": right}


SUMS = ["torch one-shot", "torch two-shot"]


@pytest.mark.parametrize(("world_size", "dtype"), [(2, "float32"), (3, "bfloat16")])
def test_torchs_sums_are_tried_one_by_one(world_size: int, dtype: str) -> None:
    for found in run_ranks(_with_stand_in, world_size, args=(dtype, "")):
        assert found["names"] == found["right"] == SUMS
        assert found["skipped"] == {"torch multimem": "these ranks have no multicast"}


def test_torch_may_round_after_every_part_where_it_does() -> None:
    """Of eight ranks in bf16 that is more than a sum that is rounded once may be off."""
    m, n, k = 512, 512, 64
    groups = tileflux.local_groups(8)
    task = module._AllReduce(groups[3], "gemm_ar", (m, n, k), torch.bfloat16)
    shards = [[draw(first + rank, (rows, k // 8), torch.bfloat16, torch.device("cpu")) for rank in range(8)]
              for first, rows in ((0, m), (100, n))]  # fmt: skip
    parts = [product(x, weight).bfloat16() for x, weight in zip(*shards, strict=True)]
    task.torch_out = sum(parts[1:], start=parts[0])
    task._check_sum("one-shot")
    task._check_sum("two-shot")
    with pytest.raises(AssertionError, match="more than rounding explains"):
        task._check_sum("multimem")
    task.torch_out = task.expected.bfloat16()
    task._check_sum("multimem")
    for group in groups:
        group.close()


@pytest.mark.parametrize("way", ["one-shot", "two-shot"])
def test_one_wrong_element_of_torchs_sum_is_seen_where_it_is(way: str) -> None:
    first, second = run_ranks(_with_stand_in, 2, args=("float32", way))
    assert first["right"] == SUMS and second["right"] == [name for name in SUMS if name != f"torch {way}"]


def test_sums_that_torch_would_refuse_are_left_out_with_the_reason() -> None:
    task = object.__new__(module._AllReduce)
    task.group = SimpleNamespace(transport="cuda", traits=SimpleNamespace(has_multicast=True))  # type: ignore[assignment]
    task.shape, task.dtype = (3, 5, 8), torch.bfloat16
    found, skipped = task.by_torch()
    assert not found and list(skipped) == [*SUMS, "torch multimem"]
    assert all("multiples of 4 bytes, not 30" in why for why in skipped.values())
    task.shape = (3, 6, 8)
    found, skipped = task.by_torch()
    assert [each.name for each in found] == [*SUMS, "torch multimem"] and not skipped


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(256, 128, 128), (3, 50, 64)])
def test_torchs_sums_on_a_shared_gpu(shape: tuple[int, int, int], dtype: str) -> None:
    for found in run_ranks(_repeat_sums, 2, args=(shape, dtype), where="mps", timeout_s=120):
        assert found == (SUMS, {"torch multimem": "these ranks have no multicast"})


def _repeat_sums(group: Group, shape: tuple[int, int, int], dtype: str) -> tuple[list[str], dict[str, str]]:
    """All of them through the same buffer, and back to back: a product must not overwrite what a peer still reads."""
    suite = group_suite(group, "gemm_ar", shape, dtype, ())
    try_all(group, suite)
    sums = [each for each in suite.contenders if each.name.startswith("torch")]
    for each in sums:
        suite.poison()
        group.synchronize()
        group.barrier()
        for _ in range(50):
            each.run()
        group.synchronize()
        each.check()
        group.barrier()
    return [each.name for each in sums], suite.skipped
