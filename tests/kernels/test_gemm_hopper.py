"""Hopper's loop on a Hopper: every tile, dtype and way out, calls on top of each other, graphs.

That it compiles without spills, and orders what it must, is shown without a GPU: ``testing/hopper_cases.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tileflux
from tileflux import GemmConfig
from tileflux.kernels import gemm_launch
from tileflux.kernels.gemm_hopper_launch import is_hopper
from tileflux.testing import assert_close, poisoned
from tileflux.testing.dense import DenseCase, expected, gemm_case, reduction
from tileflux.testing.hopper_cases import TILES, hopper_config

pytestmark = pytest.mark.gpu

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
WAVES = (1536, 4096, 448)
"""More tiles than SMs, and no whole number of waves, whatever the tile."""
SHAPES = (WAVES, (640, 520, 136), (130, 264, 72), (7, 1000, 2048), (1, 8, 64))
"""The others have tiles, blocks of K and pieces that are cut; the third from last fewer rows than a tile."""


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GemmConfig]]:
    """What Hopper's loop was asked for, since a call that it does not take would pass as well."""
    if not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a GPU of compute capability 9.0")
    seen: list[GemmConfig] = []
    true_launch = gemm_launch.launch_hopper

    def launch_hopper(operands, launch, *rest, **options):  # type: ignore[no-untyped-def]
        seen.append(launch.config)
        return true_launch(operands, launch, *rest, **options)

    monkeypatch.setattr(gemm_launch, "launch_hopper", launch_hopper)
    gemm_launch._plain.clear()
    yield seen
    gemm_launch._plain.clear()


def run(case: DenseCase, config: GemmConfig) -> torch.Tensor:
    given = case.arguments("gemm", 0, "cuda")
    out = poisoned((given["x"].shape[0], expected(case, "gemm").shape[1]), case.out_dtype, "cuda")
    tileflux.gemm(**given, config=config, out=out)
    return out


def check(case: DenseCase, out: torch.Tensor, what: str) -> None:
    assert_close(out.cpu(), expected(case, "gemm"), reduction=reduction(case, "gemm"), what=what)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile: tuple[int, int], launches: list[GemmConfig]) -> None:
    config = hopper_config(*tile)
    for seed, shape in enumerate(SHAPES):
        case = gemm_case(shape, BF16, seed, bias=seed % 2 == 0)
        check(case, run(case, config), f"{shape} in tiles of {tile}")
    assert launches == [config] * len(SHAPES)


@pytest.mark.parametrize("out_dtype", [torch.float16, BF16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_dtypes(dtype: torch.dtype, out_dtype: torch.dtype, launches: list[GemmConfig]) -> None:
    for seed, shape in enumerate((WAVES, (300, 200, 136))):
        case = gemm_case(shape, dtype, seed, bias=True, out_dtype=out_dtype)
        check(case, run(case, hopper_config(128, 256)), f"{dtype} to {out_dtype}, {shape}")
    assert len(launches) == 2


@pytest.mark.parametrize("weight_dtype", [FP8, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("scales", ["tensor", "channel"])
def test_fp8(weight_dtype: torch.dtype, scales: str, launches: list[GemmConfig]) -> None:
    for seed, shape in enumerate((WAVES, (300, 208, 144))):
        case = gemm_case(shape, FP8, seed, bias=True, scales=scales, weight_dtype=weight_dtype)  # type: ignore[arg-type]
        check(case, run(case, hopper_config(128, 128, FP8)), f"{weight_dtype}, {shape}")
    assert len(launches) == 2


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_activations(activation: str, launches: list[GemmConfig]) -> None:
    case = gemm_case(WAVES, BF16, 1, bias=True, activation=activation)  # type: ignore[arg-type]
    check(case, run(case, hopper_config(128, 256)), activation)
    assert len(launches) == 1


def test_a_weight_whose_columns_are_contiguous(launches: list[GemmConfig]) -> None:
    for seed, shape in enumerate((WAVES, (300, 208, 136))):
        case = gemm_case(shape, BF16, seed, transposed_weight=True)
        check(case, run(case, hopper_config(128, 256)), f"{shape}")
    assert len(launches) == 2


def test_two_hundred_calls_on_top_of_each_other(launches: list[GemmConfig]) -> None:
    """Of every tile, in any order, nobody synchronising."""
    configs = [hopper_config(*tile) for tile in TILES]
    cases = [gemm_case(shape, BF16, seed) for seed, shape in enumerate((WAVES, (1664, 2048, 256), (128, 256, 64)))]
    given = [case.arguments("gemm", 0, "cuda") for case in cases]
    want = [expected(case, "gemm").cuda() for case in cases]
    order = torch.randint(len(cases) * len(configs), (200,)).tolist()
    outs = []
    for number in order:
        case, config = number % len(cases), configs[number // len(cases)]
        out = poisoned(tuple(want[case].shape), BF16, "cuda")
        tileflux.gemm(**given[case], config=config, out=out)
        outs.append((case, config, out))
    torch.cuda.synchronize()
    for case, config, out in outs:
        assert_close(out, want[case], reduction=reduction(cases[case], "gemm"), what=f"{config}")
    assert launches


def test_the_same_call_gives_the_same_bits() -> None:
    case = gemm_case(WAVES, BF16, 3)
    first = run(case, hopper_config(128, 256))
    for _ in range(20):
        assert torch.equal(run(case, hopper_config(128, 256)), first)


def test_two_streams_at_once() -> None:
    case = gemm_case(WAVES, BF16, 4)
    given, want = case.arguments("gemm", 0, "cuda"), expected(case, "gemm").cuda()
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outs = []
    for number in range(60):
        with torch.cuda.stream(streams[number % 3]):
            outs.append(tileflux.gemm(**given, config=hopper_config(*TILES[number % len(TILES)])))
    torch.cuda.synchronize()
    for out in outs:
        assert_close(out, want, reduction=reduction(case, "gemm"))


def test_graphs_that_are_replayed_at_once() -> None:
    case = gemm_case(WAVES, BF16, 5)
    given = case.arguments("gemm", 0, "cuda")
    xs = [given["x"].clone() for _ in range(2)]
    config = hopper_config(128, 256)
    tileflux.gemm(**given, config=config)
    graphs, outs = [torch.cuda.CUDAGraph() for _ in xs], []
    for graph, x in zip(graphs, xs, strict=True):
        with torch.cuda.graph(graph):
            outs.append([tileflux.gemm(**{**given, "x": x}, config=config) for _ in range(2)])
    streams = [torch.cuda.Stream() for _ in xs]
    for _ in range(20):
        for x in xs:
            x.copy_(torch.randn_like(x))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for x, results in zip(xs, outs, strict=True):
            want = x.double() @ given["weight"].double().t()
            for out in results:
                assert_close(out, want, reduction=x.shape[1])
