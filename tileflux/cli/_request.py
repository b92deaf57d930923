"""What ``tileflux bench`` was asked for: shapes, a world, files. All mistakes are found here, before anything runs."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tileflux import env
from tileflux.cli._plot import PLOT_SUFFIXES, can_plot
from tileflux.cli._worlds import BenchPlace, Place, World, choose, choose_for_bench
from tileflux.link import Link
from tileflux.ops.routing import MAX_EXPERTS
from tileflux.testing.bench import BenchCase
from tileflux.testing.shapes import MODEL_SHAPES, MOE_SHAPES, Mixture

__all__ = [
    "GHOST_WORLD",
    "STDOUT",
    "WORLD",
    "WITH_EXPERTS",
    "Dtype",
    "Op",
    "Options",
    "Request",
    "RoutingKind",
    "ShapeSet",
    "Strategy",
    "parse_sweeps",
]

GHOST_WORLD, WORLD = 8, 4
"""Ranks where nobody says how many."""
STDOUT = Path("-")


class Op(enum.StrEnum):
    """What can be measured."""

    AG_GEMM = "ag_gemm"
    GEMM_RS = "gemm_rs"
    GEMM_AR = "gemm_ar"
    GEMM = "gemm"
    MOE_AG_GEMM = "moe_ag_gemm"
    MOE_GEMM_RS = "moe_gemm_rs"
    GROUPED_GEMM = "grouped_gemm"
    EP = "ep"


WITH_EXPERTS = (Op.MOE_AG_GEMM, Op.MOE_GEMM_RS, Op.GROUPED_GEMM, Op.EP)
_WITHOUT_PIPELINED = (Op.EP,)
_ALONE = (Op.GEMM, Op.GROUPED_GEMM)
_PLAYED = (Op.AG_GEMM, Op.GEMM_RS, Op.MOE_AG_GEMM, Op.MOE_GEMM_RS)


class Dtype(enum.StrEnum):
    """Of inputs and results."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Strategy(enum.StrEnum):
    """Ways of ours, in the order of the table."""

    SEQUENTIAL = "sequential"
    PIPELINED = "pipelined"
    FUSED = "fused"
    AUTO = "auto"


class RoutingKind(enum.StrEnum):
    """How tokens choose experts, of ``testing.moe.ROUTING_KINDS``."""

    UNIFORM = "uniform"
    SKEWED = "skewed"


class ShapeSet(enum.StrEnum):
    """Names of ``MODEL_SHAPES`` and ``MOE_SHAPES``."""

    FLUX = "flux"
    GPT3 = "gpt3"
    LLAMA = "llama"
    DECODE = "decode"
    COMET = "comet"
    MIXTRAL = "mixtral"
    QWEN_MOE = "qwen-moe"
    PHI_MOE = "phi-moe"
    MOE = "moe"


@dataclass(frozen=True)
class Options:
    """As they stand on the command line."""

    op: Op
    sizes: tuple[int | None, int | None, int | None]
    world: int | None
    where: BenchPlace
    dtype: Dtype | None
    sweep: Sequence[str]
    iters: int | None
    """None: until medians are steady."""
    strategy: Sequence[Strategy]
    shapes: ShapeSet | None
    link: str | None
    json: Path | None
    csv: Path | None
    plot: Path | None
    host: bool = False
    """Whether the host's part of a call is timed, instead of the call."""
    experts: int | None = None
    top_k: int | None = None
    ep: int | None = None
    routing: RoutingKind | None = None


