"""Descriptors written on the device: released by who writes them, acquired by who uses them."""

from __future__ import annotations

import re
from collections import defaultdict

from tests.ptx.findings import Finding, finding
from tests.ptx.flow import backward_must, forward
from tests.ptx.text import Instruction, Kernel
from tests.ptx.values import Linear, Values

_TMA = ("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", "cp.async.bulk.prefetch.tensor")


def is_tma(instruction: Instruction) -> bool:
    """A TMA instruction that uses a descriptor."""
    return instruction.op.startswith(_TMA)


def is_acquire(instruction: Instruction) -> bool:
    """A fence that orders a descriptor's writes before this thread's TMA instructions on it."""
    return instruction.op.startswith("fence.proxy.tensormap::generic.acquire")


def is_release(instruction: Instruction) -> bool:
    """A fence, alone or with a copy, that publishes a descriptor's writes."""
    return bool(re.match(r"(fence\.proxy\.tensormap::generic|tensormap\.cp_fenceproxy\b.*)\.release", instruction.op))


def _descriptor(instruction: Instruction) -> str:
    """Text of the operand that names the descriptor: first for store, reduce and prefetch; second for load."""
    first = re.search(r"\.\dd\.(global|L2)\b", instruction.op)
    return instruction.args[0 if first else 1]


def device_written_uses(kernel: Kernel, values: Values) -> list[Instruction]:
    """TMA instructions whose descriptor isn't a kernel parameter."""
    return [i for i in kernel.instructions if is_tma(i) and not values.address(_descriptor(i), i.index).is_symbol]


def check_acquires(kernel: Kernel, values: Values) -> list[Finding]:
    """Every TMA on a device-written descriptor follows an acquire of the same address by the same thread.

    On every path: an acquire counts until the address it named is computed anew (the next expert's descriptor, or the
    same one on a next trip) or the descriptor is rewritten. Each role of a kernel is a set of paths of its own, so one
    role's acquire doesn't serve another's.
    """
    uses = {
        use.index: {
            values.address(_descriptor(use), use.index),
            values.address_by_register(_descriptor(use), use.index),
        }
        for use in device_written_uses(kernel, values)
    }
    if not uses:
        return []
    acquired: dict[int, frozenset[Linear]] = {}
    rewritten: dict[int, Linear] = {}
    for instruction in kernel.instructions:
        if is_acquire(instruction) and not instruction.predicate:
            argument, index = instruction.args[0], instruction.index
            acquired[index] = frozenset((values.address(argument, index), values.address_by_register(argument, index)))
        elif instruction.op.startswith(("tensormap.replace", "tensormap.cp_fenceproxy")):
            rewritten[instruction.index] = values.address(instruction.args[0], instruction.index)
    recomputed: dict[int, set[Linear]] = defaultdict(set)
    for value in frozenset().union(*uses.values(), *acquired.values()):
        for leaf in value.leaves:
            for definition in leaf.definitions:
                recomputed[definition].add(value)

    def transfer(instruction: Instruction, state: frozenset[Linear]) -> frozenset[Linear]:
        index = instruction.index
        if index in recomputed:
            state = state - recomputed[index]
        if index in rewritten:
            written = rewritten[index]
            state = frozenset(value for value in state if value.terms == written.terms and value != written)
        return state | acquired[index] if index in acquired else state

    states = forward(kernel, frozenset[Linear](), transfer, lambda a, b: a & b)
    found = []
    for index, names in uses.items():
        state = states[index]
        if state is not None and not names & state:
            why = "no acquire of its descriptor on some path since the descriptor's address was computed"
            found.append(finding("acquire", kernel, kernel.instructions[index], why))
    return found


def check_releases(kernel: Kernel) -> list[Finding]:
    """Every edit of a descriptor is followed by a release on every path to the thread's end."""
    edits = [i for i in kernel.instructions if i.op.startswith("tensormap.replace")]
    if not edits:
        return []
    released = backward_must(kernel, lambda i: is_release(i) and not i.predicate, ends=False)
    return [
        finding("descriptor-release", kernel, edit, "no release fence follows on some path")
        for edit in edits
        if not released[edit.index]
    ]


def check_written_somewhere(kernels: list[Kernel]) -> list[Finding]:
    """Where kernels of a file use device-written descriptors, one of its kernels writes and releases descriptors."""
    users = [(kernel, uses) for kernel in kernels if (uses := device_written_uses(kernel, Values(kernel)))]
    if not users or any(is_release(instruction) for kernel in kernels for instruction in kernel.instructions):
        return []
    kernel, uses = users[0]
    return [finding("descriptor-release", kernel, uses[0], "no kernel of this file releases a descriptor")]
