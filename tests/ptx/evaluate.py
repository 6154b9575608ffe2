"""Values of registers as one thread computes them: numbers where they can be known, names for the rest.

A value is an int (unsigned, at the operation's width), a bool for predicates, ``LARGE`` (a counter that has run past
every constant it is compared to), an Unknown, a Comparison that involves an Unknown, or None.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from tests.ptx.text import Instruction

LARGE_FROM = 8  # a loop counter this large is not distinguished from larger ones


@dataclass(frozen=True)
class Unknown:
    """What instruction `definition` gave when it last ran."""

    definition: int


@dataclass(frozen=True)
class Large:
    """Some number of at least LARGE_FROM and below 2**31."""


@dataclass(frozen=True)
class Comparison:
    """A comparison whose outcome isn't known; `negated` inverts it."""

    op: str
    left: object
    right: object
    negated: bool = False

    @property
    def positive(self) -> Comparison:
        return Comparison(self.op, self.left, self.right)

    def inverted(self) -> Comparison:
        return Comparison(self.op, self.left, self.right, not self.negated)

    def mentions(self, value: object) -> bool:
        return self.left == value or self.right == value


LARGE = Large()
Value = int | bool | Large | Unknown | Comparison | None
_INVERSE = {"ne": "eq", "ge": "lt", "gt": "le", "hs": "lo", "hi": "ls"}
# Opcodes whose results this module computes; all others give an Unknown.
PURE = frozenset(
    [
        "mov",
        "cvt",
        "cvta",
        "mapa",
        "add",
        "sub",
        "mul",
        "mad",
        "shl",
        "shr",
        "and",
        "or",
        "xor",
        "not",
        "neg",
        "min",
        "max",
        "selp",
        "setp",
        "shfl",
        "elect",
    ]
)


@cache
def constant(text: str) -> int | None:
    """The number that an operand spells, or None."""
    return int(text.rstrip("U"), 0) & ((1 << 64) - 1) if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text) else None


@cache
def width(op: str) -> int:
    """Bits of the result: of the last typed suffix but for conversions, whose first one counts."""
    bits = re.findall(r"\.[bus](8|16|32|64)\b", op)
    if op.startswith("cvt."):
        return int(bits[0])
    if op.startswith(("mul.wide", "mad.wide")):
        return 2 * int(bits[-1])
    return int(bits[-1]) if bits else 64


def _signed(number: int, bits: int) -> int:
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number


def _compare(op: str, left: int, right: int) -> bool:
    return {"eq": left == right, "lt": left < right, "le": left <= right}[op]


def compare(instruction: Instruction, left: Value, right: Value) -> Value:
    """Result of ``setp.<relation>.<type>``."""
    relation = instruction.op.split(".")[1]
    negated = relation in _INVERSE
    op = {"lo": "lt", "ls": "le"}.get(_INVERSE.get(relation, relation), _INVERSE.get(relation, relation))
    if op not in ("eq", "lt", "le") or left is None or right is None:
        return None
    bits, signed = width(instruction.op), bool(re.search(r"\.s(32|64)\b", instruction.op))
    if isinstance(left, int) and isinstance(right, int):
        if signed:
            left, right = _signed(left, bits), _signed(right, bits)
        else:
            left, right = left % (1 << bits), right % (1 << bits)
        return _compare(op, left, right) != negated
    for large, other, mirrored in ((left, right, False), (right, left, True)):
        if isinstance(large, Large):
            if not isinstance(other, int):
                return None
            number = _signed(other, bits) if signed else other
            if number >= LARGE_FROM:
                return None
            return (op != "eq" and mirrored) != negated
    if op == "eq" and repr(left) > repr(right):
        left, right = right, left
    sign = "s" if signed and op != "eq" else "u"
    return Comparison(f"{op}.{sign}{bits}", left, right, negated)