@dataclass(frozen=True)
class Request:
    """What is to be done, all of it possible here as far as can be told."""

    options: Options
    world: World
    cases: tuple[BenchCase, ...]
    link: Link | None
    """Emulated between CPU ranks, by option or by the environment."""

    @classmethod
    def check(cls, options: Options) -> Request:
        """``ValueError`` says what is wrong with the options, or with this machine for them."""
        # Asked for here, so that a wrong value is told before ranks start, and once.
        env.timeout_s(), env.check(), env.transport(), env.link()
        _check_outputs(options)
        world = _choose(options)
        if options.host and world.where == "virtual" and world.size > 1:
            raise ValueError(
                "--host: virtual ranks hold each other's host, in one process; use --where mps, ghost or cpu"
            )
        dtype = options.dtype or (Dtype.BFLOAT16 if world.on_gpu else Dtype.FLOAT32)
        strategies = _strategies(options)
        cases = [
            BenchCase(options.op.value, *size, dtype.value, strategies, options.iters, mixture)
            for size, mixture in _shapes(options, world.size)
        ]
        return cls(options, world, tuple(cases), _link(options.link, world))

    def check_ranks(self, world_size: int) -> None:
        """The rest of it where only a launcher's ranks get to know how many they are."""
        for case in self.cases:
            if case.mixture is not None:
                _check_mixture(case.mixture, world_size, everybody=case.op == Op.EP)

    @property
    def command(self) -> str:
        """The call with everything that decides what is measured written out, defaults too."""
        options, dtype = self.options, self.cases[0].dtype
        words = ["tileflux", "bench", options.op, *(str(size) for size in options.sizes if size is not None)]
        words += ["--where", options.where, "--dtype", dtype]
        words += [] if options.iters is None else ["--iters", str(options.iters)]
        words += [] if self.world.where == "torchrun" or options.op in _ALONE else ["--world", str(self.world.size)]
        words += _words_of_experts(options)
        for option, values in (("--sweep", options.sweep), ("--strategy", options.strategy)):
            words += [word for value in values for word in (option, value)]
        words += ["--shapes", options.shapes] if options.shapes else []
        words += ["--host"] if options.host else []
        words += ["--link", str(self.link)] if self.link is not None and self.world.where == "fork" else []
        return shlex.join(words)


def _check_outputs(options: Options) -> None:
    plot = options.plot
    if options.json == options.csv == STDOUT:
        raise ValueError("--json - and --csv - would both be on standard output; give one of them a file")
    if plot is not None and options.host:
        raise ValueError("--plot draws what calls take, not what their host does; leave one of --plot and --host out")
    if plot is not None and plot.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"--plot {plot} should end in {', '.join(PLOT_SUFFIXES)}")
    if plot is not None and not can_plot():
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'tileflux[plot]'")
    for option, file in (("--json", options.json), ("--csv", options.csv), ("--plot", plot)):
        if file is None or file == STDOUT:
            continue
        if file.is_dir():
            raise ValueError(f"{option} {file} is a folder, and should be a file")
        if not file.parent.is_dir():
            raise ValueError(f"{option} {file}: there is no folder {file.parent}")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ValueError(f"{option} {file} cannot be written")


def _choose(options: Options) -> World:
    place, size = options.where, options.world
    if options.op in _ALONE:
        if size not in (None, 1) or place not in ("auto", "cpu", "local"):
            raise ValueError(f"{options.op} is one rank's own product: no --world, and --where auto, cpu or local")
        chosen = choose(Place(place.value), 1)
        chosen = dataclasses.replace(chosen, text="one GPU" if chosen.on_gpu else "one CPU process")
    else:
        if options.op not in _PLAYED and place is BenchPlace.GHOST:
            raise ValueError(
                f"ghosts play {', '.join(_PLAYED[:-1])} and {_PLAYED[-1]}, not {options.op}; use --where mps"
            )
        default = GHOST_WORLD if place is BenchPlace.GHOST else WORLD
        chosen = choose_for_bench(place, default if size is None else size)
        if chosen.where == "torchrun" and size is not None:
            raise ValueError(f"--world {size}: torchrun says how many ranks there are (--nproc-per-node)")
    if not chosen.on_gpu and env.cpu_backend() != "host":
        raise ValueError("TILEFLUX_CPU_BACKEND=interpret would time Triton's interpreter; unset it")
    return chosen


def _link(text: str | None, world: World) -> Link | None:
    if text is None:
        return None if world.on_gpu else env.link()
    if world.where != "fork":
        raise ValueError(f"--link {text} is emulated between CPU processes only; use --where cpu")
    try:
        return Link.parse(text)
    except ValueError as error:
        raise ValueError(f"--link {text}: {error}") from None


