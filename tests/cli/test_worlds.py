"""Worlds that only benchmarks have: a rank among ghosts, and processes that a launcher started."""

from __future__ import annotations

import shutil
import sys
from types import ModuleType
from typing import Any

import pytest

from tileflux.cli import _worlds
from tileflux.cli._worlds import BenchPlace, Place, World, choose_for_bench, ghost_world, run, torchrun_world
from tileflux.errors import GroupClosed
from tileflux.symm.group import Group, local_groups

LAUNCHER = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def pretend(monkeypatch: pytest.MonkeyPatch, gpus: int, **settings: str) -> None:
    monkeypatch.setattr(_worlds, "num_gpus", lambda: gpus)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    for name in ("TRITON_INTERPRET", "TILEFLUX_TRANSPORT", *LAUNCHER):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


def test_places_of_the_demo_are_places_of_a_benchmark() -> None:
    assert {place.value for place in BenchPlace} - {place.value for place in Place} == {"ghost", "torchrun"}
    assert {place.value for place in Place} < {place.value for place in BenchPlace}


@pytest.mark.parametrize(
    ("place", "gpus", "settings", "wanted"),
    [
        (BenchPlace.AUTO, 0, {}, ("fork", "cpu")),
        (BenchPlace.AUTO, 1, {}, ("mps", "cuda:0")),
        (BenchPlace.CPU, 1, LAUNCHER, ("fork", "cpu")),
        (BenchPlace.LOCAL, 1, {}, ("virtual", "cuda:0")),
        (BenchPlace.MPS, 1, {}, ("mps", "cuda:0")),
        (BenchPlace.GHOST, 1, {}, ("ghost", "cuda:0")),
        (BenchPlace.AUTO, 8, LAUNCHER, ("torchrun", "cuda")),
        (BenchPlace.TORCHRUN, 0, LAUNCHER, ("torchrun", "cpu")),
        (BenchPlace.TORCHRUN, 2, LAUNCHER, ("torchrun", "cuda")),
        (BenchPlace.TORCHRUN, 2, LAUNCHER | {"TILEFLUX_TRANSPORT": "shm"}, ("torchrun", "cpu")),
    ],
)
def test_choice(
    place: BenchPlace, gpus: int, settings: dict[str, str], wanted: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, gpus, **settings)
    world = choose_for_bench(place, 4)
    assert (world.where, world.device, world.on_gpu) == (*wanted, wanted[1] != "cpu")


@pytest.mark.parametrize(
    ("place", "size", "gpus", "settings", "words"),
    [
        (BenchPlace.GHOST, 8, 0, {}, "--where ghost needs a GPU, and torch sees none here"),
        (BenchPlace.GHOST, 1, 1, {}, "needs at least one ghost"),
        (BenchPlace.GHOST, 8, 1, {"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET=1 keeps kernels off the GPU"),
        (BenchPlace.GHOST, 8, 1, {"TILEFLUX_TRANSPORT": "shm"}, "TILEFLUX_TRANSPORT=shm does not go with"),
        (BenchPlace.TORCHRUN, 4, 4, {}, "torchrun --nproc-per-node 4 -m tileflux bench"),
        (BenchPlace.TORCHRUN, 4, 4, {"RANK": "0"}, "is for processes that torchrun started"),
        (BenchPlace.MPS, 4, 0, {}, "--where mps shares a GPU"),
    ],
)
def test_what_cannot_be_had(
    place: BenchPlace, size: int, gpus: int, settings: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, gpus, **settings)
    with pytest.raises(ValueError, match=words):
        choose_for_bench(place, size)


def test_worlds_in_words() -> None:
    assert ghost_world(8).text == "1 rank with 7 ghost peers behind PCIe"
    assert ghost_world(2).text == "1 rank with 1 ghost peer behind PCIe"
    assert torchrun_world(2).text.startswith("2 processes of torchrun ")


def test_a_ghost_world_runs_one_rank_in_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []

    def run_ranks(function: Any, num_processes: int, *, args: tuple[Any, ...], **options: Any) -> list[Any]:
        started.append(options)
        return [function(rank, num_processes, *args) for rank in range(num_processes)]

    made: list[Group] = []

    def ghost_group(world_size: int) -> Group:
        made.extend(local_groups(world_size, "cpu"))
        return made[0]

    ghosts = ModuleType("tileflux.testing.ghost")
    ghosts.__dict__["ghost_group"] = ghost_group
    monkeypatch.setattr(_worlds, "run_ranks", run_ranks)
    monkeypatch.setitem(sys.modules, "tileflux.testing.ghost", ghosts)
    found = run(ghost_world(3), lambda group, word: (group.rank, group.world_size, word), ("hello",), timeout_s=5)
    assert found == [(0, 3, "hello")]
    (options,) = started
    assert (options["where"], options["device"], options["make_group"]) == ("spawn", "cuda:0", False)
    with pytest.raises(GroupClosed):
        made[0].barrier()
    for group in made[1:]:
        group.close()


def test_ranks_that_run_already_are_not_started() -> None:
    with pytest.raises(AssertionError, match="run_here"):
        run(World(2, "torchrun", "cpu", ""), print, timeout_s=1)
