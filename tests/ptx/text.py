"""PTX text to instructions and a control-flow graph.

Understands what the kernel compiler emits: one level or more of braces with labels and predicates of their own (inline
assembly), predicated instructions, no indirect branches and no calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

REGISTER = re.compile(r"%[A-Za-z]\w*(?:\.\w+)?")
_LABEL = re.compile(r"([$\w]+)\s*:(?!:)")
_LINE_DIRECTIVE = re.compile(r"\.(loc|file|section)\b")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        index: position in the kernel.
        line: line of the file, from 1.
        predicate: register that guards it, or "" if it always executes.
        negated: it executes where the predicate is false.
        op: opcode with its suffixes.
        args: operands, split at the outer commas.
    """

    index: int
    line: int
    predicate: str
    negated: bool
    op: str
    args: tuple[str, ...]

    @property
    def is_branch(self) -> bool:
        return self.op.startswith("bra")

    @property
    def ends_thread(self) -> bool:
        return self.op in ("ret", "exit", "trap") and not self.predicate

    def __str__(self) -> str:
        text = f"{self.op} {', '.join(self.args)}"
        return text if len(text) <= 100 else text[:97] + "..."


@dataclass(frozen=True)
class Kernel:
    """An entry function: its instructions, and for each the indices of those that may execute next."""

    name: str
    header: str
    instructions: tuple[Instruction, ...]
    successors: tuple[tuple[int, ...], ...]

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.instructions]
        for index, following in enumerate(self.successors):
            for other in following:
                found[other].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """First instructions of basic blocks, in order."""
        found = {0}
        for instruction in self.instructions:
            if instruction.is_branch:
                found.update(self.successors[instruction.index])
            if (instruction.is_branch or instruction.op in ("ret", "exit", "trap")) and instruction.index + 1 < len(
                self.instructions
            ):
                found.add(instruction.index + 1)
        return tuple(sorted(found))

    @cached_property
    def threads(self) -> int:
        """Threads of a block, from the required block size; 128 where none is declared."""
        match = re.search(r"\.(?:req|max)ntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", self.header)
        total = 1
        for extent in match.groups() if match else ("128",):
            total *= int(extent or 1)
        return total


def split_operands(text: str) -> tuple[str, ...]:
    """Split at commas outside brackets and braces."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return tuple([*parts, current.strip()] if current.strip() else parts)


def _without_comments(source: str) -> str:
    source = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), source, flags=re.S)
    return re.sub(r"//[^\n]*", "", source)


def kernels(source: str) -> Iterator[Kernel]:
    """Yield the entry functions of a PTX file."""
    source = _without_comments(source)
    for match in re.finditer(r"\.entry\s+([$\w]+)\s*\(", source):
        start = source.index("{", match.end())
        depth = 0
        for end in range(start, len(source)):
            depth += (source[end] == "{") - (source[end] == "}")
            if depth == 0:
                break
        yield _Parser(source[start + 1 : end], source.count("\n", 0, start) + 1).kernel(
            match[1], source[match.start() : start]
        )


class _Parser:
    """Parses one body. A scope is a brace pair; labels and predicates declared in an inner one are its own."""

    def __init__(self, body: str, line: int) -> None:
        self._body, self._line = body, line
        self._instructions: list[Instruction] = []
        self._scope_of: list[int] = []
        self._parent: dict[int, int | None] = {0: None}
        self._labels: dict[tuple[int, str], int] = {}
        self._locals: dict[int, set[str]] = {0: set()}

    def kernel(self, name: str, header: str) -> Kernel:
        stack, position = [0], 0
        while position < len(self._body):
            character = self._body[position]
            if character == "\n":
                self._line += 1
            if character.isspace() or character in ";{}":
                if character == "{":
                    scope = len(self._parent)
                    self._parent[scope], self._locals[scope] = stack[-1], set()
                    stack.append(scope)
                elif character == "}":
                    stack.pop()
                position += 1
            elif label := _LABEL.match(self._body, position):
                self._labels[stack[-1], label[1]] = len(self._instructions)
                position = label.end()
            elif _LINE_DIRECTIVE.match(self._body, position):
                position = self._body.find("\n", position)
            else:
                end = self._body.index(";", position)
                self._statement(self._body[position:end], stack[-1])
                self._line += self._body.count("\n", position, end)
                position = end + 1
        successors = tuple(self._following(instruction) for instruction in self._instructions)
        return Kernel(name, header, tuple(self._instructions), successors)

    def _statement(self, text: str, scope: int) -> None:
        text = " ".join(text.split())
        if text.startswith("."):
            if scope and text.startswith(".reg"):
                self._locals[scope].update(re.findall(r"[A-Za-z]\w*", text.split(None, 2)[2]))
            return
        text = self._rename(text, scope)
        predicate, negated = "", False
        if guard := re.match(r"@(!?)([%$\w]+)\s+", text):
            predicate, negated = guard[2], bool(guard[1])
            text = text[guard.end() :]
        op, _, operands = text.partition(" ")
        self._scope_of.append(scope)
        self._instructions.append(
            Instruction(len(self._instructions), self._line, predicate, negated, op, split_operands(operands))
        )

    def _rename(self, text: str, scope: int) -> str:
        """Give names declared in inner scopes a unique register name."""
        level: int | None = scope
        while level:
            for name in self._locals[level]:
                text = re.sub(rf"(?<![%$.\w]){name}\b(?![.:])", f"%{name}_{level}", text)
            level = self._parent[level]
        return text

    def _target(self, instruction: Instruction) -> int:
        scope: int | None = self._scope_of[instruction.index]
        name = instruction.args[0]
        while scope is not None:
            if (scope, name) in self._labels:
                return self._labels[scope, name]
            scope = self._parent[scope]
        raise ValueError(f"line {instruction.line}: no label {name}")

    def _following(self, instruction: Instruction) -> tuple[int, ...]:
        if instruction.op.startswith(("brx", "call")):
            raise ValueError(f"line {instruction.line}: {instruction.op} is not understood")
        following = []
        if instruction.is_branch:
            following.append(self._target(instruction))
        ends = instruction.ends_thread or (instruction.is_branch and not instruction.predicate)
        if not ends and instruction.index + 1 < len(self._instructions):
            following.append(instruction.index + 1)
        return tuple(dict.fromkeys(following))
