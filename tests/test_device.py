"""How GPUs are linked, told from faked output of nvidia-smi."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tileflux import device

TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tCPU Affinity
GPU0\t X \tNV18\tSYS\t0-63
GPU1\tNV18\t X \tSYS\t0-63
GPU2\tSYS\tSYS\t X \t64-127
"""


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    answers = {"--query-gpu=uuid": "GPU-a\nGPU-b\nGPU-c\n", "topo": TOPOLOGY}
    monkeypatch.setattr(device, "_nvidia_smi", lambda *arguments: answers[arguments[0]])
    device._topology.cache_clear()
    yield
    device._topology.cache_clear()


@pytest.mark.usefixtures("three_gpus")
def test_links() -> None:
    assert device.link(("here", "a"), ("here", "a")) == "same GPU"
    assert device.link(("here", "a"), ("here", "b")) == "NVLink"
    assert device.link(("here", "a"), ("here", "c")) == "PCIe"
    assert device.link(("here", "a"), ("there", "b")) == "network"


def test_compute_capability_is_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {0: (8, 9), 1: (9, 0), 2: (12, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    device.arch.cache_clear()
    assert [device.arch(torch.device("cuda", index)) for index in capabilities] == [89, 90, 120]
    device.arch.cache_clear()


def test_no_tool_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.subprocess, "run", _missing)
    assert device._nvidia_smi("topo", "-m") == ""


def _missing(*_: object, **__: object) -> None:
    raise FileNotFoundError


@pytest.mark.gpu
def test_a_gpu_has_sms_and_a_name() -> None:
    here = torch.device("cuda", 0)
    assert device.num_sms(here) > 0 and len(device.uuid(here)) > 8
