"""What this machine has: versions, GPUs and the links between them. Asks, and starts nothing."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import socket
import subprocess
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

import tileflux
from tileflux import device as device_info
from tileflux import env
from tileflux.cli._worlds import MPS_CONTROL

__all__ = ["Gpu", "Link", "Machine", "inspect_machine"]

_FOREIGN = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "GLOO_SOCKET_IFNAME", "TRITON_INTERPRET")


@dataclass(frozen=True)
class Gpu:
    """A GPU as torch sees it."""

    index: int
    name: str
    capability: str
    num_sms: int
    memory_bytes: int
    multicast: bool


@dataclass(frozen=True)
class Link:
    """How two GPUs are joined, and whether each can read the other's memory."""

    gpus: tuple[int, int]
    kind: str
    peer_access: bool


@dataclass(frozen=True)
class Machine:
    """The facts of a bug report."""

    versions: dict[str, str]
    """By component; empty where there is none."""
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    num_driver_gpus: int
    """GPUs that the driver lists, whether or not torch can use them."""
    gpu_problem: str
    """Why torch cannot use the GPUs, if it said so."""
    mps_control: str
    """Path of the MPS control program; empty if there is none."""
    variables: dict[str, str] = field(default_factory=dict)
    """Settings in the environment, of ours and of others that change what works."""


def inspect_machine() -> Machine:
    """Look around. A GPU that cannot be asked is a ``gpu_problem``, never an exception."""
    driver, num_driver_gpus = _driver()
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
                links = _links(gpus)
        except (RuntimeError, AssertionError) as error:
            gpus, links, problem = (), (), _first_line(error)
        else:
            problem = "" if gpus or not caught else _first_line(caught[0].message)
    return Machine(
        versions=_versions(driver),
        gpus=gpus,
        links=links,
        num_driver_gpus=num_driver_gpus,
        gpu_problem=problem,
        mps_control=shutil.which(MPS_CONTROL) or "",
        variables=env.set_variables(_FOREIGN),
    )


def _versions(driver: str) -> dict[str, str]:
    return {
        "tileflux": tileflux.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "numpy": _installed("numpy"),
        "cuda": torch.version.cuda or "",
        "driver": driver,
        "system": platform.platform(terse=True),
    }


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> tuple[str, int]:
    """Version of NVIDIA's driver and the number of GPUs it lists; nothing and 0 without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "", 0
    lines = done.stdout.split() if done.returncode == 0 else []
    return (lines[0], len(lines)) if lines else ("", 0)


def _gpu(index: int) -> Gpu:
    from tileflux.symm.cuda import has_multicast

    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        index=index,
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        num_sms=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        multicast=has_multicast(torch.device("cuda", index)),
    )


def _links(gpus: Sequence[Gpu]) -> tuple[Link, ...]:
    host = socket.gethostname()
    places = [(host, device_info.uuid(torch.device("cuda", gpu.index))) for gpu in gpus]
    return tuple(
        Link(
            (first, second),
            device_info.link(places[first], places[second]),
            device_info.peer_access(first, second) and device_info.peer_access(second, first),
        )
        for second in range(len(gpus))
        for first in range(second)
    )


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
