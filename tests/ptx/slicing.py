"""Which registers and branches decide what a kernel's events do: a static slice.

Everything else (the arithmetic on data, the epilogue's loops) can be skipped when the events are followed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tests.ptx.flow import read, written
from tests.ptx.text import Instruction, Kernel

END = -1  # the common end of all paths, as a block


@dataclass(frozen=True)
class Slice:
    """The part of a kernel that matters to some events.

    Attributes:
        instructions: indices of events and of definitions of tracked registers.
        registers: tracked registers.
        joins: for each branch that doesn't matter, the instruction where its paths meet again, or END.
        live: for each block, by its first instruction, the tracked registers whose values are still read.
    """

    instructions: frozenset[int]
    registers: frozenset[str]
    joins: dict[int, int]
    live: dict[int, frozenset[str]]


class _Blocks:
    """Basic blocks by first instruction, and post-dominance between them."""

    def __init__(self, kernel: Kernel) -> None:
        self.leaders = kernel.leaders
        ends = [*self.leaders[1:], len(kernel.instructions)]
        self.last = {leader: end - 1 for leader, end in zip(self.leaders, ends)}
        self.successors = {leader: kernel.successors[self.last[leader]] or (END,) for leader in self.leaders}
        self.of = {index: leader for leader, end in zip(self.leaders, ends) for index in range(leader, end)}
        self._post = self._post_dominators()

    def _post_dominators(self) -> dict[int, frozenset[int]]:
        everything = frozenset([*self.leaders, END])
        found = dict.fromkeys(self.leaders, everything)
        found[END] = frozenset([END])
        changed = True
        while changed:
            changed = False
            for leader in reversed(self.leaders):
                meet = frozenset.intersection(*(found[other] for other in self.successors[leader]))
                if (new := meet | {leader}) != found[leader]:
                    found[leader], changed = new, True
        return found

    def join(self, leader: int) -> int:
        """The nearest block that every path from the end of `leader` passes."""
        strict = self._post[leader] - {leader}
        return max(strict, key=lambda other: len(self._post[other]))

    def controlled(self, leader: int) -> frozenset[int]:
        """Blocks that execute or not (or again) by which way the branch ending `leader` goes."""
        stop = self._post[leader] - {leader}
        found: set[int] = set()
        for other in self.successors[leader]:
            found |= self._post[other] - stop
        reached = set(found)
        # What lies between the branch and its join, beyond the post-dominators of the two ways, is decided there too.
        todo = list(reached)
        while todo:
            for other in self.successors.get(todo.pop(), ()):
                if other not in stop and other not in reached:
                    reached.add(other)
                    todo.append(other)
        return frozenset(reached)


def slice_kernel(kernel: Kernel, events: Iterable[int], operands: Iterable[str], opaque: frozenset[str]) -> Slice:
    """Slice `kernel` for `events` and the registers `operands`; results of `opaque` opcodes are unknown."""
    blocks = _Blocks(kernel)
    definitions: dict[str, list[Instruction]] = {}
    for instruction in kernel.instructions:
        for register in written(instruction):
            definitions.setdefault(register, []).append(instruction)
    branches = {leader: kernel.instructions[blocks.last[leader]] for leader in blocks.leaders}
    branches = {leader: i for leader, i in branches.items() if i.is_branch and i.predicate}
    controlled = {leader: blocks.controlled(leader) for leader in branches}

    relevant = set(events)
    tracked: set[str] = set()
    todo = [*operands, *(kernel.instructions[index].predicate for index in relevant)]
    undecided = dict(branches)
    while True:
        while todo:
            register = todo.pop()
            if not register or register in tracked:
                continue
            tracked.add(register)
            for definition in definitions.get(register, ()):
                relevant.add(definition.index)
                todo.append(definition.predicate)
                if definition.op.split(".")[0] not in opaque:
                    todo.extend(read(definition))
        occupied = {blocks.of[index] for index in relevant}
        decided = [leader for leader in undecided if controlled[leader] & occupied]
        if not decided:
            break
        for leader in decided:
            todo.append(undecided.pop(leader).predicate)
    joins = {branch.index: blocks.join(leader) for leader, branch in undecided.items()}
    return Slice(frozenset(relevant), frozenset(tracked), joins, _live(kernel, blocks, frozenset(tracked), joins))


def _live(kernel: Kernel, blocks: _Blocks, tracked: frozenset[str], joins: dict[int, int]) -> dict[int, frozenset[str]]:
    live = {leader: frozenset[str]() for leader in blocks.leaders}
    changed = True
    while changed:
        changed = False
        for leader in reversed(blocks.leaders):
            last = blocks.last[leader]
            following = (joins[last],) if last in joins else blocks.successors[leader]
            alive: set[str] = set().union(*(live.get(other, frozenset()) for other in following))
            for index in range(last, leader - 1, -1):
                instruction = kernel.instructions[index]
                if not instruction.predicate:
                    alive -= set(written(instruction))
                alive |= tracked.intersection(read(instruction))
            if alive != live[leader]:
                live[leader], changed = frozenset(alive), True
    return live
