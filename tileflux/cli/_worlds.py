"""Ways to run a few ranks on this machine, and the choice among them."""

from __future__ import annotations

import enum
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console

from tileflux import env
from tileflux.cli._console import fail
from tileflux.errors import RankFailed, TilefluxError, TransportUnavailable
from tileflux.symm.group import Group
from tileflux.testing.ranks import Where, run_ranks

__all__ = [
    "MPS_CONTROL",
    "BenchPlace",
    "Place",
    "World",
    "attempt",
    "choose",
    "choose_for_bench",
    "cpu_processes",
    "explain",
    "ghost_world",
    "gpu_processes",
    "is_unavailable",
    "mps_processes",
    "num_gpus",
    "reason",
    "run",
    "run_here",
    "shared_gpu_processes",
    "torchrun_world",
    "virtual_ranks",
]

Result = TypeVar("Result")

MPS_CONTROL = "nvidia-cuda-mps-control"
_GRACE_S = 10.0  # by which a process outlasts the virtual ranks in it, whose error says more


class Place(enum.StrEnum):
    """Where the user wants the ranks."""

    AUTO = "auto"
    CPU = "cpu"
    LOCAL = "local"
    MPS = "mps"


class BenchPlace(enum.StrEnum):
    """Where the user wants the ranks of a benchmark: as in ``Place``, and two ways that only measuring has."""

    AUTO = "auto"
    CPU = "cpu"
    LOCAL = "local"
    MPS = "mps"
    GHOST = "ghost"
    TORCHRUN = "torchrun"


@dataclass(frozen=True)
class World:
    """``size`` ranks, started by ``run_ranks`` as ``where`` and ``device`` say; ``text`` says it to people.

    Two ways are not ``run_ranks``'s: ``ghost`` is one process whose peers are played for it, and with ``torchrun`` this
    process is a rank already, of a world whose size is 0 here until it has met the others.
    """

    size: int
    where: Where | Literal["ghost", "torchrun"]
    device: str
    text: str

    @property
    def on_gpu(self) -> bool:
        """Whether ranks use a GPU."""
        return self.device != "cpu"


def cpu_processes(size: int) -> World:
    """Forked processes over shared memory."""
    return World(size, "fork", "cpu", f"{_count(size, 'CPU process')} over shared memory")


def virtual_ranks(size: int, device: str) -> World:
    """Threads of one process, on the CPU or one GPU."""
    place = "the CPU" if device == "cpu" else "one GPU"
    return World(size, "virtual", device, f"{_count(size, 'virtual rank')} on {place}")


def mps_processes(size: int) -> World:
    """Processes side by side on one GPU."""
    return World(size, "mps", "cuda:0", f"{_count(size, 'process')} sharing one GPU under MPS")


def shared_gpu_processes(size: int) -> World:
    """Processes on one GPU that take turns. Works without MPS, slowly."""
    return World(size, "spawn", "cuda:0", f"{_count(size, 'process')} taking turns on one GPU")


def gpu_processes(size: int) -> World:
    """A GPU for each process."""
    return World(size, "spawn", "cuda", f"{_count(size, 'process')} with a GPU each")


def ghost_world(size: int) -> World:
    """One rank on a GPU, whose peers are nobody: their bytes come and go by themselves at the speed of PCIe."""
    return World(size, "ghost", "cuda:0", f"1 rank with {_count(size - 1, 'ghost peer')} behind PCIe")


def torchrun_world(size: int = 0) -> World:
    """The processes that a launcher started, of which this is one."""
    device = "cuda" if num_gpus() and env.transport() != "shm" else "cpu"
    place = "with a GPU each" if device == "cuda" else "over shared memory"
    return World(size, "torchrun", device, f"{_count(size, 'process')} of torchrun {place}")