def _strategies(options: Options) -> tuple[str, ...]:
    wanted = tuple(dict.fromkeys(each.value for each in options.strategy or Strategy))
    if options.op in _ALONE:
        if options.strategy:
            raise ValueError(f"{options.op} has no strategies: it is one kernel")
        return ()
    if options.op in _WITHOUT_PIPELINED and Strategy.PIPELINED in wanted:
        if options.strategy:
            raise ValueError(f"{options.op} has no strategy pipelined; sequential, fused and auto are there")
        return tuple(each for each in wanted if each != Strategy.PIPELINED)
    return wanted


def _words_of_experts(options: Options) -> list[str]:
    """What of the call says how tokens choose."""
    if options.op not in WITH_EXPERTS:
        return []
    words = [] if options.experts is None else ["--experts", str(options.experts), "--top-k", str(options.top_k)]
    words += [] if options.op in (Op.GROUPED_GEMM, Op.EP) else ["--ep", str(options.ep or 1)]
    return [*words, "--routing", options.routing or RoutingKind.UNIFORM]


def _shapes(options: Options, world_size: int) -> list[tuple[tuple[int, int, int], Mixture | None]]:
    """All that is asked for, each once. ``world_size`` is 0 where nobody knows it yet."""
    if options.op not in WITH_EXPERTS:
        if given := [name for name, value in _experts_options(options).items() if value is not None]:
            raise ValueError(f"{given[0]} is for {', '.join(WITH_EXPERTS)}; {options.op} has no experts")
        return [(size, None) for size in _sizes(options)]
    if options.host:
        raise ValueError(f"--host times the dense ops, not {options.op}")
    if options.op is Op.GROUPED_GEMM and options.ep is not None:
        raise ValueError("grouped_gemm is one rank's own product: no --ep")
    if options.op is Op.EP and options.ep is not None:
        raise ValueError("ep: every rank has whole experts of its own, as many as the others: no --ep")
    found = _sizes_with_experts(options)
    for _, mixture in found:
        _check_mixture(mixture, world_size, everybody=options.op is Op.EP)
    if options.op is Op.GROUPED_GEMM:
        return [(size, dataclasses.replace(each, is_picked=picked)) for size, each in found for picked in (False, True)]
    return list(found)


def _experts_options(options: Options) -> dict[str, object]:
    return {
        "--experts": options.experts, "--top-k": options.top_k, "--ep": options.ep, "--routing": options.routing
    }  # fmt: skip


def _sizes_with_experts(options: Options) -> list[tuple[tuple[int, int, int], Mixture]]:
    op, ep_size, routing = options.op.value, options.ep or 1, (options.routing or RoutingKind.UNIFORM).value
    if options.shapes is None:
        given = {name: value for name, value in _experts_options(options).items() if name in ("--experts", "--top-k")}
        if missing := [name for name, value in given.items() if value is None]:
            raise ValueError(f"{op} needs --experts and --top-k, or --shapes; {', '.join(missing)} missing")
        mixture = Mixture(options.experts or 0, options.top_k or 0, ep_size, routing)
        return [(size, mixture) for size in _sizes(options)]
    if options.experts is not None or options.top_k is not None:
        raise ValueError(f"--shapes {options.shapes} says how many experts there are; leave --experts and --top-k out")
    swept = _swept_rows(options)
    known = MOE_SHAPES.get(options.shapes, ())
    found = [
        ((m, *rest), Mixture(entry.num_experts, entry.top_k, ep_size, routing))
        for entry in known
        for _, *rest in entry.sizes(op)
        for m in swept or [entry.m]
    ]
    if not found:
        raise ValueError(f"--shapes {options.shapes} has nothing for {op}; {', '.join(MOE_SHAPES)} have")
    return list(dict.fromkeys(found))  # type: ignore[arg-type]