def _add(a: Value, b: Value, bits: int) -> Value:
    if isinstance(a, int) and isinstance(b, int):
        return (a + b) % (1 << bits)
    for large, step in ((a, b), (b, a)):
        if isinstance(large, Large) and isinstance(step, int) and 0 <= step < 1 << (bits - 1):
            return LARGE
    return None


def _logic(op: str, a: Value, b: Value) -> Value:
    for known, other in ((a, b), (b, a)):
        if isinstance(known, bool):
            if op == "and":
                return other if known else False
            if op == "or":
                return True if known else other
            if isinstance(other, bool):
                return known != other
            return other.inverted() if known and isinstance(other, Comparison) else (None if known else other)
    return None


_INTEGER: dict[str, Callable[[int, int, int], int]] = {
    "sub": lambda a, b, bits: a - b,
    "shl": lambda a, b, bits: a << min(b, 64),
    "and": lambda a, b, bits: a & b,
    "or": lambda a, b, bits: a | b,
    "xor": lambda a, b, bits: a ^ b,
}


def result(instruction: Instruction, operands: tuple[Value, ...]) -> Value:
    """Value the instruction computes from its operands' values; None where this can't tell."""
    parts = instruction.op.split(".")
    op, bits = parts[0], width(instruction.op)
    if op in ("mov", "cvta", "mapa"):
        return operands[0]
    if op == "shfl":  # every followed thread is the first of its warp, and warps take index shuffles from there
        return operands[0] if parts[2] == "idx" and operands[1] == 0 else None
    if op == "selp":
        chosen = operands[2]
        if isinstance(chosen, bool):
            return operands[0] if chosen else operands[1]
        return operands[0] if operands[0] == operands[1] else None
    if op == "not" and "pred" in parts:
        value = operands[0]
        return (not value) if isinstance(value, bool) else value.inverted() if isinstance(value, Comparison) else None
    if "pred" in parts:
        return _logic(op, operands[0], operands[1])
    if op == "add":
        return _add(operands[0], operands[1], bits)
    if op == "cvt" and isinstance(operands[0], Large):
        return LARGE
    if op == "cvt" and len(parts) > 2 and isinstance(operands[0], Unknown):
        return operands[0] if re.findall(r"\d+", parts[-1]) == re.findall(r"\d+", parts[-2]) else None
    if not all(isinstance(operand, int) for operand in operands):
        return None
    return _integer(op, parts, [int(operand) for operand in operands if isinstance(operand, int)], bits)


def _integer(op: str, parts: list[str], numbers: list[int], bits: int) -> Value:
    """The same, all operands being numbers."""
    signed = parts[-1].startswith("s")
    source_bits = int(re.findall(r"\d+", parts[-1])[0]) if re.findall(r"\d+", parts[-1]) else bits
    numbers = [number & ((1 << source_bits) - 1) for number in numbers] if op != "mad" else numbers
    if signed and op in ("cvt", "shr", "min", "max", "mul", "mad"):
        numbers[0] = _signed(numbers[0], source_bits)
        if op in ("min", "max", "mul", "mad"):
            numbers[1] = _signed(numbers[1], source_bits)
    mask = (1 << bits) - 1
    if op in _INTEGER:
        return _INTEGER[op](numbers[0], numbers[1], bits) & mask
    if op == "cvt" and not {"f16", "bf16", "f32", "f64"} & set(parts):
        return numbers[0] & mask
    if op == "shr":
        return (numbers[0] >> min(numbers[1], 64)) & mask
    if op == "mul" and "hi" in parts:
        return (numbers[0] * numbers[1] >> bits) & mask
    if op in ("mul", "mad") and "hi" not in parts:
        return (numbers[0] * numbers[1] + (numbers[2] if op == "mad" else 0)) & mask
    if op in ("min", "max") and "relu" not in parts:
        return (min if op == "min" else max)(numbers[:2]) & mask
    if op in ("not", "neg"):
        return (~numbers[0] if op == "not" else -numbers[0]) & mask
    return None
