"""``lookup``: from a problem to a strategy and tiles. Pure and cached; launches nothing.

Asked in turn: what the user has measured, what was measured and shipped (``store.py``), and a rule.

Ranks of one call look up alike: tiles of ``gemm_rs`` and ``gemm_ar`` are announced by number, so their size may depend
only on what all ranks share (M, N, the world, the types, the GPU and its links); of ``ag_gemm``, whose ranks share K
and not N, that is true of the strategy and of chunks alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tileflux import device as device_info
from tileflux import env
from tileflux.config import GemmConfig, GemmProblem
from tileflux.symm.group import Group
from tileflux.tune import store

__all__ = [
    "HEAVY",
    "ITEMSIZE",
    "STRATEGIES",
    "Choice",
    "Gpu",
    "forget",
    "grouped_tiles",
    "lookup",
    "num_readings",
    "once_routed",
    "problem_for",
    "rows_of_tiles",
    "rule",
    "stage_span",
    "usual_slabs",
]

HEAVY = ("gelu", "swiglu")
"""Activations that need registers of their own, so that tiles must be smaller."""
STRATEGIES = ("auto", *store.STRATEGIES)
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}

_ONE_SHOT_BYTES = 512 * 1024  # what one rank may take in at once before two steps, with fewer bytes, are quicker
_ONE_SHOT_BYTES_SHARED = 64 * 1024 * 1024  # where what peers have is read at the speed of memory
_GATHERS = ("ag_gemm", "moe_ag_gemm")
_SCATTERS = ("gemm_rs", "gemm_ar", "moe_gemm_rs")
_SHARDED = ("ag_gemm", "gemm_rs", "gemm_ar")
_SPAN_ROWS = 256
_WIDE = 256  # columns of a large tile
_ROWS_ENOUGH = 1024  # for one pass through the weight
_SLAB_S = 60e-6  # on the link, where beginning, ending and announcing a copy take some 12 of a slab of any size
_MOST_SLABS = 2  # a third and a fourth were measured, and cost more than they gave
_num_readings = 0
_TILE_SPEEDS = {(128, 256): 1.0, (128, 128): 0.94, (64, 128): 0.8}
"""How quickly an SM multiplies with them, docs/measured.md; in the order in which they are preferred."""
_FLOPS_PER_SM = 6e12  # in 16 bits, on Hopper
_LINK_BYTES_PER_S = {"network": 45e9, "PCIe": 50e9, "NVLink": 400e9}  # of a GPU, in one direction
_FAST = 2e12  # within a GPU
_LINKS = ("network", "PCIe", "NVLink", "same GPU", "shared memory", "same process")  # from slow to quick


@dataclass(frozen=True)
class Choice:
    """What would run, and why."""

    strategy: str
    algorithm: str
    """How an all-reduce goes: ``one_shot`` or ``two_shot``; empty for the other ops."""
    config: GemmConfig
    reason: str


def lookup(problem: GemmProblem) -> Choice:
    """The choice of ``strategy="auto"`` for a problem."""
    return _lookup(problem, env.tune_dir())


@functools.lru_cache(maxsize=4096)
def _lookup(problem: GemmProblem, folder: str) -> Choice:
    usual = rule(problem)
    if _is_settled(problem):
        return usual
    for where, entries in (("", store.load(folder)), ("shipped, ", store.load_shipped())):
        match = store.find(entries, problem)
        if match is not None:
            return _measured(problem, match, usual, where)
    return usual


def forget() -> None:
    """Read the files anew at the next lookup. All ranks of a group together, or they choose apart."""
    global _num_readings
    _num_readings += 1
    _lookup.cache_clear()
    store.load.cache_clear()


def num_readings() -> int:
    """How often choices were forgotten: who keeps one by this number does not keep it too long."""
    return _num_readings


def _measured(problem: GemmProblem, match: store.Match, usual: Choice, where: str) -> Choice:
    leader = match.leader
    config = match.tiles or dataclasses.replace(usual.config, num_chunks=leader.config.num_chunks)
    place = f"{leader.problem.gpu or 'the CPU'}{' with ghost peers' if leader.with_ghosts else ''}"
    reason = f"{where}measured on {place}, {leader.date}: {leader.verdict}"
    shape, measured = ((each.m, each.n, each.k) for each in (problem, leader.problem))
    if shape != measured:
        reason += f", at {' x '.join(map(str, measured))}"
    return Choice(leader.strategy, leader.algorithm, config, reason)


def rule(problem: GemmProblem) -> Choice:
    """The choice where nothing was measured."""
    shared = problem.arch and problem.link == "same GPU"
    algorithm, strategy, reason = "", *(_sharing_strategy(problem) if shared else _strategy(problem))
    if problem.op == "gemm_ar":
        itemsize = max(2, ITEMSIZE[problem.dtype])  # of the result, as long as nobody asks for another type
        incoming = problem.m * problem.n * itemsize * (problem.world_size - 1)
        small = incoming <= (_ONE_SHOT_BYTES_SHARED if shared else _ONE_SHOT_BYTES) or problem.world_size <= 2
        algorithm = "one_shot" if small else "two_shot"
        if small and incoming and not shared:
            strategy = "fused"
            reason = f"each rank takes in {incoming} bytes of partial sums: one step costs less than two"
    config = _tiles(problem)
    if problem.op == "gemm_rs":
        config = dataclasses.replace(config, num_chunks=_num_slabs(problem, config.block_n))
    if problem.link == "same GPU" and problem.op in _SCATTERS:
        # A program that waits holds an SM that the rank which is waited for may need, and one that does not get an SM
        # must not be what others wait for.
        config = dataclasses.replace(config, sums_apart=True, fetches=True)
    return Choice(strategy, algorithm, config, reason)


def problem_for(
    op: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    group: Group | None,
    activation: str | None = None,
) -> GemmProblem:
    """What is looked up for a call of ``op``, by ``group`` or by one rank alone."""
    gpu = _gpu_of(device)
    num_sms = gpu.num_sms if group is None else group.traits.num_sms
    world_size = 1 if group is None else group.world_size
    kind, is_heavy = str(dtype).removeprefix("torch."), activation in HEAVY
    link = "" if group is None else _link(group.traits.kinds or group.traits.links)
    return GemmProblem(op, m, n, k, world_size, kind, is_heavy, gpu.arch, num_sms, link, gpu.name)


def rows_of_tiles(num_rows: int, num_experts: int, device: torch.device) -> int:
    """Of rows that are grouped by expert: as many as an expert fills, if all have the same."""
    if device.type == "cpu" and not _gpu_of(device).arch:
        return 512
    each = max(1, -(-num_rows // num_experts))
    return min(128, max(16, 1 << (each - 1).bit_length()))


def grouped_tiles(problem: GemmProblem, usual: GemmConfig, block_m: int) -> GemmConfig:
    """Of an op of experts that would take ``usual``: what the product alone would, with tiles of ``block_m`` rows."""
    if not problem.arch:
        return dataclasses.replace(usual, block_m=block_m)
    rows = problem.m if block_m >= 128 else block_m
    plain = lookup(dataclasses.replace(problem, op="gemm", m=rows, world_size=1, link="")).config
    return dataclasses.replace(
        plain, block_m=block_m, hopper=False,
        num_feeders=usual.num_feeders, num_chunks=usual.num_chunks, sums_apart=usual.sums_apart, fetches=usual.fetches,
    )  # fmt: skip


def usual_slabs(problem: GemmProblem, strategy: str, block_n: int) -> int:
    """Slabs that ``moe_gemm_rs`` cuts columns into: pipelined, each is a launch of its own, two tiles wide or more.

    Within a GPU eight; between GPUs every owner's part of a slab is a copy, and there is a gap behind each, for which a
    slow link has no time: there it is one, and owners go one after the other. By what all ranks know alone: not by K.
    """
    if not problem.arch or strategy != "pipelined":
        return 4
    most = {"same GPU": 8, "PCIe": 1, "network": 1}.get(problem.link, 4)
    return max(1, min(most, problem.n // (2 * block_n)))


def once_routed(choice: Choice, problem: GemmProblem, num_rows: int) -> Choice:
    """What ``auto`` makes of ``choice`` when it knows how many rows this rank's experts have.

    Tokens of ``moe_ag_gemm`` that take longer to come than to be multiplied are used as they come. Ranks may differ in
    this: both ways exchange alike.
    """
    if problem.op != "moe_ag_gemm" or choice.strategy != "pipelined" or not _waits_for_tokens(problem, num_rows):
        return choice
    reason = "tokens take longer to come than to be multiplied: tiles are used as they come"
    return dataclasses.replace(choice, strategy="fused", reason=reason)


def _waits_for_tokens(problem: GemmProblem, num_rows: int) -> bool:
    """Whether gathering takes longer than the product of so many rows."""
    return _comm_over_gemm(problem) * problem.m > num_rows


def stage_span(problem: GemmProblem, num_rows: int, num_experts: int) -> int:
    """Ranks whose tokens go through the experts' weights together, of an op of experts pipelined: as ``_bands``.

    ``num_rows`` that this rank's ``num_experts`` have among them.
    """
    if not problem.arch or problem.world_size < 3 or _is_empty(problem) or not num_rows:
        return 1
    if _waits_for_tokens(problem, num_rows):
        return 1
    each = max(1, num_rows // (num_experts * problem.world_size))
    return max(1, min(problem.world_size - 1, -(-_SPAN_ROWS // each)))


class Gpu(NamedTuple):
    """What of a device choices depend on."""

    arch: int
    """0 on the CPU."""
    num_sms: int
    name: str


@functools.cache
def _gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return Gpu(0, 0, "")
    return Gpu(device_info.arch(device), device_info.num_sms(device), torch.cuda.get_device_name(device))


@functools.cache
def _link(links: Collection[str]) -> str:
    """The slowest of them: the nearest peer may be behind NVLink for one rank and behind PCIe for the next."""
    peers = sorted({link for link in links if link != "self"})
    return min(peers, key=lambda link: _LINKS.index(link) if link in _LINKS else -1, default="")


def _is_settled(problem: GemmProblem) -> bool:
    """Whether there is nothing to choose, so that no measurement is asked."""
    if problem.op == "gemm":
        return 0 in (problem.m, problem.n, problem.k)
    return problem.world_size == 1 or _is_empty(problem)


def _is_empty(problem: GemmProblem) -> bool:
    # What all ranks share: of ag_gemm not N, of the others not K, which may be 0 on some ranks and not on others.
    return problem.m == 0 or (problem.k if problem.op in _GATHERS else problem.n) == 0


def _strategy(problem: GemmProblem) -> tuple[str, str]:
    if problem.world_size == 1:
        return "sequential", "one rank has nothing to wait for"
    if _is_empty(problem):
        return "sequential", "there is nothing to multiply"
    if problem.arch and problem.rows_per_rank < 128:
        return "sequential", f"{problem.rows_per_rank} rows per rank are less than one tile of 128: nothing to overlap"
    if problem.op == "moe_gemm_rs" and problem.arch:
        return (
            "pipelined",
            "sums of tokens' choices by a kernel of their own keep up with what is sent, fused ones not",
        )
    if problem.op == "moe_ag_gemm" and problem.arch:
        return "pipelined", "tiles of ranks whose tokens have come read the experts' weights together"
    how = "can start while other rows are" if problem.op in _GATHERS else "leave, finished, while others are"
    what = "still on their way" if problem.op in _GATHERS else "still multiplied"
    return "fused", f"{problem.rows_per_rank} rows per rank: tiles {how} {what}"


def _sharing_strategy(problem: GemmProblem) -> tuple[str, str]:
    """Where ranks share a GPU there is little to hide, and SMs that wait or copy are taken from a product.

    As measured with 4 ranks on an H200, docs/measured.md.
    """
    usual = _strategy(problem)
    if usual[0] == "sequential" or problem.op not in _SHARDED:
        return usual
    return "sequential", "ranks share a GPU, and copies within it take less time than a product loses beside them"


def _tiles(problem: GemmProblem) -> GemmConfig:
    if problem.arch == 0:
        # As large as keeps the cores busy: the library packs the weight anew for every tile.
        return GemmConfig(block_m=512, block_n=1024, block_k=64)
    itemsize = ITEMSIZE[problem.dtype]
    rows = problem.m if problem.op in ("gemm", "gemm_ar") else problem.rows_per_rank
    block_m = min(128, max(16, 1 << (max(1, rows) - 1).bit_length()))
    feeders = max(1, min(16, problem.num_sms // 8))
    if itemsize == 4:
        return GemmConfig(min(block_m, 64), 64, 16, num_warps=8, num_stages=3, num_feeders=feeders)
    block_k = 64 if itemsize == 2 else 128
    if problem.arch < 90:
        return GemmConfig(min(block_m, 64) if problem.is_heavy else block_m, 128, block_k // 2, num_feeders=feeders)
    if block_m == 128 and itemsize == 2 and not problem.is_heavy and problem.n >= 2048:
        return _large_tiles(problem, block_k, feeders)
    num_warps = 8 if block_m == 128 else 4
    block_n, num_stages = 128, 4 if itemsize == 2 and not problem.is_heavy else 3
    if problem.op == "gemm_ar" and block_m <= 32 and -(-problem.n // 128) > problem.num_sms:
        block_n, num_stages = 256, 3  # one tile a program, not two that are each stored, announced and summed
    return GemmConfig(
        block_m, block_n, block_k, num_warps=num_warps, num_stages=num_stages, num_feeders=feeders, **_bands(problem)
    )


def _large_tiles(problem: GemmProblem, block_k: int, num_feeders: int) -> GemmConfig:
    block_m, block_n = _large_tile(problem)
    # Hopper's own loop was the quicker one with these; ranks that share a GPU were not measured with it.
    hopper = problem.arch == 90 and block_m == 128 and problem.link != "same GPU"
    is_small = (block_m, block_n) == (64, 128)  # for few rows: what there is to wait for is the way to memory
    return GemmConfig(
        block_m, block_n, block_k,
        group_m=16 if hopper else 8, num_warps=4 if is_small else 8, num_stages=8 if is_small else 4,
        num_feeders=num_feeders, hopper=hopper, **_bands(problem),
    )  # fmt: skip


def _num_slabs(problem: GemmProblem, block_n: int) -> int:
    """In how many the last shard leaves: what is complete last should be little, but there is a gap behind each copy.

    One where this rank's own rows, which come after it and stay, take the product long enough. By what all ranks know
    alone: they may differ in K, and must not in this.
    """
    if not problem.arch or problem.link not in _LINK_BYTES_PER_S or problem.world_size == 1:
        return 1
    if -(-problem.rows_per_rank // 128) * -(-problem.n // block_n) >= 2 * problem.num_sms:
        return 1
    shard_bytes = problem.rows_per_rank * problem.n * max(2, ITEMSIZE[problem.dtype])
    wanted = int(shard_bytes / _LINK_BYTES_PER_S[problem.link] / _SLAB_S)
    return max(1, min(_MOST_SLABS, problem.n // block_n, wanted))


def _bands(problem: GemmProblem) -> dict[str, Any]:
    """Chunks that go through the weight together, and how many go alone before (``lang/schedule.py``).

    Few rows: so many chunks that the weight is read for ``_SPAN_ROWS`` at once, or about; if that is two, one's own
    rows wait for the first peer's, which come before the weight would have been read for them alone. Else two, as soon
    as the second has come when the product comes to the first: rows that come in less time than they are multiplied are
    ever further ahead. Sums depart the other way round. Where communication is longer than the product the memory has
    time enough, and rows should be used, or leave, as they come.
    """
    peers, comm = problem.world_size - 1, _comm_over_gemm(problem)
    if peers < 2 or _is_empty(problem) or problem.op not in _SHARDED or comm > 1:
        return {"span": 1, "alone": 0}
    if problem.op == "gemm_rs" and problem.rows_per_rank >= 128 and problem.n <= _WIDE * problem.num_sms // 2:
        # Large tiles that run at once are of two shards or more anyway, and read the weight together.
        return {"span": 1, "alone": 0}
    span = min(peers, _SPAN_ROWS // max(1, problem.rows_per_rank))
    if span == 2 and peers > 2 and problem.op == "ag_gemm" and problem.link != "same GPU":
        return {"span": 2, "alone": -1}
    if span > 1:
        return {"span": span, "alone": min(1, peers - span)}
    coming = comm * problem.world_size / peers  # of one chunk, in times of its product
    # When 1 + alone chunks are multiplied, alone + 2 must have come.
    alone = math.ceil(max(0.0, 2 * coming - 1) / (1 - coming)) if coming < 1 else peers
    if problem.link == "same GPU" or problem.rows_per_rank >= _ROWS_ENOUGH or alone + 2 > peers:
        return {"span": 1, "alone": 0}
    return {"span": 2, "alone": alone}


def _large_tile(problem: GemmProblem) -> tuple[int, int]:
    """The tile that is expected to end first, by how many waves of them there are on the SMs.

    Where an all-gather takes longer than its product that is not the whole of it but what the last rows leave to do;
    one tile of 128 x 256 then is as long as several chunks' rows. Of the other ops ranks may differ in K, and must not
    in their tiles: how long communication takes beside the product is not asked.
    """
    shapes = {tile: speed for tile, speed in _TILE_SPEEDS.items() if tile[0] == 128}
    rows = problem.m
    if problem.op in _GATHERS and _comm_over_gemm(problem) > 1:
        shapes, rows = _TILE_SPEEDS, problem.rows_per_rank
    num_sms = max(1, problem.num_sms)

    def duration(tile: tuple[int, int]) -> float:
        num_tiles = -(-rows // tile[0]) * -(-problem.n // tile[1])
        return -(-num_tiles // num_sms) * tile[0] * tile[1] / shapes[tile]

    return min(shapes, key=duration)


def _comm_over_gemm(problem: GemmProblem) -> float:
    """How long gathering, or sending off, takes, in times of the product. A rough estimate."""
    if 0 in (problem.m, problem.n, problem.k):
        return 0.0
    row_bytes = problem.k * ITEMSIZE[problem.dtype]
    if problem.op in _SCATTERS:
        row_bytes = problem.n * max(2, ITEMSIZE[problem.dtype])
    moved = problem.m * row_bytes * (1 - 1 / problem.world_size)
    return moved / _LINK_BYTES_PER_S.get(problem.link, _FAST) / _product_s(problem)


def _product_s(problem: GemmProblem) -> float:
    return 2 * problem.m * problem.n * problem.k / (max(1, problem.num_sms) * _FLOPS_PER_SM)
