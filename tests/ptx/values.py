"""Symbolic addresses: what an operand's value is in terms of parameters, special registers and definitions.

PTX registers are not in static single assignment form, so a leaf that can't be expanded is a register together with
the definitions that reach its use. Two equal values name the same number as long as no leaf of theirs was redefined.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from tests.ptx.flow import forward, written
from tests.ptx.text import REGISTER, Instruction, Kernel


@dataclass(frozen=True)
class Leaf:
    """A register whose value is one of the given definitions'."""

    register: str
    definitions: frozenset[int]


@dataclass(frozen=True)
class Term:
    """An operation that isn't linear, a parameter, a symbol or a special register."""

    op: str
    operands: tuple[object, ...]


@dataclass(frozen=True)
class Linear:
    """constant + sum of coefficient * atom; an atom is a Leaf or a Term."""

    terms: tuple[tuple[object, int], ...]
    constant: int

    def plus(self, other: Linear, sign: int = 1) -> Linear:
        coefficients = dict(self.terms)
        for atom, coefficient in other.terms:
            coefficients[atom] = coefficients.get(atom, 0) + sign * coefficient
        kept = ((atom, coefficient) for atom, coefficient in coefficients.items() if coefficient)
        return Linear(tuple(sorted(kept, key=repr)), self.constant + sign * other.constant)

    def times(self, factor: int) -> Linear:
        terms = tuple((atom, coefficient * factor) for atom, coefficient in self.terms if factor)
        return Linear(terms, self.constant * factor)

    @property
    def leaves(self) -> frozenset[Leaf]:
        """All leaves, however deep."""
        found: set[Leaf] = set()
        todo: list[object] = [atom for atom, _ in self.terms]
        while todo:
            atom = todo.pop()
            if isinstance(atom, Leaf):
                found.add(atom)
            elif isinstance(atom, Linear):
                todo.extend(inner for inner, _ in atom.terms)
            elif isinstance(atom, Term):
                todo.extend(atom.operands)
        return frozenset(found)

    @property
    def is_symbol(self) -> bool:
        """The address of a parameter or variable, possibly with an offset."""
        return len(self.terms) == 1 and isinstance(self.terms[0][0], Term) and self.terms[0][0].op == "symbol"


def _atom(atom: object) -> Linear:
    return Linear(((atom, 1),), 0)


_PURE = frozenset(
    [
        "add",
        "sub",
        "mul",
        "mad",
        "shl",
        "shr",
        "and",
        "or",
        "xor",
        "cvt",
        "cvta",
        "mov",
        "selp",
        "setp",
        "not",
        "min",
        "max",
        "neg",
        "abs",
        "bfe",
        "prmt",
        "ld",
        "mapa",
        "popc",
        "shfl",
    ]
)
_SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid|cluster|warpid|laneid|is_explicit)")
_ADDRESS = re.compile(r"\[\s*([^,\]\s+]+)\s*(?:\+\s*(-?\w+))?")


class Values:
    """Values of one kernel's operands."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._memo: dict[Leaf, Linear] = {}
        self._definitions: dict[str, list[int]] = defaultdict(list)
        for instruction in kernel.instructions:
            for register in written(instruction):
                self._definitions[register].append(instruction.index)
        self._reaching = self._solve()

    def _solve(self) -> list[int | None]:
        """Reaching definitions, as bit sets over the definitions of registers that have several."""
        self._bit: dict[tuple[str, int], int] = {}
        for register, indices in self._definitions.items():
            if len(indices) > 1 or self._kernel.instructions[indices[0]].predicate:
                for index in indices:
                    self._bit[register, index] = 1 << len(self._bit)
        gen: dict[int, int] = defaultdict(int)
        kill: dict[int, int] = defaultdict(int)
        for (register, index), bit in self._bit.items():
            gen[index] |= bit
            if not self._kernel.instructions[index].predicate:
                for other in self._definitions[register]:
                    kill[index] |= self._bit[register, other]
        return forward(self._kernel, 0, lambda i, s: (s & ~kill[i.index]) | gen[i.index], lambda a, b: a | b)

    def _leaf(self, register: str, use: int) -> Leaf:
        indices = self._definitions.get(register, [])
        if len(indices) == 1 and (register, indices[0]) not in self._bit:
            return Leaf(register, frozenset(indices))
        reached = self._reaching[use] or 0
        return Leaf(register, frozenset(index for index in indices if reached & self._bit[register, index]))

    def definitions(self, register: str, use: int) -> frozenset[int]:
        """Definitions of `register` that reach instruction `use`."""
        return self._leaf(register, use).definitions

    def definition(self, register: str, use: int) -> Instruction | None:
        """The one definition that reaches `use`, if there is one and it always executes."""
        found = [self._kernel.instructions[index] for index in self.definitions(register, use)]
        return found[0] if len(found) == 1 and not found[0].predicate else None

    def operand(self, text: str, use: int) -> Linear:
        """Value of an operand where instruction `use` reads it."""
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return Linear((), int(text.rstrip("U"), 0))
        if not REGISTER.fullmatch(text):
            return _atom(Term("symbol", (text,)))
        if _SPECIAL.match(text):
            return _atom(Term("special", (text,)))
        leaf = self._leaf(text, use)
        if leaf not in self._memo:
            self._memo[leaf] = _atom(leaf)  # what a loop that comes back here sees
            if len(leaf.definitions) == 1:
                definition = self._kernel.instructions[next(iter(leaf.definitions))]
                if not definition.predicate:
                    self._memo[leaf] = self._expression(definition, leaf)
        return self._memo[leaf]

    def _expression(self, instruction: Instruction, leaf: Leaf) -> Linear:
        op = instruction.op.split(".")
        if op[0] not in _PURE or instruction.args[0] != leaf.register or (op[0] == "ld" and op[1] != "param"):
            return _atom(leaf)
        operands = [self.operand(argument, instruction.index) for argument in instruction.args[1:]]
        if op[0] in ("mov", "cvta") or (op[0] == "cvt" and op[-1] in ("s32", "u32", "u64", "s64")):
            return operands[0]
        if op[0] == "add":
            return operands[0].plus(operands[1])
        if op[0] == "sub":
            return operands[0].plus(operands[1], -1)
        if op[0] in ("mul", "mad") and "hi" not in op:
            for factor, other in (operands[:2], operands[1::-1]):
                if not factor.terms:
                    product = other.times(factor.constant)
                    return product.plus(operands[2]) if op[0] == "mad" else product
        if op[0] == "shl" and not operands[1].terms:
            return operands[0].times(1 << operands[1].constant)
        return _atom(Term(instruction.op, tuple(operands)))

    def address(self, text: str, use: int) -> Linear:
        """Value of ``[register+offset, ...]``, expanded as far as it goes."""
        register, offset = self._parts(text)
        return self.operand(register, use).plus(Linear((), offset))

    def address_by_register(self, text: str, use: int) -> Linear:
        """The same address as the bare register and offset: equal also where expansion differs by path."""
        register, offset = self._parts(text)
        if not REGISTER.fullmatch(register):
            return self.address(text, use)
        return _atom(self._leaf(register, use)).plus(Linear((), offset))

    @staticmethod
    def _parts(text: str) -> tuple[str, int]:
        match = _ADDRESS.match(text)
        if match is None:
            raise ValueError(f"{text} is not an address")
        return match[1], int(match[2] or "0", 0)
