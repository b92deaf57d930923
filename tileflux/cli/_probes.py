"""Live tests of what should work on a machine: each runs ranks or a tool for a moment and looks at the result."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tileflux import env
from tileflux.cli import _worlds
from tileflux.cli._machine import Machine
from tileflux.cli._worlds import World
from tileflux.errors import TilefluxError
from tileflux.symm.group import Group
from tileflux.testing.collectives import COLLECTIVES, check_collectives
from tileflux.testing.ranks import run_ranks

__all__ = ["Check", "Probe", "Status", "make_probes", "run_probe"]

_WAIT_S = 10.0
_CPU_S, _GPU_S = 30.0, 90.0  # a rank on a GPU imports torch and compiles kernels first
_NO_GPU = "no GPU here"
_CHECKED = ("all_gather", "all_reduce, one shot")


class Status(enum.StrEnum):
    """What came of a check."""

    OK = "ok"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Check:
    """The outcome of one probe."""

    name: str
    title: str
    status: Status
    detail: str
    fix: str
    seconds: float


@dataclass(frozen=True)
class Probe:
    """Something that may work. ``run`` returns what it saw, or raises."""

    name: str
    title: str
    run: Callable[[], str]
    fix: str
    """What to try where the error itself does not say."""
    not_applicable: str = ""
    """Why it cannot be expected to work here; empty if it can."""


def run_probe(probe: Probe) -> Check:
    """Try it. Whatever goes wrong is in the answer."""

    def outcome(status: Status, detail: str, fix: str = "") -> Check:
        return Check(probe.name, probe.title, status, detail, fix, round(time.monotonic() - start, 3))

    start = time.monotonic()
    if probe.not_applicable:
        return outcome(Status.NOT_APPLICABLE, probe.not_applicable)
    try:
        # What is proven is the machine, whatever this shell's settings would pick.
        with env.scoped({**dict.fromkeys(env.VARIABLES), "TRITON_INTERPRET": None}):
            return outcome(Status.OK, probe.run())
    except TilefluxError as error:
        detail, fix = _worlds.explain(error)
    except Exception as error:
        detail, fix = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", ""
    return outcome(Status.FAILED, detail, fix or probe.fix)


def make_probes(machine: Machine) -> Iterator[Probe]:
    """Everything worth proving on ``machine``."""
    no_gpu = "" if machine.gpus else _NO_GPU
    yield Probe(
        "gpu",
        "torch uses the GPUs",
        lambda: _use_gpus(machine),
        "install a torch built for CUDA that this driver supports, and check CUDA_VISIBLE_DEVICES",
        _why_no_gpu(machine),
    )
    yield Probe(
        "shm",
        "CPU processes",
        lambda: _collectives(_worlds.cpu_processes(2)),
        "run all ranks as one user in one container, and let them use the loopback interface (GLOO_SOCKET_IFNAME)",
    )
    yield Probe(
        "local_cpu",
        "virtual ranks, CPU",
        lambda: _collectives(_worlds.virtual_ranks(2, "cpu")),
        "nothing of the machine is needed: please report this with the output of tileflux doctor --json",
    )
    yield Probe(
        "local_gpu",
        "virtual ranks, one GPU",
        lambda: _collectives(_worlds.virtual_ranks(2, "cuda:0")),
        "check with nvidia-smi that the GPU is idle and healthy, and that it is sm_80 or newer",
        no_gpu,
    )
    yield Probe(
        "cuda_gpus",
        "a GPU per process",
        lambda: _collectives(_worlds.gpu_processes(2)),
        "the GPUs need peer access (nvidia-smi topo -p2p r), and the ranks one user in one container",
        no_gpu or ("" if len(machine.gpus) > 1 else "only one GPU here"),
    )
    yield Probe(
        "cuda_shared",
        "processes sharing a GPU",
        lambda: _share_gpu(machine),
        "the GPU's compute mode must be Default (nvidia-smi -c 0), and this user must be allowed to use it",
        no_gpu,
    )
    yield Probe(
        "interpreter",
        "kernels interpreted",
        _interpret,
        "the interpreter is repaired for triton 3.6, with any numpy: pip install 'triton==3.6.*'. Only tests need it",
    )
    yield Probe(
        "compiler",
        "ptxas",
        _find_ptxas,
        "reinstall triton, which brings ptxas along, or name another in TRITON_PTXAS_PATH",
    )


def _why_no_gpu(machine: Machine) -> str:
    """Why nobody would expect torch to use a GPU here; empty if it should."""
    if machine.gpus or machine.gpu_problem:
        return ""
    if "CUDA_VISIBLE_DEVICES" in machine.variables:
        return "CUDA_VISIBLE_DEVICES leaves none"
    return "" if machine.num_driver_gpus else _NO_GPU


def _use_gpus(machine: Machine) -> str:
    if machine.gpus:
        return f"{len(machine.gpus)} of {machine.num_driver_gpus or len(machine.gpus)}"
    raise RuntimeError(machine.gpu_problem or f"the driver lists {machine.num_driver_gpus}, torch sees none")


def _share_gpu(machine: Machine) -> str:
    if machine.mps_control:
        return f"{_collectives(_worlds.mps_processes(2))}, under MPS"
    seen = _collectives(_worlds.shared_gpu_processes(2))
    return f"{seen}, in turns, which is slow: {_worlds.MPS_CONTROL} is not on PATH"


def _collectives(world: World) -> str:
    timeout_s = _GPU_S if world.on_gpu else _CPU_S
    links = _worlds.run(world, _try_collectives, timeout_s=timeout_s, group_timeout_s=_WAIT_S)
    return f"all_gather and all_reduce of {world.size} ranks right; link: {links[0]}"


def _try_collectives(group: Group) -> str:
    """Runs on every rank. Returns how the next rank is reached."""
    chosen = [collective for collective in COLLECTIVES if collective.name in _CHECKED]
    assert len(chosen) == len(_CHECKED)
    check_collectives(group, [(48, 128)], [torch.float32], collectives=chosen)
    multicast = ", multicast" if group.traits.has_multicast else ""
    return group.traits.links[(group.rank + 1) % group.world_size] + multicast


def _interpret() -> str:
    # Read when a kernel is defined: only a fresh process can.
    with env.scoped({"TRITON_INTERPRET": "1"}):
        (seen,) = run_ranks(_simulate, 1, where="spawn", device="cpu", make_group=False, timeout_s=_GPU_S)
    return str(seen)


def _simulate(rank: int, world_size: int) -> str:
    import numpy
    import triton

    from tileflux.testing.simulator import simulate

    chosen = [collective for collective in COLLECTIVES if collective.name in _CHECKED]
    simulate(check_collectives, 2, seed=0, args=([(3, 5)], [torch.float32], 0, chosen))
    return f"all_gather and all_reduce of 2 ranks right; triton {triton.__version__}, numpy {numpy.__version__}"


def _find_ptxas() -> str:
    from triton import knobs

    tool = knobs.nvidia.ptxas  # runs it once, to learn its version
    return f"release {tool.version}"
