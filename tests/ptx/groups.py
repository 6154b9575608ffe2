"""wgmma groups in flight: how many there can be at each instruction, and whether their registers are left alone."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tests.ptx.findings import Finding, finding
from tests.ptx.flow import forward, read, written
from tests.ptx.text import REGISTER, Instruction, Kernel

_CAP = 9  # a ninth group in flight is merged with the eighth: no kernel here goes near it


Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True)
class InFlight(Generic[Item]):
    """What stands for the wgmma that may still run: not yet committed, and by committed group, newest first."""

    uncommitted: frozenset[Item] = frozenset()
    groups: tuple[frozenset[Item], ...] = ()

    @property
    def count(self) -> int:
        """Groups that may be in flight, an uncommitted one included."""
        return len(self.groups) + bool(self.uncommitted)

    @property
    def all(self) -> frozenset[Item]:
        return self.uncommitted.union(*self.groups)

    def after(self, instruction: Instruction, items: frozenset[Item]) -> InFlight[Item]:
        """The state after `instruction`; `items` stand for it if it is a wgmma."""
        if instruction.op.startswith("wgmma.mma"):
            return InFlight(self.uncommitted | items, self.groups)
        if instruction.op.startswith("wgmma.commit"):
            groups = (self.uncommitted, *self.groups)
            if len(groups) > _CAP:
                groups = (*groups[: _CAP - 1], groups[-2] | groups[-1])
            return InFlight(frozenset(), groups)
        if instruction.op.startswith("wgmma.wait"):
            return InFlight(self.uncommitted, self.groups[: int(instruction.args[0])])
        return self

    def joined(self, other: InFlight[Item]) -> InFlight[Item]:
        longer, shorter = sorted((self.groups, other.groups), key=len, reverse=True)
        both = tuple(a | b for a, b in zip(longer, shorter))
        return InFlight(self.uncommitted | other.uncommitted, both + longer[len(shorter) :])


def in_flight(kernel: Kernel) -> list[InFlight[int] | None]:
    """Indices of the wgmma that may run before each instruction, None where it can't be reached."""
    start = InFlight[int]()
    return forward(kernel, start, lambda i, s: s.after(i, frozenset([i.index])), lambda a, b: a.joined(b))


def _accumulators(instruction: Instruction) -> frozenset[str]:
    return frozenset(REGISTER.findall(instruction.args[0]))


def _operand_registers(instruction: Instruction) -> frozenset[str]:
    """Registers of an A operand that lies in registers."""
    argument = instruction.args[1]
    return frozenset(REGISTER.findall(argument)) if argument.startswith("{") else frozenset()


def check_registers(kernel: Kernel, states: list[InFlight[int] | None]) -> list[Finding]:
    """No instruction touches the accumulators of a wgmma in flight, nor overwrites its register operands.

    Only a wgmma on the same accumulators may: the hardware orders those.
    """
    found = []
    for instruction in kernel.instructions:
        state = states[instruction.index]
        if state is None or not state.count:
            continue
        writes = frozenset(written(instruction))
        touched = writes | frozenset(read(instruction))
        for index in state.all:
            other = kernel.instructions[index]
            if instruction.op.startswith("wgmma.mma") and _accumulators(instruction) == _accumulators(other):
                touched_here = frozenset[str]()
            else:
                touched_here = touched & _accumulators(other)
            if touched_here or writes & _operand_registers(other):
                why = f"touches registers of the wgmma of line {other.line}, which may still run"
                found.append(finding("registers", kernel, instruction, why))
                break
    return found
