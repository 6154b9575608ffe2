"""Data flow over instructions: one solver, and the facts about instructions that every analysis needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tests.ptx.text import REGISTER, Instruction, Kernel

State = TypeVar("State")

# Instructions whose first operand is not a register they write.
_WRITE_NOTHING = (
    "applypriority",
    "bar.",
    "barrier.",
    "bra",
    "cp.",
    "discard",
    "exit",
    "fence",
    "griddepcontrol",
    "mbarrier.init",
    "mbarrier.inval",
    "membar",
    "nanosleep",
    "prefetch",
    "red.",
    "ret",
    "setmaxnreg",
    "st.",
    "stmatrix",
    "tcgen05.alloc",
    "tcgen05.commit",
    "tcgen05.cp",
    "tcgen05.dealloc",
    "tcgen05.fence",
    "tcgen05.mma",
    "tcgen05.relinquish",
    "tcgen05.st",
    "tcgen05.wait",
    "tensormap",
    "trap",
    "wgmma.commit",
    "wgmma.fence",
    "wgmma.wait",
)


def written(instruction: Instruction) -> tuple[str, ...]:
    """Registers the instruction writes. A wgmma's accumulators are among them."""
    if instruction.op.startswith(_WRITE_NOTHING) or not instruction.args:
        return ()
    return tuple(REGISTER.findall(instruction.args[0]))


def read(instruction: Instruction) -> tuple[str, ...]:
    """Registers the instruction reads, its predicate included."""
    first = 1 if written(instruction) else 0
    if instruction.op.startswith("wgmma.mma"):
        first = 0
    found = [register for argument in instruction.args[first:] for register in REGISTER.findall(argument)]
    return tuple([*found, instruction.predicate] if instruction.predicate else found)


def forward(
    kernel: Kernel,
    entry: State,
    transfer: Callable[[Instruction, State], State],
    join: Callable[[State, State], State],
) -> list[State | None]:
    """Solve a forward problem; the result is the state before each instruction, None where it can't be reached."""
    states: list[State | None] = [None] * len(kernel.instructions)
    states[0] = entry
    todo = [0]
    while todo:
        index = todo.pop()
        before = states[index]
        assert before is not None
        after = transfer(kernel.instructions[index], before)
        for other in kernel.successors[index]:
            known = states[other]
            joined = after if known is None else join(known, after)
            if joined != known:
                states[other] = joined
                todo.append(other)
    return states


def backward_must(kernel: Kernel, holds: Callable[[Instruction], bool], ends: bool) -> list[bool]:
    """Per instruction: on every path from after it to the thread's end, `holds` is met; `ends` is the value at an end.

    A path that never ends (a loop waiting for ever) counts as meeting it.
    """
    result = [True] * len(kernel.instructions)
    todo = list(range(len(kernel.instructions)))
    while todo:
        index = todo.pop()
        following: Sequence[int] = kernel.successors[index]
        value = all(holds(kernel.instructions[other]) or result[other] for other in following) if following else ends
        if value != result[index]:
            result[index] = value
            todo.extend(kernel.predecessors[index])
    return result
