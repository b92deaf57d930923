"""PTX text as control-flow graphs, with the properties of an instruction that ``ptx_lint`` asks for.

One graph per function, one node per instruction. The parser knows as much of PTX as compilers and inline asm write
into a kernel: predicates, labels (which a braced block may repeat), braces around blocks and around register
vectors, several instructions on a line, branch tables. It checks nothing that ptxas checks anyway.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

__all__ = ["Function", "Instruction", "parse", "reach"]

Value = TypeVar("Value")
Block = tuple[int, ...]  # the braced blocks around an instruction, outermost first
Name = tuple[Block, str]


@dataclass(frozen=True)
class Instruction:
    """One instruction: ``guard`` is its predicate or empty, ``operands`` what follows the opcode."""

    line: int
    opcode: str
    operands: str = ""
    guard: str = ""
    block: Block = ()

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The opcode's dot-separated words, without sub-qualifiers: ``shared::cta`` is ``shared``."""
        return tuple(word.split("::")[0] for word in self.opcode.split("."))

    @property
    def text(self) -> str:
        """On one line, cut short, for messages."""
        text = " ".join(f"{self.guard} {self.opcode} {self.operands}".split())
        return text if len(text) <= 90 else text[:87] + "..."

    def has(self, *words: str) -> bool:
        return any(word in self.words for word in words)

    @property
    def is_barrier(self) -> bool:
        """A CTA barrier that every thread coming here executes: a guarded one is none."""
        if self.guard or self.words[0] not in ("bar", "barrier") or self.has("warp"):
            return False
        return self.has("wait") if self.has("cluster") else self.has("sync", "red")

    @property
    def is_fence(self) -> bool:
        """A memory fence. Fences between proxies order something else."""
        return (self.words[0] == "fence" and self.has("acq_rel", "sc")) or self.words[0] == "membar"

    @property
    def memory_scope(self) -> str:
        """``cta``, ``cluster``, ``gpu`` or ``sys``; where nothing is said PTX means ``gpu``."""
        if self.words[0] == "membar":
            return "gpu" if self.has("gl") else self.words[1]
        return next((word for word in ("sys", "gpu", "cluster", "cta") if self.has(word)), "gpu")

    @property
    def touches_global(self) -> bool:
        """A load, store or atomic on global memory. A generic address may be global, so it counts."""
        accesses = self.words[0] in ("ld", "ldu", "st", "atom", "red", "multimem")
        return accesses and not self.has("shared", "local", "param", "const")

    @property
    def acquires(self) -> bool:
        """An acquiring access of a flag, at any scope."""
        return self.touches_global and self.has("acquire", "acq_rel")

    @property
    def releases(self) -> bool:
        """A releasing access of a flag, at any scope."""
        return self.touches_global and self.has("release", "acq_rel")

    @property
    def counts(self) -> bool:
        """An addition that releases to programs of the same GPU, and says so."""
        return self.releases and self.has("add") and self.has("gpu") and not self.has("acq_rel")

    @property
    def polls_without_order(self) -> bool:
        """A load that others' stores reach, but that orders nothing after it."""
        return self.words[0] in ("ld", "atom") and self.touches_global and self.has("relaxed", "volatile", "mmio")

    @property
    def stores_data(self) -> bool:
        """Writes global memory, other than by raising or claiming a flag. A call may, so it does."""
        if self.words[0] == "call" or self.is_bulk_store:
            return True
        writes = self.words[0] in ("st", "atom", "red") or (self.words[0] == "multimem" and self.has("st", "red"))
        return writes and self.touches_global and not self.has("acquire", "release", "acq_rel")

    @property
    def loads_data(self) -> bool:
        """Reads global memory, other than by TMA or as a poll. A call may, so it does."""
        if self.words[0] == "call":
            return True
        if self.words[0] == "cp":
            return self.has("global") and not self.has("bulk")
        reads = self.words[0] in ("ld", "ldu") or self.has("ld_reduce")
        polls = self.has("acquire", "volatile", "mmio") or (self.words[0] == "ld" and self.has("relaxed"))
        return reads and self.touches_global and not polls

    @property
    def address(self) -> str:
        """The register or symbol between the brackets of a memory access, without its offset."""
        match = re.search(r"\[\s*([\w$%]+)", self.operands)
        return match.group(1) if match else ""

    def writes_register(self, name: str) -> bool:
        """Whether ``name`` is in the first operand, be it a vector; a memory operand is none."""
        first = self.operands.partition("}" if self.operands.startswith("{") else ",")[0]
        return "[" not in first and name in re.findall(r"[\w$%]+", first)

    @property
    def is_bulk_store(self) -> bool:
        """A TMA store or reduction into global memory."""
        return self._is_bulk_copy and self.words.index("global") < self.words.index("shared")

    @property
    def is_bulk_load(self) -> bool:
        """A TMA load from global memory."""
        return self._is_bulk_copy and self.words.index("shared") < self.words.index("global")

    @property
    def _is_bulk_copy(self) -> bool:
        return self.words[0] in ("cp", "multimem") and self.has("bulk") and self.has("global") and self.has("shared")

    @property
    def is_bulk_wait(self) -> bool:
        """Waits for bulk groups, be it until they are written or only read from shared memory."""
        return self.words[:4] == ("cp", "async", "bulk", "wait_group")

    @property
    def is_full_bulk_wait(self) -> bool:
        """Waits until all bulk stores of the thread are written to global memory."""
        return self.is_bulk_wait and not self.has("read") and self.operands == "0"


