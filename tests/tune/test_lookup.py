"""lookup: the same for all ranks of a call, the same every time, and by rules that can be said."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tileflux.config import GemmConfig, GemmProblem
from tileflux.symm.base import Traits
from tileflux.tune import lookup as lookup_module
from tileflux.tune import store
from tileflux.tune.lookup import STRATEGIES, Choice, forget, lookup, problem_for, rule
from tileflux.tune.store import Entry

from .entries import H200, drawn, make_entry

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
H100 = {"arch": 90, "num_sms": 132}
GPUS: tuple[dict[str, Any], ...] = (
    {},
    {"arch": 80, "num_sms": 108},
    {**H100, "link": "PCIe"},
    {"arch": 90, "num_sms": 33, "link": "same GPU"},
    {"arch": 100, "num_sms": 148, "link": "NVLink"},
)

sizes = st.sampled_from([0, 1, 128, 4096]) | st.integers(0, 20_000)


def problems(*ops: str) -> st.SearchStrategy[GemmProblem]:
    """Problems of these ops, from nothing to large, on any device."""
    return st.builds(
        lambda op, m, n, k, world_size, dtype, is_heavy, gpu: GemmProblem(
            op, m, n, k, world_size, dtype, is_heavy, **gpu
        ),
        st.sampled_from(ops or ("gemm", "ag_gemm", "gemm_rs", "gemm_ar")),
        sizes,
        sizes,
        sizes,
        st.sampled_from([1, 2, 3, 4, 8]),
        st.sampled_from(DTYPES),
        st.booleans(),
        st.sampled_from(GPUS),
    )


@given(problems())
def test_every_problem_has_a_valid_choice(problem: GemmProblem) -> None:
    choice = lookup(problem)
    assert choice.strategy in STRATEGIES[1:]
    assert choice.algorithm in (("one_shot", "two_shot") if problem.op == "gemm_ar" else ("",))
    assert choice.reason and choice.reason[-1] != "."
    assert lookup(dataclasses.replace(problem)) is choice  # cached by value: the hot path pays for a look, no more


def test_looking_up_touches_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "device_info", None)
    assert lookup(GemmProblem("ag_gemm", 8192, 4097, 4096, 8, "bfloat16", **H100)).strategy == "fused"


@given(problems("gemm_rs", "gemm_ar"), sizes)
def test_ranks_of_a_sum_choose_alike_whatever_their_depth(problem: GemmProblem, other_depth: int) -> None:
    """Tiles are announced by number, and a strategy needs all ranks: one that has no terms included."""
    first, second = (lookup(dataclasses.replace(problem, k=k)) for k in (problem.k, other_depth))
    assert _shared(first) == _shared(second)


def _shared(choice: Choice) -> tuple[str, str, GemmConfig]:
    """What ranks must agree on: not how they go through their own tiles."""
    return choice.strategy, choice.algorithm, dataclasses.replace(choice.config, span=1, alone=0)


@given(problems("ag_gemm"), sizes)
def test_ranks_of_a_gather_choose_alike_whatever_their_width(problem: GemmProblem, other_width: int) -> None:
    first, second = (lookup(dataclasses.replace(problem, n=n)) for n in (problem.n, other_width))
    assert first.strategy == second.strategy
    assert first.config.num_chunks == second.config.num_chunks


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_strategies(op: str) -> None:
    def strategy(m: int, n: int = 4096, k: int = 4096, world_size: int = 8, gpu: dict[str, int] = H100) -> str:
        return lookup(GemmProblem(op, m, n, k, world_size, "bfloat16", **gpu)).strategy

    assert strategy(8192) == "fused"
    assert strategy(8192, world_size=1) == "sequential"
    assert strategy(1024) == "fused" and strategy(1016) == "sequential"
    assert strategy(8, gpu={}) == "fused"
    assert strategy(0) == strategy(0, gpu={}) == "sequential"


def test_reasons_have_the_numbers_in_them() -> None:
    small = lookup(GemmProblem("gemm_rs", 800, 4096, 4096, 8, "bfloat16", **H100))
    assert small.reason == "100 rows per rank are less than one tile of 128: nothing to overlap"
    large = lookup(GemmProblem("gemm_rs", 8192, 4096, 4096, 8, "bfloat16", **H100))
    assert large.reason.startswith("1024 rows per rank: ")


def test_small_all_reduces_go_in_one_step() -> None:
    def choice(m: int, world_size: int) -> tuple[str, str]:
        found = lookup(GemmProblem("gemm_ar", m, 4096, 4096, world_size, "bfloat16", **H100))
        return found.strategy, found.algorithm

    assert choice(1, 8) == choice(8, 8) == ("fused", "one_shot")
    assert choice(10, 8) == ("sequential", "two_shot")
    assert choice(8192, 8) == ("fused", "two_shot")
    assert choice(8192, 2) == ("fused", "one_shot")
    assert choice(1, 1) == ("sequential", "one_shot")


@given(problems())
def test_tiles_fit_the_rows(problem: GemmProblem) -> None:
    """A tile is no taller than the rows there are for it, down to what a tensor core wants."""
    config = lookup(problem).config
    if problem.arch:
        rows = problem.m if problem.op in ("gemm", "gemm_ar") else problem.rows_per_rank
        assert 16 <= config.block_m <= 128 and (config.block_m == 16 or config.block_m < 2 * rows)
        assert 1 <= config.num_feeders <= problem.num_sms // 8
        stage = (config.block_m + config.block_n * (2 if problem.is_heavy else 1)) * config.block_k
        itemsize = {"float32": 4, "float16": 2, "bfloat16": 2}.get(problem.dtype, 1)
        assert stage * itemsize * config.num_stages <= 227 * 1024  # shared memory of Hopper


@pytest.mark.parametrize(
    ("op", "m", "n", "link", "tile"),
    [
        ("gemm", 4096, 6144, "", (128, 256)),
        ("gemm", 1024, 6144, "", (128, 128)),  # 192 tiles of 128 x 256 would be two waves of 132, the second half empty
        ("ag_gemm", 1024, 49152, "PCIe", (128, 256)),  # the product is longer than what it gathers
        ("ag_gemm", 1024, 6144, "PCIe", (64, 128)),  # and here it is not: 24 tiles of 128 x 256 at the end
        ("ag_gemm", 1024, 6144, "NVLink", (128, 128)),
        ("gemm_rs", 1024, 12288, "PCIe", (128, 256)),
    ],
)
def test_large_tiles_are_those_that_end_first(op: str, m: int, n: int, link: str, tile: tuple[int, int]) -> None:
    world_size = 1 if op == "gemm" else 8
    config = rule(GemmProblem(op, m, n, 12288, world_size, "bfloat16", link=link, **H100)).config
    assert (config.block_m, config.block_n) == tile
    # Hopper's own loop where it was measured to be the quicker: with these tiles, on SMs of one's own.
    assert config.hopper == (tile[0] == 128)
    shared = rule(GemmProblem(op, m, n, 12288, world_size, "bfloat16", link="same GPU", **H100)).config
    assert (
        not shared.hopper
        and not rule(GemmProblem(op, m, n, 12288, world_size, "int8", link=link, **H100)).config.hopper
    )


@pytest.mark.parametrize(
    ("op", "m", "n", "k", "link", "span", "alone"),
    [
        # 128 rows each: memory could just read the weight for them alone, one's own too.
        ("ag_gemm", 1024, 20480, 12288, "PCIe", 2, -1),
        ("ag_gemm", 1024, 20480, 12288, "same GPU", 2, 1),
        ("ag_gemm", 512, 49152, 12288, "NVLink", 4, 1),
        ("ag_gemm", 2048, 20480, 12288, "PCIe", 2, 3),
        ("ag_gemm", 4096, 28672, 12288, "PCIe", 2, 1),  # the quicker they come, the fewer go alone
        ("ag_gemm", 4096, 20480, 12288, "NVLink", 2, 0),
        ("ag_gemm", 8192, 20480, 12288, "PCIe", 1, 0),  # rows enough for a pass of their own
        ("ag_gemm", 2048, 16384, 12288, "PCIe", 1, 0),  # rows come hardly quicker than they are multiplied
        ("ag_gemm", 1024, 6144, 12288, "PCIe", 1, 0),  # what is gathered takes longer anyway
        ("ag_gemm", 2048, 20480, 12288, "same GPU", 1, 0),
        ("gemm_rs", 1024, 12288, 20480, "PCIe", 1, 0),  # a wave of tiles is of more than two shards anyway
        ("gemm_rs", 2048, 12288, 20480, "PCIe", 1, 0),
        ("gemm_rs", 1024, 20480, 20480, "PCIe", 2, 1),
        ("gemm_rs", 1024, 12288, 6144, "PCIe", 1, 0),  # so does what is sent
        ("gemm_rs", 64, 12288, 20480, "PCIe", 7, 0),
        ("gemm", 1024, 12288, 12288, "", 1, 0),
    ],
)
def test_few_rows_go_through_the_weight_together(
    op: str, m: int, n: int, k: int, link: str, span: int, alone: int
) -> None:
    world_size = 1 if op == "gemm" else 8
    config = rule(GemmProblem(op, m, n, k, world_size, "bfloat16", link=link, **H100)).config
    assert (config.span, config.alone) == (span, alone)


def test_own_rows_of_three_ranks_go_alone() -> None:
    """Three by two would be one band, whose first tiles wait for the last rank's rows."""
    few = {size: rule(GemmProblem("ag_gemm", 128 * size, 20480, 12288, size, "bfloat16", link="NVLink", **H100)).config
           for size in (3, 4)}  # fmt: skip
    assert [(few[size].span, few[size].alone) for size in (3, 4)] == [(2, 0), (2, -1)]


