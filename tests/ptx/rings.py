"""Stages of shared memory that TMA fills and wgmma reads: released only when read, and always released.

Producer threads tell which barrier guards which bytes: what they wait on before a TMA load is the stage's empty
barrier, what the load signals is its full barrier. Threads that store 16 bytes at a time to shared memory and arrive at
a barrier, and neither load by TMA nor multiply, fill stages too: what they wait on and isn't filled by TMA is the empty
barrier, what they arrive at and doesn't free a TMA stage the full one. What such threads send to another block of the
cluster lands where they stored it here, and follows their fence.proxy.async. Consumer threads must wait on the full
barrier before a wgmma reads those bytes, must not arrive at the empty barrier while a wgmma that reads them may be in
flight, and must arrive at it before they wait for the same stage's next filling.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from tests.ptx.descriptors import is_tma
from tests.ptx.evaluate import Value
from tests.ptx.findings import Finding, finding
from tests.ptx.groups import InFlight
from tests.ptx.machine import EndOfPath, Machine, NotFollowed, Reader, warp_leaders
from tests.ptx.text import Instruction, Kernel

_ADDRESS_BITS = 0x3FFF  # of a wgmma shared-memory descriptor: address / 16


def is_send(instruction: Instruction) -> bool:
    """A bulk copy from shared memory to that of another block of the cluster."""
    return instruction.op.startswith("cp.async.bulk.shared::cluster.shared::cta")


def is_load(instruction: Instruction) -> bool:
    """A TMA load or bulk copy from global into shared memory."""
    copies = is_tma(instruction) or instruction.op.startswith("cp.async.bulk.shared")
    return copies and "mbarrier" in instruction.op and not is_send(instruction)


def is_arrive(instruction: Instruction) -> bool:
    """An arrival that may release a stage."""
    return instruction.op.startswith("mbarrier.arrive") and "expect_tx" not in instruction.op


def is_wait(instruction: Instruction) -> bool:
    """A wait on a barrier's phase."""
    return instruction.op.startswith(("mbarrier.try_wait", "mbarrier.test_wait"))


def barrier_of(instruction: Instruction) -> str:
    """The operand that names the barrier."""
    copies = is_load(instruction) or is_send(instruction)
    return [argument for argument in instruction.args if argument.startswith("[")][2 if copies else 0]


def parity_of(instruction: Instruction) -> str:
    return instruction.args[[argument.startswith("[") for argument in instruction.args].index(True) + 1]


def _matrix_operands(instruction: Instruction) -> tuple[str, ...]:
    """Descriptors of a wgmma's operands in shared memory."""
    return tuple(argument for argument in instruction.args[1:3] if not argument.startswith("{"))


def is_store(instruction: Instruction) -> bool:
    """An ordinary store of 16 bytes to shared memory: what operands of a wgmma are written with."""
    return instruction.op.startswith("st.shared.v4")


def _events(kernel: Kernel, stores: bool = False) -> dict[int, tuple[str, ...]]:
    """Events with the operands that matter; stores to shared memory too where asked."""
    found: dict[int, tuple[str, ...]] = {}
    on_tensor_memory = any(i.op.startswith("tcgen05.") for i in kernel.instructions)
    for i in kernel.instructions:
        if is_load(i) or (stores and is_send(i)):
            found[i.index] = (i.args[0].split(",")[0], barrier_of(i))
        elif i.op.startswith("mbarrier.arrive"):
            found[i.index] = i.args
        elif is_wait(i):
            found[i.index] = (barrier_of(i), parity_of(i))
        elif i.op.startswith("wgmma.mma"):
            found[i.index] = _matrix_operands(i)
        elif i.op.startswith(("wgmma.commit", "wgmma.wait")):
            found[i.index] = ()
        elif stores and is_store(i):
            found[i.index] = i.args[:1]
        elif on_tensor_memory and i.op.startswith(("tcgen05.", "bar.sync", "ret")):
            loads = i.op.startswith("tcgen05.ld")
            found[i.index] = i.args[1:] if loads else i.args[:6]  # without the predicate of a product
    return found