def _count(size: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{size} {noun}{plural if size > 1 else ''}"


def num_gpus() -> int:
    """GPUs that torch can use. Asking creates no CUDA context, which would outlast the question."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose(place: Place, size: int) -> World:
    """The world for a request. ``ValueError`` for one that this machine or its settings do not allow."""
    gpus, transport = num_gpus(), env.transport()
    if place is Place.AUTO:
        usable = gpus if transport != "shm" and not env.interpreting() else 0
        if usable >= size:
            return gpu_processes(size)
        if usable:
            return mps_processes(size) if shutil.which(MPS_CONTROL) else virtual_ranks(size, "cuda:0")
        place = Place.CPU
    if place is Place.LOCAL:
        return virtual_ranks(size, "cuda:0" if gpus and not env.interpreting() else "cpu")
    wanted = "shm" if place is Place.CPU else "cuda"
    if transport not in ("auto", wanted):
        raise ValueError(f"TILEFLUX_TRANSPORT={transport} does not go with ranks that need {wanted}; unset it")
    if place is Place.CPU:
        return cpu_processes(size)
    if not gpus:
        raise ValueError("--where mps shares a GPU, and torch sees none here; use --where cpu or local")
    if env.interpreting():
        raise ValueError("TRITON_INTERPRET=1 keeps kernels off the GPU that --where mps shares; unset it")
    if not shutil.which(MPS_CONTROL):
        raise ValueError(f"--where mps needs {MPS_CONTROL}, which is not on PATH; use --where local")
    return mps_processes(size)


def choose_for_bench(place: BenchPlace, size: int) -> World:
    """The same for a benchmark. ``auto`` under a launcher is the launcher's world, not one more in every process."""
    if place is BenchPlace.TORCHRUN or (place is BenchPlace.AUTO and env.torchrun_present()):
        if not env.torchrun_present():
            raise ValueError(
                "--where torchrun is for processes that torchrun started: "
                "torchrun --nproc-per-node 4 -m tileflux bench ... --where torchrun"
            )
        return torchrun_world()
    if place is not BenchPlace.GHOST:
        return choose(Place(place.value), size)
    if size < 2:
        raise ValueError(f"--where ghost needs at least one ghost beside the rank; --world {size} has none")
    if not num_gpus():
        raise ValueError("--where ghost needs a GPU, and torch sees none here; use --where cpu")
    if env.interpreting():
        raise ValueError("TRITON_INTERPRET=1 keeps kernels off the GPU that --where ghost needs; unset it")
    if env.transport() == "shm":
        raise ValueError("TILEFLUX_TRANSPORT=shm does not go with ranks that need cuda; unset it")
    return ghost_world(size)


def run(
    world: World,
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    timeout_s: float,
    group_timeout_s: float | None = None,
) -> list[Any]:
    """``function(group, *args)`` on every rank that is to be started; results in rank order, or ``RankFailed``.

    Virtual ranks get a process of their own: threads cannot be stopped, a process can. A ghost world has one result.
    """
    assert world.where != "torchrun", "these ranks run already: run_here"
    settings = {} if group_timeout_s is None else {"timeout_s": group_timeout_s}
    if world.where == "ghost":
        return run_ranks(
            _run_ghost, 1, args=(world.size, function, args), where="spawn", device=world.device, timeout_s=timeout_s,
            make_group=False,
        )  # fmt: skip
    if world.where != "virtual":
        return run_ranks(
            function, world.size, args=args, where=world.where, device=world.device, timeout_s=timeout_s,
            group_kwargs=settings,
        )  # fmt: skip
    # Before the child starts: it starts CUDA before its ranks.
    with env.scoped(env.settings_for_streams() if world.on_gpu else {}):
        (results,) = run_ranks(
            _run_virtual, 1, args=(world, function, args, timeout_s, settings),
            where="spawn" if world.on_gpu else "fork", device=world.device, timeout_s=timeout_s + _GRACE_S,
            make_group=False,
        )  # fmt: skip
    return list(results)


def run_here(group: Group, function: Callable[..., Any], args: Sequence[Any] = ()) -> list[Any]:
    """``function(group, *args)`` on this rank of a launcher's world; all ranks' results on rank 0, none elsewhere."""
    result = function(group, *args)
    results: list[Any] | None = [None] * group.world_size if group.rank == 0 else None
    dist.gather_object(result, results)
    return results or []


def _run_ghost(
    rank: int, num_processes: int, world_size: int, function: Callable[..., Any], args: Sequence[Any]
) -> Any:
    # Here, because only a machine with a GPU can make it.
    from tileflux.testing.ghost import ghost_group

    with ghost_group(world_size) as group:
        return function(group, *args)


def _run_virtual(
    rank: int,
    num_processes: int,
    world: World,
    function: Callable[..., Any],
    args: Sequence[Any],
    timeout_s: float,
    settings: dict[str, Any],
) -> list[Any]:
    try:
        return run_ranks(
            function, world.size, args=args, where="virtual", device=world.device, timeout_s=timeout_s,
            group_kwargs=settings,
        )  # fmt: skip
    except RankFailed as error:
        # Two layers of "rank 0 failed first" help nobody.
        if error.cause is not None:
            raise error.cause from None
        raise TilefluxError(str(error).partition("\n")[0]) from None


def attempt(
    command: str, console: Console, world: World, work: Callable[[World], Result], *, may_fall_back: bool
) -> tuple[World, Result]:
    """``work(world)``, and its world: virtual ranks instead, where MPS was nobody's wish and turns out not to work.

    Leaves with status 1 and a line that says why, if ranks fail; with a traceback for what is not understood.
    """
    try:
        return world, work(world)
    except TilefluxError as error:
        if not (may_fall_back and world.where == "mps" and is_unavailable(error)):
            fail(command, reason(error), 1)
        console.print(f"MPS does not work here: {explain(error)[0]}", soft_wrap=True)
    return attempt(command, console, virtual_ranks(world.size, world.device), work, may_fall_back=False)


def reason(error: TilefluxError) -> str:
    """One line for what is understood, a rank's traceback for the rest."""
    what, fix = explain(error)
    cause = error.cause if isinstance(error, RankFailed) else None
    # Too large a shape is nobody's defect. On the CPU torch has no type of its own for it.
    is_too_large = isinstance(cause, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(cause)
    if isinstance(cause, TilefluxError | None) or is_too_large:
        return f"{what}; to fix: {fix}" if fix else what
    return str(error)


def is_unavailable(error: TilefluxError) -> bool:
    """Whether the machine lacks something, as opposed to something having gone wrong."""
    return isinstance(error.cause if isinstance(error, RankFailed) else error, TransportUnavailable)


def explain(error: TilefluxError) -> tuple[str, str]:
    """What went wrong, on one line, and how to mend it if the error knows."""
    root = error.cause if isinstance(error, RankFailed) and is_unavailable(error) else error
    line = str(root).partition("\n")[0]
    text, _, fix = line.partition(". To fix: ")
    return text, fix
