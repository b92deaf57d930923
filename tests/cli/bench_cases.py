"""What tests of ``tileflux bench`` share: made-up times in place of ranks, and a made-up GPU."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tileflux import env
from tileflux.cli import _worlds, app
from tileflux.cli._worlds import World
from tileflux.testing.bench import BenchCase, RankTimes, measure

bench_module = import_module("tileflux.cli.bench")
ROOT = Path(__file__).parents[2]
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


def invoke(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["bench", *arguments])


def made_up(cases: Sequence[BenchCase]) -> list[RankTimes]:
    """Times of one rank: sequential takes M us, ours fused three quarters of that."""
    found = []
    for case in cases:
        took = {"gemm": 0.6, "comm": 0.4, "beside": 0.7, "sequential": 1.0, "ours fused": 0.75}
        rounds = {name: [1e-6 * case.m * share] * (case.num_rounds or 20) for name, share in took.items()}
        found.append(RankTimes("", rounds, {"torch": "not today"}, "fused"))
    return found


class Recorder:
    """Stands in for ``run``: keeps what it was asked for, and answers with made-up times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worlds: list[World] = []
        self.cases: tuple[BenchCase, ...] = ()
        self.link = ""
        monkeypatch.setattr(bench_module, "run", self)

    def __call__(self, world: World, function: object, args: tuple[Any, ...], *, timeout_s: float) -> list[Any]:
        assert function is measure and timeout_s >= 3600
        self.worlds.append(world)
        self.cases = args[0]
        self.link = str(env.link())
        return [made_up(self.cases)] * (1 if world.where == "ghost" else world.size)


def rows_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if re.search(r"\dx .*%\s*$", line)]


def pretend(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(_worlds, "num_gpus", lambda: gpus)
    monkeypatch.setattr(_worlds.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Made-up GPU")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def launch(*arguments: str, num_ranks: int = 2) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of every rank, started as torchrun starts them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tileflux", "bench", *arguments], cwd=ROOT, text=True,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    ended = [(process, process.communicate(timeout=100)) for process in processes]
    return [(process.returncode, *texts) for process, texts in ended]
