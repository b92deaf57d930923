"""What the GPU is and how GPUs are linked: one place to ask, one to fake."""

from __future__ import annotations

import functools
import subprocess

import torch

__all__ = ["arch", "link", "num_sms", "peer_access", "uuid"]


def num_sms(device: torch.device) -> int:
    """SMs this process may use: under MPS with a share, that share."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def uuid(device: torch.device) -> str:
    """The GPU's own name, the same in every process, whatever CUDA_VISIBLE_DEVICES says."""
    return str(torch.cuda.get_device_properties(device).uuid)


def link(mine: tuple[str, str], other: tuple[str, str]) -> str:
    """How two GPUs, given as (host, uuid), are joined."""
    if mine[0] != other[0]:
        return "network"
    if mine[1] == other[1]:
        return "same GPU"
    return _topology().get(frozenset((mine[1], other[1])), "PCIe")


def peer_access(first: int, second: int) -> bool:
    """Whether one GPU of this process can read the other's memory."""
    return bool(torch.cuda.can_device_access_peer(first, second))


@functools.cache
def _topology() -> dict[frozenset[str], str]:
    """Pairs of GPU uuids joined by NVLink, from ``nvidia-smi``; empty where it cannot tell."""
    names = _nvidia_smi("--query-gpu=uuid", "--format=csv,noheader").split()
    uuids = [name.removeprefix("GPU-") for name in names]
    pairs: dict[frozenset[str], str] = {}
    rows = [row.split() for row in _nvidia_smi("topo", "-m").splitlines() if row.startswith("GPU")]
    for first, row in enumerate(rows[: len(uuids)]):
        for second, kind in enumerate(row[1 : len(uuids) + 1]):
            if kind.startswith("NV") and first != second:
                pairs[frozenset((uuids[first], uuids[second]))] = "NVLink"
    return pairs


def _nvidia_smi(*arguments: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


@functools.cache
def arch(device: torch.device) -> int:
    """Compute capability as one number: 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
