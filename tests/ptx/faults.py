"""Faults planted into PTX text, one instruction at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.ptx import descriptors, groups, rings, tensor_memory
from tests.ptx.text import Instruction, Kernel, kernels


@dataclass(frozen=True)
class Fault:
    """A change to one place: kind, line, and the text with it."""

    kind: str
    line: int
    source: str

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.line}"


def _edit(source: str, line: int, new: str) -> str:
    lines = source.split("\n")
    lines[line - 1] = new
    return "\n".join(lines)


def _line(source: str, line: int) -> str:
    return source.split("\n")[line - 1]


def _swap(source: str, kernel: Kernel, wait: Instruction) -> Fault | None:
    """Move a wgmma wait behind the next arrival in the text."""
    for other in kernel.instructions[wait.index + 1 :]:
        if other.op.startswith("wgmma.mma"):
            return None
        if rings.is_arrive(other):
            text = _line(source, wait.line)
            moved = _edit(source, other.line, _line(source, other.line) + "\n" + text)
            return Fault("swap-release-and-wait", wait.line, _edit(moved, wait.line, ""))
    return None


def _guards(kernel: Kernel, wait: Instruction) -> bool:
    """Whether the next thing in the text that a barrier wait can guard fills a stage or multiplies, no other wait."""
    sends = any(map(rings.is_send, kernel.instructions))
    for other in kernel.instructions[wait.index + 1 :]:
        if rings.is_wait(other):
            return False
        if rings.is_load(other) or (sends and rings.is_store(other)) or other.op.startswith("wgmma.mma"):
            return True
    return False


_TENSOR = ("tcgen05.cp", "tcgen05.mma", "tcgen05.ld", "tcgen05.fence::after", "mbarrier.arrive.expect_tx")
"""What a wait on a barrier guards in a kernel that multiplies in tensor memory."""


def _guards_tensor(kernel: Kernel, wait: Instruction) -> bool:
    """As `_guards`. A wait that only another wait follows lets an exit be late: not checked."""
    for other in kernel.instructions[wait.index + 1 :]:
        if rings.is_wait(other):
            return False
        if rings.is_load(other) or other.op.startswith(_TENSOR):
            return True
    return False


_TENSOR_DROPS = {
    "tcgen05.commit": "drop-commit",
    "tcgen05.cp": "drop-scale-copy",
    "tcgen05.wait": "drop-tensor-wait",
    "tcgen05.fence": "drop-tensor-fence",
    "tcgen05.dealloc": "drop-free",
    "fence.proxy.async": "drop-proxy-fence",
}


def planted_in_tensor_memory(source: str) -> Iterator[Fault]:
    """Yield the faults of kernels that multiply in tensor memory; descriptors' are in `planted`.

    Dropped: each commit, wait, fence, copy of scales, hand-over of an accumulator by the epilogue, the freeing of
    tensor memory, the meetings of warps before its use and its end. Replaced: each commit by a plain arrival.
    """
    for kernel in kernels(source):
        if not tensor_memory.uses_tensor_memory(kernel):
            continue
        loads = [i.index for i in kernel.instructions if i.op.startswith("tcgen05.ld")]
        for instruction in kernel.instructions:
            op, line = instruction.op, instruction.line
            drop = _edit(source, line, "")
            for start, kind in _TENSOR_DROPS.items():
                if op.startswith(start):
                    yield Fault(kind, line, drop)
            if op.startswith("tcgen05.commit"):
                arrive = f"mbarrier.arrive.shared.b64 _, {instruction.args[0]};"
                yield Fault("arrive-for-commit", line, _edit(source, line, arrive))
            elif rings.is_wait(instruction) and _guards_tensor(kernel, instruction):
                yield Fault("drop-barrier-wait", line, drop)
            elif rings.is_arrive(instruction) and any(0 < instruction.index - load < 40 for load in loads):
                yield Fault("drop-hand-over", line, drop)
            elif op.startswith("bar.sync") and instruction.args[0] in ("3", "4"):
                yield Fault("drop-meeting", line, drop)


def planted(source: str) -> Iterator[Fault]:
    """Yield every fault of the kinds the checker must report.

    Dropped: each descriptor acquire and release, each arrival of a kernel that multiplies by a thread that multiplies
    (a stage's release), each wgmma wait, each wait on a barrier before what fills a stage or a wgmma, the proxy fence
    before what is sent to another block. Weakened: each wgmma wait by one group. Swapped: each wgmma wait with the
    arrival that follows it. A wgmma wait where nothing can be in flight changes nothing and is left alone: such ones
    are there for the assembler.
    """
    for kernel in kernels(source):
        in_flight = groups.in_flight(kernel)
        consuming = False
        for instruction in kernel.instructions:
            drop = _edit(source, instruction.line, "")
            consuming |= instruction.op.startswith("wgmma.mma")
            if descriptors.is_acquire(instruction):
                yield Fault("drop-acquire", instruction.line, drop)
            elif descriptors.is_release(instruction):
                yield Fault("drop-descriptor-release", instruction.line, drop)
            elif consuming and rings.is_arrive(instruction):
                yield Fault("drop-stage-release", instruction.line, drop)
            elif rings.is_send(instruction):
                fence = max(i.line for i in kernel.instructions[: instruction.index] if i.op.startswith("fence.proxy"))
                yield Fault("drop-proxy-fence", fence, _edit(source, fence, ""))
            elif rings.is_wait(instruction) and _guards(kernel, instruction):
                yield Fault("drop-barrier-wait", instruction.line, drop)
            elif instruction.op.startswith("wgmma.wait") and (state := in_flight[instruction.index]) and state.count:
                yield Fault("drop-wait", instruction.line, drop)
                more = f"wgmma.wait_group.sync.aligned {int(instruction.args[0]) + 1};"
                yield Fault("weaken-wait", instruction.line, _edit(source, instruction.line, more))
                if swapped := _swap(source, kernel, instruction):
                    yield swapped
