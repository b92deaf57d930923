"""Every environment variable Tileflux reads or sets, and nothing else reads or sets one.

Each reader is a function, so that a test or a launcher may change the variable at any time. The table in
``docs/environment.md`` is checked against ``VARIABLES`` by a test.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from tileflux.link import Link

__all__ = [
    "VARIABLES",
    "check",
    "compiler_environment",
    "cpu_backend",
    "interpreting",
    "link",
    "local_rank",
    "settings_for_streams",
    "single_queue",
    "scoped",
    "separate_queues",
    "separate_streams",
    "set_variables",
    "share_gpu",
    "timeout_s",
    "torchrun_present",
    "transport",
    "tune_dir",
    "use_loopback",
]

_FOR_STREAMS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}

VARIABLES: Mapping[str, str] = {
    "TILEFLUX_TIMEOUT_S": "Seconds a wait may last before it becomes PeerTimeout. Default 30.",
    "TILEFLUX_CHECK": "1: ranks compare op, dtype and shapes before every call. Slow; for finding mistakes. Default 0.",
    "TILEFLUX_CPU_BACKEND": "host: collectives on CPU tensors run as plain Python and torch. interpret: they run "
    "the Triton kernels interpreted (needs TRITON_INTERPRET=1 and testing.interpreter.install()). Default host.",
    "TILEFLUX_TRANSPORT": "auto, shm or cuda: who carries the bytes of a group made from a process group. "
    "Default auto: cuda for CUDA devices, shm for the CPU.",
    "TILEFLUX_LINK": "Emulates a link between CPU ranks, such as 2GB/s,20us: what a rank sends takes that long, "
    "without using a core. Default: none, bytes move as fast as the machine copies them.",
    "TILEFLUX_TUNE_DIR": "Folder of what tileflux tune has measured, which strategy='auto' goes by. Empty: nothing "
    "measured here is used or kept. Default ~/.cache/tileflux.",
}


def timeout_s() -> float:
    """Deadline of a wait, in seconds."""
    return _positive_float("TILEFLUX_TIMEOUT_S", 30.0)


def check() -> bool:
    """Whether ranks compare their calls before running them."""
    return _choice("TILEFLUX_CHECK", "0", ("0", "1")) == "1"


def cpu_backend() -> str:
    """``host`` or ``interpret``."""
    return _choice("TILEFLUX_CPU_BACKEND", "host", ("host", "interpret"))


def transport() -> str:
    """``auto``, ``shm`` or ``cuda``."""
    return _choice("TILEFLUX_TRANSPORT", "auto", ("auto", "shm", "cuda"))


def link() -> Link | None:
    """The link that CPU ranks send through, if one is to be emulated."""
    text = os.environ.get("TILEFLUX_LINK")
    if text is None:
        return None
    try:
        return Link.parse(text)
    except ValueError as error:
        raise ValueError(f"TILEFLUX_LINK={text!r} is not a link: {error}") from None


def tune_dir() -> str:
    """The folder of the user's measured entries; empty if none are to be used."""
    return _folder(os.environ.get("TILEFLUX_TUNE_DIR", "~/.cache/tileflux"), os.environ.get("HOME"))


@functools.cache
def _folder(text: str, home: str | None) -> str:
    return os.path.abspath(os.path.expanduser(text)) if text else ""


def set_variables(others: Iterable[str] = ()) -> dict[str, str]:
    """Those of ``VARIABLES`` and ``others`` that are set, with their text."""
    return {name: os.environ[name] for name in (*VARIABLES, *others) if name in os.environ}


def interpreting() -> bool:
    """Whether Triton was told to interpret kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def run_kernels_on_cpu() -> None:
    """Have ops on CPU tensors launch kernels, as they do where these are interpreted, rather than their host twins."""
    os.environ["TILEFLUX_CPU_BACKEND"] = "interpret"


def torchrun_present() -> bool:
    """Whether a launcher set the variables that ``torch.distributed`` initialises from."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def local_rank() -> int:
    """Index of this process among those of its machine, 0 if nobody says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def share_gpu() -> None:
    """Let torch's symmetric memory accept several ranks on one GPU.

    Multicast must go with it: torch asks the device, not the allocation, whether multicast works, and a
    shared GPU's allocations never have it.
    """
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"


def settings_for_streams() -> dict[str, str]:
    """What to set, before CUDA starts, so that streams of a process may wait for each other; less what is set.

    CUDA has 8 hardware queues by default, and lets streams share them: then a kernel of one virtual rank may stand
    behind another rank's that waits for it. And it loads a library's kernel when it is first launched, which does not
    end while another kernel runs: a rank that comes to one of torch's late would never get on. MPS clients, each of
    which has one rank, have to do with the defaults.
    """
    return {name: value for name, value in _FOR_STREAMS.items() if name not in os.environ}


def separate_streams() -> bool:
    """Set ``settings_for_streams`` for this process; whether that was done before."""
    missing = settings_for_streams()
    os.environ.update(missing)
    return not missing


def separate_queues() -> None:
    """Ask for a hardware queue for each of a process's streams, unless told otherwise; before CUDA is started."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _FOR_STREAMS["CUDA_DEVICE_MAX_CONNECTIONS"])


def single_queue() -> bool:
    """Whether CUDA was told to put all streams into one hardware queue, as some frameworks do.

    What one of them waits for then keeps from the GPU all that is queued later, on whichever.
    """
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def use_loopback() -> None:
    """Let gloo use the loopback interface unless told otherwise.

    Without it gloo looks the machine's own name up, which fails or stalls where no name service knows it.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def compiler_environment(cache_dir: str, scratch_dir: str, import_path: Iterable[str]) -> dict[str, str]:
    """Variables for a process that compiles kernels to judge them: imports as here, cache and scratch of its own.

    Whatever makes Triton interpret, dump, override or optimise otherwise is left out, so that the verdict does not
    depend on the caller's settings. Paths of its tools stay.
    """
    altering = {"DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT", "PTXAS_OPTIONS"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in altering and (not name.startswith("TRITON_") or name.endswith("_PATH"))
    }
    path = os.pathsep.join(folder or os.getcwd() for folder in import_path)
    return {**kept, "TRITON_CACHE_DIR": cache_dir, "TMPDIR": scratch_dir, "PYTHONPATH": path}


@contextmanager
def scoped(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set (or with None unset) variables for the length of a ``with`` block, children started inside included."""
    before = {name: os.environ.get(name) for name in changes}
    _apply(changes)
    try:
        yield
    finally:
        _apply(before)


def _apply(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _positive_float(name: str, default: float) -> float:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:  # false for NaN too
        raise ValueError(f"{name}={text!r} is not a positive number of seconds, such as {default:g}")
    return value


def _choice(name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = os.environ.get(name, default)
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")
    return value