@pytest.mark.parametrize(
    ("m", "n", "link", "num_slabs"),
    [
        (1024, 12288, "PCIe", 1),  # 3 MB take 60 us, a copy more another 12
        (2048, 12288, "PCIe", 2),
        (4096, 12288, "PCIe", 2),
        (8192, 12288, "PCIe", 1),  # three waves of tiles for one's own rows come behind it
        (8192, 256, "PCIe", 1),  # one tile wide
        (4096, 12288, "NVLink", 1),
        (1024, 12288, "NVLink", 1),
        (4096, 12288, "same GPU", 1),
    ],
)
def test_a_last_shard_that_takes_long_to_send_leaves_in_slabs(m: int, n: int, link: str, num_slabs: int) -> None:
    problem = GemmProblem("gemm_rs", m, n, 20480, 8, "bfloat16", link=link, **H100)
    assert rule(problem).config.num_chunks == num_slabs
    assert rule(dataclasses.replace(problem, op="gemm_ar")).config.num_chunks == 1
    assert rule(dataclasses.replace(problem, arch=0)).config.num_chunks == 1


def test_a_problem_is_what_the_call_is() -> None:
    cpu = torch.device("cpu")
    assert problem_for("gemm", 3, 4, 5, torch.int8, cpu, None) == GemmProblem("gemm", 3, 4, 5, 1, "int8")
    assert problem_for("gemm", 3, 4, 5, torch.bfloat16, cpu, None, "swiglu").is_heavy
    assert not problem_for("gemm", 3, 4, 5, torch.bfloat16, cpu, None, "relu").is_heavy
    assert [GemmProblem("gemm_rs", m, 1, 1, 4, "int8").rows_per_rank for m in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert problem_for("gemm", 3, 4, 5, torch.int8, cpu, None).link == ""


@pytest.mark.parametrize(
    ("links", "link"),
    [
        (("self",), ""),
        (("shared memory", "self"), "shared memory"),
        (("self", "NVLink", "PCIe"), "PCIe"),
        (("PCIe", "PCIe", "self"), "PCIe"),
        (("same GPU", "self", "network", "PCIe"), "network"),
        (("self", "same GPU", "NVLink"), "NVLink"),
        (("self", "NVLink", "a new kind"), "a new kind"),
    ],
)
def test_the_slowest_link_is_the_groups(links: tuple[str, ...], link: str) -> None:
    expected = GemmProblem("gemm_rs", 3, 4, 5, len(links), "int8", link=link)
    # What ranks have agreed on comes before what this one sees: they must choose alike.
    near = ("self", *["NVLink"] * (len(links) - 1))
    for mine, kinds in ((links, ()), (near, {each for each in links if each != "self"})):
        traits = Traits(copies_need_sms=False, has_multicast=False, links=mine, num_sms=0, kinds=frozenset(kinds))
        group = SimpleNamespace(world_size=len(links), traits=traits)
        assert problem_for("gemm_rs", 3, 4, 5, torch.int8, torch.device("cpu"), group) == expected  # type: ignore[arg-type]


def test_a_gpu_goes_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(lookup_module, "device_info", SimpleNamespace(arch=lambda d: 90, num_sms=lambda d: 132))
    lookup_module._gpu_of.cache_clear()
    problem = problem_for("gemm", 3, 4, 5, torch.int8, torch.device("cuda:7"), None)
    lookup_module._gpu_of.cache_clear()
    assert problem == GemmProblem("gemm", 3, 4, 5, 1, "int8", arch=90, num_sms=132, gpu="NVIDIA H200")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The user's folder and the shipped one, both empty, and nothing remembered."""
    mine, shipped = tmp_path / "mine", tmp_path / "shipped"
    monkeypatch.setenv("TILEFLUX_TUNE_DIR", str(mine))
    monkeypatch.setattr(store, "_SHIPPED", shipped)
    forget()
    return str(mine), str(shipped)


def test_what_the_user_measured_goes_before_what_is_shipped_and_that_before_the_rule(folders: tuple[str, str]) -> None:
    mine, shipped = folders
    assert lookup(H200) == rule(H200)
    config = GemmConfig(64, 256, 32, num_stages=5)
    store.save(shipped, [make_entry("pipelined", config)])
    assert lookup(H200) == rule(H200), "read once"
    forget()
    reason = "shipped, measured on NVIDIA H200, 2026-11-15: pipelined 1.21x over sequential"
    assert lookup(H200) == Choice("pipelined", "", config, reason)
    store.save(mine, [make_entry("fused", n=6100)])
    forget()
    reason = "measured on NVIDIA H200, 2026-11-15: fused 1.21x over sequential, at 4096 x 6100 x 12288"
    assert lookup(H200) == Choice("fused", "", GemmConfig(), reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEFLUX_TUNE_DIR", "")
        assert lookup(H200).strategy == "pipelined", "nothing of the user's"


def test_a_choice_on_the_cpu_says_so(folders: tuple[str, str]) -> None:
    problem = GemmProblem("gemm_ar", 64, 64, 64, 2, "float32", link="shared memory")
    changes = {"op": "gemm_ar", "m": 64, "n": 64, "k": 64, "world_size": 2, "dtype": "float32"}
    cpu = {"arch": 0, "num_sms": 0, "gpu": "", "link": "shared memory"}
    store.save(folders[0], [make_entry("sequential", **changes, **cpu)])
    forget()
    choice = lookup(problem)
    assert (choice.strategy, choice.algorithm) == ("sequential", "two_shot")
    assert choice.reason == "measured on the CPU, 2026-11-15: sequential 1.10x over pipelined"


def test_a_width_that_was_not_measured_gets_the_rules_tiles_and_the_measured_chunks(folders: tuple[str, str]) -> None:
    store.save(folders[0], [make_entry("pipelined", GemmConfig(16, 16, 16, num_chunks=4), n=8192)])
    forget()
    choice = lookup(H200)
    assert choice.strategy == "pipelined"
    assert choice.config == dataclasses.replace(rule(H200).config, num_chunks=4) != rule(H200).config


@pytest.mark.parametrize("change", [{"m": 0}, {"k": 0}, {"world_size": 1}])
def test_where_there_is_nothing_to_choose_no_measurement_is_asked(change: dict[str, int]) -> None:
    entry = make_entry("fused", **{name: 1 for name in change})
    with patch.object(store, "load", lambda folder: (entry,)):
        problem = dataclasses.replace(H200, **change)
        assert lookup_module._lookup.__wrapped__(problem, "") == rule(problem)


def test_a_broken_file_does_not_keep_an_op_from_running(
    folders: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    Path(folders[0]).mkdir()
    (Path(folders[0]) / "ag_gemm.json").write_text("{")
    assert lookup(H200) == rule(H200)
    assert lookup(dataclasses.replace(H200, m=512)).strategy
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def look_up(entries: Sequence[Entry], problem: GemmProblem) -> Choice:
    with patch.object(store, "load", lambda folder: tuple(entries)):
        return lookup_module._lookup.__wrapped__(problem, "")


@given(st.lists(drawn("ag_gemm"), min_size=1, max_size=6), st.integers(0, 5000), st.booleans())
def test_ranks_of_a_gather_choose_alike_by_measurements_too(entries: list[Entry], n: int, is_heavy: bool) -> None:
    problem = dataclasses.replace(H200, m=2048, n=1024, k=1024)
    choices = [look_up(entries, each) for each in (problem, dataclasses.replace(problem, n=n, is_heavy=is_heavy))]
    assert len({(each.strategy, each.config.num_chunks) for each in choices}) == 1


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
@given(data=st.data(), k=st.integers(0, 5000))
def test_ranks_of_a_sum_choose_alike_by_measurements_too(op: str, data: st.DataObject, k: int) -> None:
    entries = data.draw(st.lists(drawn(op), min_size=1, max_size=6))
    problem = dataclasses.replace(H200, op=op, m=2048, n=1024, k=1024)
    first, second = (look_up(entries, each) for each in (problem, dataclasses.replace(problem, k=k)))
    assert _shared(first) == _shared(second)


@pytest.mark.parametrize(
    ("op", "m", "n", "k", "strategy"),
    [
        ("ag_gemm", 4096, 12288, 12288, "sequential"),
        ("gemm_rs", 4096, 12288, 12288, "sequential"),
        ("gemm_ar", 8, 8192, 2048, "sequential"),
        ("gemm_ar", 8192, 8192, 2048, "sequential"),
        ("moe_gemm_rs", 8192, 8192, 2048, "pipelined"),
    ],
)
def test_ranks_that_share_a_gpu_overlap_only_what_was_seen_to_pay(
    op: str, m: int, n: int, k: int, strategy: str
) -> None:
    given = {**H100, "num_sms": 33}
    shared = GemmProblem(op, m, n, k, 4, "bfloat16", link="same GPU", **given)
    assert rule(shared).strategy == strategy
    apart = ("pipelined",) if op == "moe_gemm_rs" else ("fused", "sequential")
    assert rule(dataclasses.replace(shared, link="NVLink")).strategy in apart
    # On the CPU they share its cores, and nothing of this was measured.
    assert rule(GemmProblem("ag_gemm", m, n, k, 4, "bfloat16", link="same process")).strategy == "fused"


def test_sums_apart_and_fetched_tiles_are_for_ranks_that_share_a_gpu() -> None:
    for op in ("gemm_rs", "gemm_ar", "moe_gemm_rs", "ag_gemm"):
        for link in ("same GPU", "NVLink", "PCIe"):
            config = rule(GemmProblem(op, 4096, 8192, 8192, 4, "bfloat16", link=link, **H100)).config
            assert config.sums_apart == config.fetches == (link == "same GPU" and op != "ag_gemm")