def _check_mixture(mixture: Mixture, world_size: int, everybody: bool) -> None:
    """``everybody``: experts are shared out among all ranks, whole."""
    num_experts, top_k, ep_size = mixture.num_experts, mixture.top_k, mixture.ep_size
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"--experts {num_experts}: there may be {MAX_EXPERTS} at most")
    if top_k > num_experts:
        raise ValueError(f"--top-k {top_k}: a token cannot choose more than the {num_experts} experts there are")
    if everybody and world_size and num_experts % world_size:
        raise ValueError(f"--experts {num_experts} should be a multiple of the {world_size} ranks")
    if world_size % ep_size or num_experts % ep_size:
        ranks = f"{world_size} ranks and the " if world_size else ""
        raise ValueError(f"--ep {ep_size} should divide the {ranks}{num_experts} experts")


def _swept_rows(options: Options) -> list[int]:
    """What replaces the M of a set; nothing if it stays."""
    if any(size is not None for size in options.sizes):
        raise ValueError(f"--shapes {options.shapes} takes the place of M, N and K; leave them out")
    axes = parse_sweeps(options.sweep)
    if set(axes) - {"m"}:
        raise ValueError("--sweep of a set's N or K would be another model's; only m can be swept with --shapes")
    return axes.get("m", [])


def _sizes(options: Options) -> list[tuple[int, int, int]]:
    """All shapes that are asked for, each once."""
    axes, op = parse_sweeps(options.sweep), options.op.value
    named = dict(zip("mnk", options.sizes, strict=True))
    if options.shapes is None:
        if options.op is Op.EP:
            named = _sizes_of_exchange(options)
        if missing := [axis.upper() for axis, size in named.items() if size is None]:
            raise ValueError(f"{op} needs M, N and K, or --shapes; {', '.join(missing)} missing")
        lists = [axes.get(axis, [size or 0]) for axis, size in named.items()]
        return list(dict.fromkeys((m, n, k) for m, n, k in itertools.product(*lists)))
    swept = _swept_rows(options)
    known = MODEL_SHAPES.get(options.shapes, ())
    entries = [entry for entry in known if op in entry.ops]
    if not entries:
        others = dict.fromkeys(name for entry in known for name in entry.ops) or WITH_EXPERTS
        raise ValueError(f"--shapes {options.shapes} has nothing for {op}; it is for {', '.join(others)}")
    return list(dict.fromkeys((m, entry.n, entry.k) for entry in entries for m in swept or [entry.m]))


def _sizes_of_exchange(options: Options) -> dict[str, int | None]:
    """Tokens and their width; there is no N."""
    tokens, width, rest = options.sizes
    if tokens is None or width is None or rest is not None:
        raise ValueError("ep needs M, the tokens of all ranks, and their width H, and nothing else; or --shapes")
    if "n" in parse_sweeps(options.sweep):
        raise ValueError("--sweep n: ep has no N; m are tokens, and k is their width")
    return {"m": tokens, "n": 0, "k": width}


def parse_sweeps(texts: Sequence[str]) -> dict[str, list[int]]:
    """``m=512:8192`` (doubling) and ``m=512,4096`` as sizes by axis."""
    axes: dict[str, list[int]] = {}
    for text in texts:
        axis, _, values = text.partition("=")
        if axis not in ("m", "n", "k"):
            raise ValueError(f"--sweep {text} should name m, n or k, as in m=512:8192 or m=512,1024")
        if axis in axes:
            raise ValueError(f"--sweep {text}: {axis} is swept already")
        try:
            sizes = _doubled(*map(int, values.split(":"))) if ":" in values else [int(v) for v in values.split(",")]
        except (ValueError, TypeError):  # no numbers, or not two of them
            raise ValueError(f"--sweep {text} should be like {axis}=512:8192 or {axis}=512,1024") from None
        if not sizes or min(sizes) < 1:
            raise ValueError(f"--sweep {text} should have sizes of at least 1, from small to large: {axis}=512:8192")
        axes[axis] = list(dict.fromkeys(sizes))
    return axes


def _doubled(first: int, last: int) -> list[int]:
    sizes = [first] if 0 < first <= last else []
    while sizes and 2 * sizes[-1] <= last:
        sizes.append(2 * sizes[-1])
    return sizes
