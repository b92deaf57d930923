"""Entries: found by what all ranks share, kept in files that survive anything, and never the end of an op."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileflux.config import GemmConfig
from tileflux.tune import store
from tileflux.tune.store import Entry, are_close, bucket, find, load, save

from .entries import H200, drawn, make_entry


@pytest.fixture(autouse=True)
def read_anew() -> None:
    load.cache_clear()


def test_buckets_are_powers_of_two_and_their_midpoints() -> None:
    assert sorted({bucket(m) for m in range(1, 1025)}) == [
        1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
    ]  # fmt: skip
    assert [bucket(m) for m in (4096, 4097, 5000, 5100, 7000, 7200)] == [4096, 4096, 4096, 6144, 6144, 8192]


@given(st.integers(1, 10**6))
def test_a_bucket_is_near(m: int) -> None:
    assert max(bucket(m) / m, m / bucket(m)) <= 1.5**0.5 + 1e-9
    assert bucket(bucket(m)) == bucket(m)


def test_sizes_within_a_32nd_are_the_same() -> None:
    assert are_close(4096, 4096) and are_close(4096, 3968) and are_close(3968, 4096) and are_close(1, 1)
    assert not are_close(4096, 3967) and not are_close(1, 2) and not are_close(0, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"op": "gemm_rs"}, {"world_size": 4}, {"dtype": "float16"}, {"arch": 80}, {"num_sms": 66}, {"link": "PCIe"},
        {"gpu": "NVIDIA H100"}, {"k": 8192}, {"m": 1365}, {"m": 3 * 4096},
    ],
)  # fmt: skip
def test_an_entry_of_something_else_is_not_found(change: dict[str, Any]) -> None:
    assert find([make_entry(**change)], H200) is None
    assert find([make_entry(**change), make_entry()], H200) is not None


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
def test_sums_are_found_by_their_width_and_not_by_their_depth(op: str) -> None:
    problem = dataclasses.replace(H200, op=op)
    assert find([make_entry(op=op, n=8192)], problem) is None
    assert find([make_entry(op=op, k=64)], problem) is not None


def test_a_plain_product_is_found_by_all_of_its_sizes() -> None:
    problem = dataclasses.replace(H200, op="gemm", world_size=1, link="")
    plain = {"op": "gemm", "world_size": 1, "link": "", "strategy": "sequential"}
    for change in ({"n": 8192}, {"k": 64}, {"is_heavy": True}):
        assert find([make_entry(**plain, **change)], problem) is None
    near, nearer = (make_entry(**plain, n=n) for n in (6144 + 100, 6144 - 10))
    found = find([near, nearer], problem)
    assert found is not None and found.leader is nearer and found.tiles == nearer.config


def test_the_nearest_bucket_is_taken() -> None:
    sizes = [2048, 3072, 8192]
    entries = [make_entry(m=m, config=GemmConfig(num_stages=index + 1)) for index, m in enumerate(sizes)]

    def found(m: int) -> int | None:
        match = find(entries, dataclasses.replace(H200, m=m))
        return None if match is None else match.leader.problem.m

    assert [found(m) for m in (512, 1024, 1536, 2500, 3500, 4096, 5800, 16384, 21000)] == [
        None, 2048, 2048, 2048, 3072, 3072, 8192, 8192, None,
    ]  # fmt: skip
    assert find([make_entry(m=m) for m in (8192, 2048)], H200).leader.problem.m == 2048  # type: ignore[union-attr]


def test_the_widest_decides_for_a_gather_and_own_tiles_stay() -> None:
    narrow = make_entry("fused", GemmConfig(64, num_chunks=2), n=1024)
    wide = make_entry("fused", GemmConfig(128, num_chunks=2), n=8192)
    heavy = make_entry("fused", GemmConfig(32, num_chunks=2), n=1024, is_heavy=True)
    other = make_entry("sequential", GemmConfig(16), n=2048)

    def found(n: int, is_heavy: bool = False) -> tuple[Entry, int | None]:
        match = find([narrow, wide, heavy, other], dataclasses.replace(H200, n=n, is_heavy=is_heavy))
        assert match is not None
        return match.leader, None if match.tiles is None else match.tiles.block_m

    assert found(8192) == (wide, 128)
    assert found(1030) == (wide, 64)
    assert found(1030, is_heavy=True) == (wide, 32)
    assert found(2048) == (wide, None)
    assert found(0) == found(5000) == (wide, None)


def test_the_deepest_decides_for_a_sum() -> None:
    shallow, deep = (make_entry(how, op="gemm_rs", k=k) for how, k in (("pipelined", 1024), ("fused", 3584)))
    for k in (0, 1024, 3584, 10**6):
        match = find([shallow, deep], dataclasses.replace(H200, op="gemm_rs", k=k))
        assert match is not None and match.leader is deep and match.tiles is deep.config


@given(st.lists(drawn("ag_gemm"), max_size=6), st.integers(0, 5000), st.booleans())
def test_ranks_of_a_gather_follow_the_same_entry(entries: list[Entry], n: int, is_heavy: bool) -> None:
    problem = dataclasses.replace(H200, m=2048, n=1024, k=1024)
    one, other = find(entries, problem), find(entries, dataclasses.replace(problem, n=n, is_heavy=is_heavy))
    assert (one and one.leader) is (other and other.leader)
    for match in (one, other):
        if match is not None and match.tiles is not None:
            assert match.tiles.num_chunks == match.leader.config.num_chunks


@given(st.lists(drawn("gemm_rs"), max_size=6), st.integers(0, 5000))
def test_ranks_of_a_sum_follow_the_same_entry(entries: list[Entry], k: int) -> None:
    problem = dataclasses.replace(H200, op="gemm_rs", m=2048, n=1024, k=1024)
    assert find(entries, problem) == find(entries, dataclasses.replace(problem, k=k))


def test_entries_come_back_as_they_were(tmp_path: Path) -> None:
    entries = [
        make_entry("fused", GemmConfig(64, 256, 32, 4, 4, 5, 6, 7, 8)),
        make_entry("pipelined", GemmConfig(num_sms=None), dtype="int8", is_heavy=True),
        make_entry("sequential", op="gemm_ar", gpu="", arch=0, num_sms=0, link="shared memory"),
    ]
    folder = tmp_path / "deep" / "down"
    files = save(str(folder), entries)
    assert [file.name for file in files] == ["ag_gemm.json", "gemm_ar.json"]
    assert load(str(folder)) == tuple(entries)
    assert not list(folder.glob("*.tmp"))


def test_a_new_entry_takes_the_place_of_the_old(tmp_path: Path) -> None:
    folder = str(tmp_path)
    old = make_entry("pipelined")
    save(folder, [old, make_entry(m=2048), make_entry(n=3072), make_entry(is_heavy=True), make_entry(world_size=4)])
    new = make_entry("fused", m=4200, n=6100, k=12300)
    save(folder, [make_entry("sequential"), new])
    found = load(folder)
    assert len(found) == 5 and new in found and old not in found
    assert {entry.strategy for entry in found} == {"fused"}


def test_files_are_read_once_until_told(tmp_path: Path) -> None:
    """Ranks that read before and after somebody tunes would choose apart."""
    assert load(str(tmp_path)) == ()
    save(str(tmp_path), [make_entry()])
    assert load(str(tmp_path)) == ()
    load.cache_clear()
    assert load(str(tmp_path)) == (make_entry(),)


def test_whoever_writes_waits_for_the_other(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        writer = threading.Thread(target=save, args=(str(tmp_path), [make_entry()]), daemon=True)
        writer.start()
        writer.join(0.2)
        assert writer.is_alive() and not list(tmp_path.glob("*.json"))
    writer.join(10)
    assert load(str(tmp_path)) == (make_entry(),)


def as_file(*entries: Any, version: Any = store.FORMAT) -> str:
    return json.dumps({"version": version, "entries": list(entries)})


def changed(*path: str, value: Any) -> dict[str, Any]:
    """A right entry with one value that is not."""
    entry = json.loads(json.dumps(dataclasses.asdict(make_entry())))
    inner = entry
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return dict(entry)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ('{"version": 1, "entr', "Unterminated string"),
        ("[]", "its version is None, and this tileflux reads 1"),
        (as_file(version=2), "its version is 2"),
        ('{"version": 1}', "reads 1"),
        (b"\xff\xfe", "decode"),
    ],
)
def test_a_broken_file_is_told_once_and_left_out(
    text: str | bytes, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(str(tmp_path), [make_entry(op="gemm_rs")])
    broken = tmp_path / "ag_gemm.json"
    broken.write_bytes(text if isinstance(text, bytes) else text.encode())
    for _ in range(3):
        assert load(str(tmp_path)) == (make_entry(op="gemm_rs"),)
    (message,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert message.startswith(f"{broken} is left out") and words in message
    with pytest.raises(ValueError, match="is not a file of entries; move it away"):
        save(str(tmp_path), [make_entry()])
    assert broken.read_bytes() == (text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize(
    "wrong",
    [
        3,
        {},
        changed("strategy", value="luck"),
        changed("algorithm", value="one_shot"),
        changed("problem", "op", value="all_gather"),
        changed("problem", "m", value=0),
        changed("problem", "m", value=True),
        changed("problem", "is_heavy", value=1),
        changed("problem", "dtype", value=None),
        changed("problem", "shoe", value=42),
        changed("config", "num_stages", value=3.5),
        changed("config", "block_m", value=100),
        changed("config", "num_sms", value="all"),
        changed("config", "streams", value=True),
        changed("config", "streams", value=0),
        changed("config", value=[1]),
        changed("config", value=[["streams", False]]),
        changed("seconds", value={}),
        changed("seconds", "fused", value=0.0),
        changed("seconds", "fused", value=float("nan")),
        changed("versions", value=None),
    ],
)
def test_a_wrong_entry_is_told_and_left_out(wrong: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    right = dataclasses.asdict(make_entry())
    (tmp_path / "some.json").write_text(as_file(wrong, right))
    assert load(str(tmp_path)) == (make_entry(),)
    (message,) = (record.getMessage() for record in caplog.records)
    assert "some.json: 1 entries are left out; the first: entry 0: " in message


def test_entries_of_another_version_stay_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "ag_gemm.json"
    later = [
        changed("config", "a_later_field", value=1),
        changed("problem", "a_later_field", value=1),  # of what, nobody can tell
        changed("seconds", value="in another way"),
        changed("a_later_field", value=1),  # this one can be read
        changed("config", "streams", value=False),  # and this one, of an older version
        changed("problem", "m", value=0),
        3,
        {},
    ]
    file.write_text(as_file(*later))
    new = make_entry(m=64 * 4096)
    save(str(tmp_path), [new])
    assert json.loads(file.read_text())["entries"] == [*later, dataclasses.asdict(new)]
    # One that was measured anew is replaced, whether or not it could be read.
    again = make_entry("pipelined")
    save(str(tmp_path), [again])
    kept = [later[1], *later[5:], dataclasses.asdict(new), dataclasses.asdict(again)]
    assert json.loads(file.read_text())["entries"] == kept
    assert load(str(tmp_path)) == (new, again)


def test_an_entry_of_an_older_version_is_read_where_it_cut_no_tiles_along_k(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "some.json").write_text(as_file(changed("config", "streams", value=False)))
    assert load(str(tmp_path)) == (make_entry(),) and not caplog.records
    load.cache_clear()
    (tmp_path / "some.json").write_text(as_file(changed("config", "streams", value=True)))
    assert load(str(tmp_path)) == ()
    (message,) = (record.getMessage() for record in caplog.records)
    assert "entry 0: ValueError it was measured with streams=True, tiles cut along K, which are no more" in message


def test_what_is_no_folder_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(str(tmp_path / "nowhere")) == load("") == () and not caplog.records
    (tmp_path / "file").touch()
    (tmp_path / "folder.json").mkdir()
    assert load(str(tmp_path / "file")) == load(str(tmp_path)) == ()
    assert len(caplog.records) == 2
    with pytest.raises(OSError):
        store.check_writable(str(tmp_path / "file"))


def test_what_is_shipped_can_be_read() -> None:
    for file in sorted(store._SHIPPED.glob("*.json")):
        entries, problems = store._read(file)
        assert entries and not problems, file
    assert store._SHIPPED.is_dir()


def test_verdicts() -> None:
    assert make_entry("fused").verdict == "fused 1.21x over sequential"
    assert make_entry("sequential").verdict == "sequential 1.10x over pipelined"
    level = dataclasses.replace(make_entry("fused"), seconds={"fused": 1.0, "sequential": 0.996})
    assert level.verdict == "fused level with sequential"
    assert dataclasses.replace(level, seconds={"fused": 1.0}).verdict == "fused with the quickest tiles"