@dataclass
class Function:
    """The instructions of one ``.entry`` or ``.func``, and where control may go after each."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    successors: list[list[int]] = field(default_factory=list)
    one_warp: bool = False

    @cached_property
    def reachable(self) -> list[int]:
        """Instructions that control can come to, in the order of the text."""
        return sorted(reach([0], self.successors) | {0}) if self.instructions else []

    @cached_property
    def predecessors(self) -> list[list[int]]:
        before: list[list[int]] = [[] for _ in self.instructions]
        for index in self.reachable:
            for after in self.successors[index]:
                before[after].append(index)
        return before

    def is_barrier(self, index: int) -> bool:
        """A CTA barrier. Of one warp, the warp's own barrier is one too; so it is in a CTA divided into partitions.

        Those are told by their registers: what one of several warps does there, it does by CTA barriers with a count.
        """
        instruction = self.instructions[index]
        return instruction.is_barrier or (
            (self.one_warp or self._is_divided)
            and instruction.words == ("bar", "warp", "sync")
            and not instruction.guard
        )

    @cached_property
    def _is_divided(self) -> bool:
        return any(instruction.words[0] == "setmaxnreg" for instruction in self.instructions)

    def where(self, test: Callable[[Instruction], bool]) -> list[int]:
        """Reachable instructions that pass ``test``, in the order of the text."""
        return [index for index in self.reachable if test(self.instructions[index])]

    def at(self, index: int) -> str:
        """An instruction, as messages name it."""
        instruction = self.instructions[index]
        return f"`{instruction.text}` (PTX line {instruction.line})"


def reach(
    starts: Iterable[int], edges: Sequence[Sequence[int]], stop: Callable[[int], bool] = lambda index: False
) -> set[int]:
    """What lies one or more steps from ``starts``. An instruction that passes ``stop`` is met but not passed."""
    met: set[int] = set()
    todo = [after for start in starts for after in edges[start]]
    while todo:
        index = todo.pop()
        if index not in met:
            met.add(index)
            if not stop(index):
                todo.extend(edges[index])
    return met


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DEBUG_LINE = re.compile(r"^[ \t]*\.(?:loc|file)\b[^\n]*", re.MULTILINE)  # ends with the line, not with ";"
_HEADER = re.compile(r"\.(?:entry|func)\b\s*(?:\([^()]*\)\s*)?([\w$%]+)\s*(\([^()]*\))?([^{;]*)([{;])")
_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)")
_INSTRUCTION = re.compile(r"(@!?[\w$%]+)?\s*([\w.:]+)\s*(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_$%][\w$]*")


def parse(ptx: str) -> list[Function]:
    """The functions of a PTX module. Raises ``ValueError`` for text that is not the PTX of a kernel."""
    for noise in (_COMMENT, _DEBUG_LINE):
        ptx = noise.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), ptx)  # offsets and lines stay
    line_starts = [0, *(match.end() for match in re.finditer("\n", ptx))]
    functions = []
    for header in _HEADER.finditer(ptx):
        if header.group(4) == "{":  # else a declaration
            function = _parse_body(header.group(1), ptx, header.end(), line_starts)
            threads = re.search(r"\.reqntid\s+(\d+)\s*$", header.group(3).strip())
            function.one_warp = threads is not None and int(threads.group(1)) <= 32
            functions.append(function)
    if not functions:
        raise ValueError("no .entry or .func with a body: this is not the PTX of a kernel")
    return functions


def _parse_body(name: str, ptx: str, start: int, line_starts: Sequence[int]) -> Function:
    function = Function(name)
    labels: dict[Name, int] = {}  # by block: two inline asm blocks may use the same label
    tables: dict[Name, list[str]] = {}
    for begin, block, statement in _statements(ptx, start):
        label, text = "", statement
        while (match := _LABEL.match(text)) is not None:
            label, text = match.group(1), text[match.end() :]
            labels[block, label] = len(function.instructions)
        text = text.lstrip()
        if text.startswith(".branchtargets"):
            tables[block, label] = _NAME.findall(text[len(".branchtargets") :])
        elif text and not text.startswith("."):
            line = bisect_right(line_starts, begin + len(statement) - len(text))
            parts = _INSTRUCTION.fullmatch(text)
            if parts is None:
                raise ValueError(f"PTX line {line} is not an instruction: {text.strip()!r}")
            guard, opcode, operands = parts.groups()
            function.instructions.append(Instruction(line, opcode, operands.strip(), guard or "", block))
    function.successors = [
        _successors(index, function.instructions, labels, tables) for index in range(len(function.instructions))
    ]
    return function


def _statements(ptx: str, start: int) -> Iterator[tuple[int, Block, str]]:
    """(offset, block, text with its labels) of every statement up to the brace that closes the body."""
    blocks: list[int] = []
    num_blocks, num_vector_braces, begin = 0, 0, start
    for mark in re.compile(r"[{};]").finditer(ptx, start):
        text = ptx[begin : mark.start()]
        if mark.group() == ";":
            yield begin, tuple(blocks), text
        elif num_vector_braces or (mark.group() == "{" and _LABEL.sub("", text).strip()):
            num_vector_braces += 1 if mark.group() == "{" else -1
            continue
        else:
            yield begin, tuple(blocks), text  # nothing, or labels before the brace
            if mark.group() == "{":
                num_blocks += 1
                blocks.append(num_blocks)
            elif blocks:
                blocks.pop()
            else:
                return
        begin = mark.end()
    raise ValueError("the PTX ends inside a function")


def _successors(
    index: int, instructions: Sequence[Instruction], labels: Mapping[Name, int], tables: Mapping[Name, list[str]]
) -> list[int]:
    instruction = instructions[index]
    after = []
    if instruction.words[0] in ("bra", "brx"):
        names = _NAME.findall(instruction.operands)[-1:]
        if instruction.words[0] == "brx":
            names = _resolve(instruction, names[0], tables)
        after = [_resolve(instruction, name, labels) for name in names]
    if instruction.guard or instruction.words[0] not in ("bra", "brx", "ret", "exit", "trap"):
        after.append(index + 1)
    return [following for following in after if following < len(instructions)]


def _resolve(instruction: Instruction, name: str, table: Mapping[Name, Value]) -> Value:
    for depth in range(len(instruction.block), -1, -1):
        if (key := (instruction.block[:depth], name)) in table:
            return table[key]
    raise ValueError(f"`{instruction.text}` (PTX line {instruction.line}) goes to a label that is not there")
