"""Environment variables: parsed strictly, documented completely, changed only for as long as asked."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tileflux import env
from tileflux.link import Link

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*env.VARIABLES, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "TRITON_INTERPRET"]:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("read", "default"),
    [
        (env.timeout_s, 30.0),
        (env.check, False),
        (env.cpu_backend, "host"),
        (env.transport, "auto"),
        (env.link, None),
        (env.tune_dir, str(Path.home() / ".cache" / "tileflux")),
        (env.interpreting, False),
        (env.torchrun_present, False),
        (env.local_rank, 0),
    ],
)
def test_defaults(read: Callable[[], Any], default: Any) -> None:
    assert read() == default


@pytest.mark.parametrize(
    ("read", "name", "text", "value"),
    [
        (env.timeout_s, "TILEFLUX_TIMEOUT_S", "0.5", 0.5),
        (env.check, "TILEFLUX_CHECK", "1", True),
        (env.check, "TILEFLUX_CHECK", "0", False),
        (env.cpu_backend, "TILEFLUX_CPU_BACKEND", "interpret", "interpret"),
        (env.transport, "TILEFLUX_TRANSPORT", "shm", "shm"),
        (env.transport, "TILEFLUX_TRANSPORT", "cuda", "cuda"),
        (env.link, "TILEFLUX_LINK", "2GB/s,20us", Link(2e9, 20e-6)),
        (env.tune_dir, "TILEFLUX_TUNE_DIR", "/tmp/tuned/", "/tmp/tuned"),
        (env.tune_dir, "TILEFLUX_TUNE_DIR", "~/tuned", str(Path.home() / "tuned")),
        (env.tune_dir, "TILEFLUX_TUNE_DIR", "tuned", str(Path.cwd() / "tuned")),
        (env.tune_dir, "TILEFLUX_TUNE_DIR", "", ""),
        (env.interpreting, "TRITON_INTERPRET", "1", True),
        (env.local_rank, "LOCAL_RANK", "3", 3),
    ],
)
def test_values(read: Callable[[], Any], name: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    assert read() == value


@pytest.mark.parametrize(
    ("read", "name", "text", "message"),
    [
        (env.timeout_s, "TILEFLUX_TIMEOUT_S", "soon", "is not a positive number of seconds, such as 30"),
        (env.timeout_s, "TILEFLUX_TIMEOUT_S", "0", "is not a positive number of seconds"),
        (env.timeout_s, "TILEFLUX_TIMEOUT_S", "-1", "is not a positive number of seconds"),
        (env.timeout_s, "TILEFLUX_TIMEOUT_S", "nan", "is not a positive number of seconds"),
        (env.timeout_s, "TILEFLUX_TIMEOUT_S", "inf", "is not a positive number of seconds"),
        (env.check, "TILEFLUX_CHECK", "yes", "is not one of 0, 1"),
        (env.cpu_backend, "TILEFLUX_CPU_BACKEND", "gpu", "is not one of host, interpret"),
        (env.transport, "TILEFLUX_TRANSPORT", "", "is not one of auto, shm, cuda"),
        (env.link, "TILEFLUX_LINK", "", "is not a link: '' should be a bandwidth in bytes, such as 500MB/s"),
        (env.link, "TILEFLUX_LINK", "1GB/s,5", "is not a link: '5' should be a latency, such as 20us"),
    ],
)
def test_wrong_values_are_named(
    read: Callable[[], Any], name: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=re.escape(f"{name}={text!r} {message}")):
        read()


def test_torchrun_is_there_only_with_all_of_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
        assert not env.torchrun_present()
    monkeypatch.setenv("MASTER_PORT", "1")
    assert env.torchrun_present()


def test_scoped_changes_end_with_their_block_even_by_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEFLUX_CHECK", "1")
    with pytest.raises(KeyError), env.scoped({"TILEFLUX_CHECK": None, "TILEFLUX_TRANSPORT": "shm"}):
        assert (env.check(), env.transport()) == (False, "shm")
        raise KeyError
    assert (env.check(), env.transport()) == (True, "auto")


def test_sharing_a_gpu_also_turns_multicast_off(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
    for name in names:
        monkeypatch.setenv(name, "0")
    env.share_gpu()
    assert [os.environ[name] for name in names] == ["1", "1"]


def test_loopback_is_a_default_and_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    env.use_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    env.use_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


def test_settings_for_streams_are_a_default_and_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
    for name in wanted:
        monkeypatch.delenv(name, raising=False)
    assert env.settings_for_streams() == wanted
    assert not env.separate_streams()
    assert {name: os.environ[name] for name in wanted} == wanted
    assert env.settings_for_streams() == {} and env.separate_streams()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert env.separate_streams() and os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_queues_for_streams_are_a_default_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    env.separate_queues()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    env.separate_queues()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_every_variable_of_ours_is_declared() -> None:
    texts = {node.value for node in ast.walk(ast.parse(inspect.getsource(env))) if isinstance(node, ast.Constant)}
    used = {text for text in texts if isinstance(text, str) and re.fullmatch(r"TILEFLUX_[A-Z_0-9]+", text)}
    assert used == set(env.VARIABLES)


def test_every_variable_is_documented() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    documented = set(re.findall(r"`(TILEFLUX_[A-Z_0-9]+)`", page))
    assert documented == set(env.VARIABLES)
