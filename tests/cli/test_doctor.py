"""``tileflux doctor``: its report, its JSON, and that what fails is told with the way to mend it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tileflux
from tileflux import env, ops
from tileflux.cli import _machine, _worlds, app
from tileflux.cli._machine import Gpu, Link, Machine, inspect_machine
from tileflux.cli._probes import Probe, Status, make_probes, run_probe
from tileflux.errors import TransportUnavailable
from tileflux.symm.group import Group

ROOT = Path(__file__).parents[2]
doctor_module = import_module("tileflux.cli.doctor")
ON_CPU = {"shm", "local_cpu", "interpreter", "compiler"}
ON_GPU = {"gpu", "local_gpu", "cuda_gpus", "cuda_shared"}


def invoke(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["doctor", *arguments])


def machine(num_gpus: int = 0, **changes: Any) -> Machine:
    """A made-up machine."""
    facts: dict[str, Any] = {
        "versions": {"tileflux": "1.2.3", "torch": "9.9", "driver": ""},
        "gpus": tuple(Gpu(index, "Made-up GPU", "9.0", 132, 80 << 30, index == 0) for index in range(num_gpus)),
        "links": tuple(Link((a, b), "NVLink", True) for b in range(num_gpus) for a in range(b)),
        "num_driver_gpus": num_gpus,
        "gpu_problem": "",
        "mps_control": "",
    }
    return Machine(**facts | changes)


def probe_named(name: str, on: Machine) -> Probe:
    (probe,) = (probe for probe in make_probes(on) if probe.name == name)
    return probe


def check_json(text: str) -> dict[str, Any]:
    """The promised fields and their types; returns the object."""
    report = json.loads(text)
    types = {
        "ok": bool, "versions": dict, "gpus": list, "links": list, "num_driver_gpus": int, "gpu_problem": str,
        "mps_control": str, "variables": dict, "checks": list,
    }  # fmt: skip
    assert {name: type(value) for name, value in report.items()} == types
    assert {"tileflux", "python", "torch", "triton", "numpy", "cuda", "driver"} <= set(report["versions"])
    assert report["versions"]["tileflux"] == tileflux.__version__
    assert all(isinstance(version, str) for version in report["versions"].values())
    for check in report["checks"]:
        kinds = {name: type(value) for name, value in check.items()}
        assert kinds == {"name": str, "title": str, "status": str, "detail": str, "fix": str, "seconds": float}
        assert check["status"] in {"ok", "failed", "not applicable"}
        assert check["detail"]
        assert bool(check["fix"]) == (check["status"] == "failed")
    for gpu in report["gpus"]:
        assert set(gpu) == {"index", "name", "capability", "num_sms", "memory_bytes", "multicast"}
    for link in report["links"]:
        assert set(link) == {"gpus", "kind", "peer_access"}
    assert report["ok"] == all(check["status"] != "failed" for check in report["checks"])
    assert {check["name"] for check in report["checks"]} == ON_CPU | ON_GPU
    return dict(report)


def test_as_a_program_with_json() -> None:
    """Settings that would pick a transport or a backend change no verdict."""
    settings = {"TILEFLUX_TRANSPORT": "cuda", "TILEFLUX_CPU_BACKEND": "interpret", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "tileflux", "doctor", "--json"],
        cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = check_json(done.stdout)
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert statuses == dict.fromkeys(ON_CPU, "ok") | dict.fromkeys(ON_GPU, "not applicable")
    assert report["variables"]["TILEFLUX_TRANSPORT"] == "cuda"


def _only(monkeypatch: pytest.MonkeyPatch, *probes: Probe, on: Machine | None = None) -> None:
    monkeypatch.setattr(doctor_module, "make_probes", lambda _: probes)
    monkeypatch.setattr(doctor_module, "inspect_machine", lambda: on or machine())


def test_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(variables={"TILEFLUX_CHECK": "1"})
    _only(monkeypatch, *(probe_named(name, here) for name in ("shm", "local_cpu", "local_gpu")), on=here)
    result = invoke()
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert {"tileflux 1.2.3", "torch 9.9", "driver none", "TILEFLUX_CHECK 1"} <= set(lines)
    assert "GPUs none that torch can use" in lines
    assert [line for line in lines if line.startswith("ok CPU processes all_gather and all_reduce of 2 ranks right")]
    assert [line for line in lines if line.startswith("ok virtual ranks, CPU all_gather and all_reduce")]
    assert "n/a virtual ranks, one GPU no GPU here" in lines
    assert lines[-1] == "All 2 things that should work here do. 1 need what this machine does not have."
    assert max(len(line) for line in result.output.splitlines()) <= 80
    assert "\x1b" not in result.output and "trying" not in result.output


def test_what_fails_is_told_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise TransportUnavailable("the wire is cut", "solder it")

    def stumble() -> str:
        raise LookupError("no idea\nand more")

    good = Probe("good", "a good thing", lambda: "fine", "never shown")
    _only(monkeypatch, Probe("a", "a wire", refuse, "not this"), good, Probe("b", "a riddle", stumble, "ask around"))
    result = invoke()
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert "FAILED a wire the wire is cut to fix: solder it" in text
    assert "FAILED a riddle LookupError: no idea to fix: ask around" in text
    assert "ok a good thing fine" in text
    assert "never shown" not in text and "not this" not in text and "and more" not in text
    assert text.endswith("2 of 3 things that should work here do not.")
    again = invoke("--json")
    assert again.exit_code == 1
    report = json.loads(again.stdout)
    assert report["ok"] is False
    assert [(check["status"], check["fix"]) for check in report["checks"]] == [
        ("failed", "solder it"), ("ok", ""), ("failed", "ask around"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["shm", "local_cpu"])
def test_a_wrong_result_fails_the_probe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true_op = ops.all_reduce

    def wrong(x: torch.Tensor, *, group: Group, out: torch.Tensor, **options: Any) -> torch.Tensor:
        true_op(x, group=group, out=out, **options)
        return out.mul_(2 if group.rank == 1 else 1)

    monkeypatch.setattr(ops, "all_reduce", wrong)
    check = run_probe(probe_named(name, machine()))
    assert check.status is Status.FAILED
    assert "AssertionError: rank 1, all_reduce, one shot" in check.detail
    assert check.fix == probe_named(name, machine()).fix


def _oversleep(group: Group) -> None:
    time.sleep(60)


def test_ranks_that_hang_fail_the_probe_at_its_deadline() -> None:
    world = _worlds.virtual_ranks(2, "cpu")
    probe = Probe("slow", "slow", lambda: str(_worlds.run(world, _oversleep, timeout_s=0.5)), "wake up")
    check = run_probe(probe)
    assert (check.status, check.fix) == (Status.FAILED, "wake up")
    assert "ranks 0, 1 of 2 did not finish within 0.5 s" in check.detail
    assert check.seconds < 10


@pytest.mark.parametrize(
    ("on", "applicable"),
    [
        (machine(0), set()),
        (machine(1), ON_GPU - {"cuda_gpus"}),
        (machine(2), ON_GPU),
        (machine(0, num_driver_gpus=1), {"gpu"}),
        (machine(0, gpu_problem="driver too old"), {"gpu"}),
        (machine(0, num_driver_gpus=1, variables={"CUDA_VISIBLE_DEVICES": ""}), set()),
    ],
)
def test_what_can_be_expected_of_a_machine(on: Machine, applicable: set[str]) -> None:
    assert {probe.name for probe in make_probes(on) if not probe.not_applicable} == ON_CPU | applicable


def test_gpus_that_torch_cannot_use_are_a_failure() -> None:
    check = run_probe(probe_named("gpu", machine(0, num_driver_gpus=2)))
    assert check.status is Status.FAILED
    assert check.detail == "RuntimeError: the driver lists 2, torch sees none"
    assert "install a torch built for CUDA" in check.fix
    assert "too old" in run_probe(probe_named("gpu", machine(0, gpu_problem="driver too old"))).detail
    assert run_probe(probe_named("gpu", machine(2))).detail == "2 of 2"


@pytest.mark.parametrize(("mps_control", "where"), [("/usr/bin/nvidia-cuda-mps-control", "mps"), ("", "spawn")])
def test_a_gpu_is_shared_in_turns_without_mps(mps_control: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = []

    def run(world: _worlds.World, *args: object, **kwargs: object) -> list[str]:
        worlds.append((world.where, world.device))
        return ["same GPU"] * 2

    monkeypatch.setattr(_worlds, "run", run)
    check = run_probe(probe_named("cuda_shared", machine(1, mps_control=mps_control)))
    assert check.status is Status.OK
    assert worlds == [(where, "cuda:0")]
    assert ("in turns, which is slow: nvidia-cuda-mps-control is not on PATH" in check.detail) == (where == "spawn")


def test_many_gpus_with_one_kind_of_link_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, Probe("a", "a", lambda: "b", ""), on=machine(8))
    text = [" ".join(line.split()) for line in invoke().output.splitlines()]
    assert "GPU 0 Made-up GPU, sm_90, 132 SMs, 80 GiB, multicast" in text
    assert "GPU 7 Made-up GPU, sm_90, 132 SMs, 80 GiB" in text
    assert "links all NVLink, peer access" in text
    links = (Link((0, 1), "NVLink", True), Link((0, 2), "PCIe", False), Link((1, 2), "PCIe", False))
    assert doctor_module._grouped(links) == {"0-1": "NVLink, peer access", "0-2 1-2": "PCIe, no peer access"}


def test_a_gpu_that_cannot_be_asked_is_a_problem_and_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> None:
        raise RuntimeError("CUDA error: all gone\nmore words")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    seen = inspect_machine()
    assert (seen.gpus, seen.links, seen.gpu_problem) == ((), (), "CUDA error: all gone")


def test_a_driver_without_a_torch_for_it_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.1\necho 580.1\n")
    program.chmod(0o755)
    (tmp_path / _worlds.MPS_CONTROL).write_text("#!/bin/sh\n")
    (tmp_path / _worlds.MPS_CONTROL).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("TILEFLUX_CHECK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen = inspect_machine()
    assert (seen.versions["driver"], seen.num_driver_gpus, seen.gpus) == ("580.1", 2, ())
    assert seen.mps_control == str(tmp_path / _worlds.MPS_CONTROL)
    assert seen.variables["TILEFLUX_CHECK"] == "1"
    program.write_text("#!/bin/sh\necho 580.1\nexit 9\n")
    assert _machine._driver() == ("", 0)


def test_a_missing_compiler_fails_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    class NoTools:
        @property
        def ptxas(self) -> None:
            raise RuntimeError("Cannot find ptxas")

    monkeypatch.setattr(knobs, "nvidia", NoTools())
    check = run_probe(probe_named("compiler", machine()))
    assert (check.status, check.detail) == (Status.FAILED, "RuntimeError: Cannot find ptxas")
    assert "TRITON_PTXAS_PATH" in check.fix


def test_settings_of_the_shell_do_not_reach_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEFLUX_TRANSPORT", "cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check = run_probe(Probe("a", "a", lambda: f"{env.transport()} {env.interpreting()}", ""))
    assert check.detail == "auto False"
    assert env.transport() == "cuda"


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    result = invoke("--json")
    assert result.exit_code == 0, result.output
    statuses = {check["name"]: check["status"] for check in check_json(result.stdout)["checks"]}
    assert {statuses[name] for name in ("gpu", "local_gpu", "cuda_shared")} == {"ok"}
    assert statuses["cuda_gpus"] == ("ok" if torch.cuda.device_count() > 1 else "not applicable")
