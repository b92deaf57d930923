"""The documentation does what it says: examples run and print what the page shows, links lead somewhere, paths exist.

An example is fenced as ``python runnable``, or as ``python torchrun`` to be run by two ranks as torchrun would start
them. A fence ``text output`` that follows it holds what it prints, to the letter. All are forked from one Python that
has imported torch, which takes the longest, but neither triton nor tileflux: examples may set ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tileflux import errors

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TIMEOUT_S = 60
NUM_TORCHRUN_RANKS = 2

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = {"python runnable", "python torchrun"}

FORK_EACH = """
import json, os, runpy, signal, sys, time, traceback
import numpy, torch, torch.distributed

def run(request, changes):
    os.setpgid(0, 0)
    os.environ.update(changes)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 0
    try:
        runpy.run_path(request["file"], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)

for line in sys.stdin:
    request = json.loads(line)
    running, statuses = [], []
    for changes in request["environments"]:
        pid = os.fork()
        if pid == 0:
            run(request, changes)
        running.append(pid)
    deadline = time.monotonic() + request["timeout_s"]
    while running:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.remove(pid)
                statuses.append(os.waitstatus_to_exitcode(status))
            elif time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.01)
    print(json.dumps(statuses), flush=True)
"""


@dataclass(frozen=True)
class Example:
    """A code block to be run, and what it should print, if the page says."""

    place: str
    kind: str
    code: str
    output: str | None


def find_examples(page: str, text: str) -> list[Example]:
    """The examples of a page, in order."""
    fences = list(FENCE.finditer(text))
    found = []
    for fence, following in itertools.zip_longest(fences, fences[1:]):
        if (kind := fence["info"].strip()) in KINDS:
            shown = following if following is not None and following["info"].strip() == "text output" else None
            line = text[: fence.start()].count("\n") + 1
            found.append(Example(f"{page}:{line}", kind, fence["body"], None if shown is None else shown["body"]))
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


EXAMPLES = [example for page in PAGES for example in find_examples(name_of(page), page.read_text())]


def clean_environment() -> dict[str, str]:
    """As a reader's shell has it: no GPU, since pages show what CPU ranks print, and nothing that this session set."""
    ours = ("TILEFLUX_", "TRITON_INTERPRET")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A Python that has imported torch, and forks for every example."""
    with subprocess.Popen(
        [sys.executable, "-c", FORK_EACH],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def torchrun_environments(world_size: int) -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def run(server: subprocess.Popen[str], example: Example, folder: Path) -> tuple[bool, str]:
    """Whether all ranks of an example ended well, and what they printed."""
    file, log = folder / "example.py", folder / "log"
    file.write_text(example.code)
    environments = torchrun_environments(NUM_TORCHRUN_RANKS) if example.kind == "python torchrun" else [{}]
    request = {"file": str(file), "log": str(log), "environments": environments, "timeout_s": TIMEOUT_S}
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    statuses = json.loads(server.stdout.readline())
    return statuses == [0] * len(environments), log.read_text()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.place)
def test_example_runs_and_prints_what_the_page_shows(
    example: Example, server: subprocess.Popen[str], tmp_path: Path
) -> None:
    ended_well, printed = run(server, example, tmp_path)
    assert ended_well, printed
    if example.output is not None:
        assert printed == example.output


def test_there_are_examples_of_every_kind() -> None:
    assert {example.kind for example in EXAMPLES} == KINDS
    assert any("TRITON_INTERPRET" in example.code for example in EXAMPLES)
    assert {example.output is None for example in EXAMPLES} == {False}, "every example should show what it prints"


def test_a_wrong_example_is_noticed(server: subprocess.Popen[str], tmp_path: Path) -> None:
    wrong = Example("", "python torchrun", "import os\nassert os.environ['RANK'] == '0'\nprint('here')", "")
    assert run(server, wrong, tmp_path) == (False, (tmp_path / "log").read_text())
    assert "here" in (tmp_path / "log").read_text() and "AssertionError" in (tmp_path / "log").read_text()


def test_examples_are_found_where_they_are() -> None:
    shown = "# A\n```python runnable\nx\n```\nwords\n```text output\ny\n```\n"
    others = "```python\nz\n```\n```python torchrun\nv\n```\n"
    assert find_examples("p.md", shown + others) == [
        Example("p.md:2", "python runnable", "x\n", "y\n"),
        Example("p.md:12", "python torchrun", "v\n", None),
    ]


LINK = re.compile(r"\[[^\]\n]*\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"`(?P<text>[^`\n]+)`")
TOP_FOLDERS = {"tileflux", "tests", "docs", "results", "scripts", ".ci"}
PAGE_OR_SETTING = re.compile(r"[\w-]+\.(md|toml|txt|cfg)|Makefile|LICENSE")


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """What a link may name of a page, as GitHub makes it from headings."""
    titles = re.findall(r"^#+ +(.*?) *$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page that lead nowhere."""
    broken = []
    for match in LINK.finditer(prose(text)):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = page if not target else page.parent / target
        if not file.exists() or (anchor and anchor not in anchors(text if file == page else file.read_text())):
            broken.append(match["target"])
    return broken


def missing_paths(text: str) -> list[str]:
    """Files and folders of this repository that a page names in backticks and that are not there."""
    missing = []
    for match in CODE.finditer(prose(text)):
        path = match["text"].partition("::")[0]
        if not re.fullmatch(r"[\w./-]+", path) or path.startswith("/"):
            continue
        if (path.split("/")[0] in TOP_FOLDERS and "/" in path) or PAGE_OR_SETTING.fullmatch(path):
            missing += [] if (ROOT / path).exists() else [path]
    return missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    assert broken_links(page, text) == []
    assert missing_paths(text) == []


def test_wrong_links_and_paths_are_noticed() -> None:
    page = ROOT / "docs" / "index.md"
    links = (
        "[a](design.md) [b](nowhere.md) [c](../README.md) [d](design.md#nowhere) [e](#here) [f](#there) [g](http://x)"
    )
    broken = ["nowhere.md", "design.md#nowhere", "#there"]
    assert broken_links(page, f"# Here\n{links}\n```\n[h](fenced.md)\n```\n") == broken
    paths = "`tileflux/ops/` `tileflux/nowhere.py` `/dev/shm` `tests/<stem>.py` `README.md` `NOWHERE.md` `x/y` `a.b`"
    assert missing_paths(paths) == ["tileflux/nowhere.py", "NOWHERE.md"]


def test_every_page_is_linked_to() -> None:
    linked = {
        (page.parent / match["target"].partition("#")[0]).resolve()
        for page in PAGES
        for match in LINK.finditer(prose(page.read_text()))
    }
    lonely = [name_of(page) for page in PAGES if page.resolve() not in linked and page.name != "README.md"]
    assert lonely == []


def test_every_error_has_its_section() -> None:
    sections = anchors((ROOT / "docs" / "troubleshooting.md").read_text())
    assert {name for name in errors.__all__ if name.lower() not in sections} == {"TilefluxError"}