@dataclass
class Ring:
    """What the producer threads told.

    Attributes:
        regions: for each empty barrier, where TMA loads issued after waiting on it write.
        full: for each empty barrier, the barriers signalled after waiting on it.
        unclear: loads whose target or barrier isn't known.
        size: the most bytes one barrier phase expects; bounds a region.
    """

    regions: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    full: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    unclear: set[int] = field(default_factory=set)
    size: int = 0

    def owner(self, address: int) -> int | None:
        """The start of the region that `address` lies in, or None."""
        starts = [start for starts in self.regions.values() for start in starts if start <= address]
        start = max(starts, default=None)
        return None if start is None or (self.size and address >= start + self.size) else start


@dataclass(frozen=True)
class Producer:
    """Barriers waited on since the last load or signal, whether one came since, and targets loaded since any wait."""

    waited: frozenset[int] = frozenset()
    signalled: bool = False
    filled: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class _Consumer:
    """Filled stages held (full barrier, phase), and what the wgmma in flight read (instruction, address)."""

    held: frozenset[tuple[int, Value]] = frozenset()
    flight: InFlight[tuple[int, int | None]] = InFlight()


class Rings:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.machine = Machine(kernel, _events(kernel))
        self.ring = Ring()
        self.tma_empty: frozenset[int] = frozenset()
        self.tma_full: frozenset[int] = frozenset()
        self.found: dict[tuple[int, str], Finding] = {}
        self.arrived: set[int] = set()  # full barriers of stages that the followed warpgroup releases
        self.waited: dict[int, set[int]] = defaultdict(set)  # full barriers waited on, by waiting instruction

    def report(self, rule: str, instruction: Instruction, why: str) -> None:
        self.found.setdefault((instruction.index, rule), finding(rule, self.kernel, instruction, why))

    def produce(self, instruction: Instruction, read: Reader, state: Producer) -> Producer:
        if is_wait(instruction):
            barrier = read.address(barrier_of(instruction))
            if barrier is None:
                return state
            return Producer((frozenset() if state.signalled else state.waited) | {barrier})
        if is_load(instruction):
            target, signal = read.address(instruction.args[0]), read.address(barrier_of(instruction))
            if target is None or signal is None:
                self.ring.unclear.add(instruction.index)
                return state
            for barrier in state.waited:
                self.ring.regions[barrier].add(target)
                self.ring.full[barrier].add(signal)
            if (instruction.index, target) in state.filled:
                self.report("fill", instruction, "fills the same bytes again without a wait between")
            return replace(state, signalled=True, filled=state.filled | {(instruction.index, target)})
        if instruction.op.startswith("mbarrier.arrive"):
            signal = read.address(barrier_of(instruction))
            for barrier in state.waited if signal is not None else ():
                self.ring.full[barrier].add(signal or 0)
            if "expect_tx" in instruction.op:
                size = read.operand(instruction.args[-1])
                self.ring.size = max(self.ring.size, size) if isinstance(size, int) else self.ring.size
            return replace(state, signalled=True)
        return state

    def consume(self, instruction: Instruction, read: Reader, state: _Consumer) -> _Consumer:
        if instruction.op.startswith("wgmma"):
            multiplies = instruction.op.startswith("wgmma.mma")
            values = [read.operand(text) for text in _matrix_operands(instruction)] if multiplies else []
            addresses = ((v & _ADDRESS_BITS) << 4 if isinstance(v, int) else None for v in values)
            reads = frozenset((instruction.index, address) for address in addresses)
            self._check_filled(instruction, reads, state)
            return replace(state, flight=state.flight.after(instruction, reads))
        if is_wait(instruction):
            return self._wait(instruction, read, state)
        if is_arrive(instruction):
            return self._arrive(instruction, read, state)
        return state

    def _check_filled(
        self, instruction: Instruction, reads: frozenset[tuple[int, int | None]], state: _Consumer
    ) -> None:
        held = {barrier for barrier, _ in state.held}
        for _, address in reads:
            owner = None if address is None else self.ring.owner(address)
            signals = [self.ring.full[empty] for empty, starts in self.ring.regions.items() if owner in starts]
            if signals and not held & set().union(*signals):
                self.report("fill", instruction, "reads a stage without having waited until it is filled")

    def _wait(self, instruction: Instruction, read: Reader, state: _Consumer) -> _Consumer:
        barrier = read.address(barrier_of(instruction))
        parity = read.operand(parity_of(instruction))
        if barrier is None or not any(barrier in signals for signals in self.ring.full.values()):
            return state
        self.waited[instruction.index].add(barrier)
        if {held for held, _ in state.held} >= set().union(*self.ring.full.values()):
            self.report("release", instruction, "waits for a stage and hasn't released any of the whole ring")
            raise EndOfPath
        if any(held == barrier and phase != parity for held, phase in state.held):
            self.report("release", instruction, "waits for a stage's next filling and hasn't released the last one")
            raise EndOfPath  # beyond it stages would only pile up
        return replace(state, held=state.held | {(barrier, parity)})

    def _arrive(self, instruction: Instruction, read: Reader, state: _Consumer) -> _Consumer:
        barrier = read.address(barrier_of(instruction))
        if state.flight.count:
            regions = self.ring.regions.get(barrier, set()) if barrier is not None else set()
            if not regions:
                self.report(
                    "drain", instruction, "arrives while a wgmma may be in flight, and what it guards isn't known"
                )
            for index, address in state.flight.all:
                owner = None if address is None else self.ring.owner(address)
                if address is None or owner in regions:
                    line = self.kernel.instructions[index].line
                    self.report("drain", instruction, f"releases bytes that the wgmma of line {line} may still read")
        released = self.ring.full.get(barrier, set()) if barrier is not None else set()
        self.arrived |= released
        return replace(state, held=frozenset(h for h in state.held if h[0] not in released))

    def convert(self, instruction: Instruction, read: Reader, state: Producer) -> Producer:
        """As `produce`, for threads that fill stages with ordinary stores."""
        if is_store(instruction):
            target = read.address(instruction.args[0])
            for barrier in state.waited if target is not None else ():
                self.ring.regions[barrier].add(target or 0)
            return replace(state, signalled=True)
        if is_send(instruction):
            return self._send(instruction, read, state)
        hands_over = instruction.op.startswith("mbarrier.arrive")
        barrier = read.address(barrier_of(instruction)) if is_wait(instruction) or hands_over else None
        loaded = self.tma_full if is_wait(instruction) else self.tma_empty
        if barrier is None or barrier in loaded:
            return state
        if is_wait(instruction):
            return Producer((frozenset() if state.signalled else state.waited) | {barrier})
        for empty in state.waited:
            self.ring.full[empty].add(barrier)
        return replace(state, signalled=True)

    def _send(self, instruction: Instruction, read: Reader, state: Producer) -> Producer:
        """Once a wait, and signalling what this thread's block waits for."""
        target, signal = read.address(instruction.args[0]), read.address(barrier_of(instruction))
        if target is None or signal is None:
            self.ring.unclear.add(instruction.index)
            return state
        if (instruction.index, target) in state.filled or not state.waited:
            self.report("fill", instruction, "sends to a stage without a wait until it is free")
        if not all(signal in self.ring.full[empty] for empty in state.waited):
            self.report("fill", instruction, "signals a barrier at which this block's part doesn't arrive")
        return replace(state, signalled=True, filled=state.filled | {(instruction.index, target)})

    def _follow_converters(self, ranks: range) -> None:
        """Follow the threads that fill stages with ordinary stores, once it is known what TMA fills."""
        machine = Machine(self.kernel, _events(self.kernel, stores=True))
        machine.kind = self.machine.kind
        self.tma_empty = frozenset(self.ring.full)
        self.tma_full = frozenset().union(*self.ring.full.values())
        for tid in warp_leaders(self.kernel):
            reached = [self.kernel.instructions[index] for index in machine.reached(tid)]
            others = any(is_load(i) or i.op.startswith("wgmma.mma") for i in reached)
            if not others and any(map(is_store, reached)) and any(i.op.startswith("mbarrier.arrive") for i in reached):
                for machine.rank in ranks:
                    machine.follow(tid, Producer(), self.convert)

    def roles(self) -> tuple[list[int], list[int]]:
        """Warp leaders that reach a TMA load, and those that reach a wgmma; of a warpgroup's that do the same, one."""
        producers, consumers = [], {}
        for tid in warp_leaders(self.kernel):
            reached = self.machine.reached(tid)
            instructions = [self.kernel.instructions[index] for index in reached]
            if any(map(is_load, instructions)):
                producers.append(tid)
            if any(i.op.startswith("wgmma.mma") for i in instructions):
                consumers.setdefault((tid // 128, reached), tid)
        return producers, sorted(consumers.values())

    def check(self) -> list[Finding]:
        producers, consumers = self.roles()
        if not producers or not consumers:
            raise NotFollowed("no thread is seen to reach a TMA load, or none a wgmma")
        # In a cluster each block fills its share of a stage for all: the shares of two blocks bound the regions well.
        shared = any("multicast" in i.op or is_send(i) for i in self.kernel.instructions)
        ranks = range(2 if shared else 1)
        for self.machine.rank in ranks:
            for tid in producers:
                self.machine.follow(tid, Producer(), self.produce)
        self._follow_converters(ranks)
        for index in self.ring.unclear:
            self.report("drain", self.kernel.instructions[index], "where it writes or what it signals isn't known")
        warpgroups: dict[int, list[int]] = defaultdict(list)
        for tid in consumers:
            warpgroups[tid // 128].append(tid)
        self.machine.rank = 0
        for tids in warpgroups.values():
            self._check_warpgroup(tids)
        return list(self.found.values())

    def _check_warpgroup(self, tids: list[int]) -> None:
        """Follow a warpgroup's warps; the duty to release lies with those that ever do, but one of them must."""
        self.waited.clear()
        everything: set[int] = set()
        for tid in tids:
            before = dict(self.found)
            self.arrived = set()
            self.machine.follow(tid, _Consumer(), self.consume)
            if not self.arrived:
                self.found = before | {key: f for key, f in self.found.items() if f.rule != "release"}
            everything |= self.arrived
        for index, barriers in self.waited.items():
            if barriers - everything:
                self.report("release", self.kernel.instructions[index], "waits for a stage that is never released")


def uses_rings(kernel: Kernel) -> bool:
    """Whether the kernel has both TMA loads and wgmma."""
    return any(map(is_load, kernel.instructions)) and multiplies(kernel)


def multiplies(kernel: Kernel) -> bool:
    """Whether the kernel uses wgmma."""
    return any(i.op.startswith("wgmma.mma") for i in kernel.instructions)


def kinds_of_blocks(kernel: Kernel) -> int:
    """How many kinds of blocks are followed, each by itself: one, or the first three along the grid's second dimension
    where the kernel asks where it is there."""
    return 3 if any("%ctaid.y" in i.args for i in kernel.instructions) else 1


def check_rings(kernel: Kernel) -> list[Finding]:
    """Check the release protocol of every stage; [] means it holds in every reachable state.

    A kernel that can't be followed is reported, not passed.
    """
    found: dict[tuple[str, int], Finding] = {}
    for kind in range(kinds_of_blocks(kernel)):
        rings = Rings(kernel)
        rings.machine.kind = kind
        try:
            findings = rings.check()
        except NotFollowed as error:
            findings = [*rings.found.values(), Finding("drain", kernel.name, 0, str(error))]
        found |= {(finding.rule, finding.line): finding for finding in findings}
    return list(found.values())
