"""Kernels whose products are tcgen05 instructions: stages, accumulators and tensor memory, by following threads.

The load thread tells stages and their barriers, as in `rings.py`. The multiplying thread holds a stage from its wait to
its commit; the accumulator, from its wait on the epilogue to its commit. Epilogue threads may load an accumulator from
their wait until they give it back, and after that only columns that no other accumulator uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.ptx.evaluate import Value
from tests.ptx.findings import Finding, finding
from tests.ptx.flow import forward, read, written
from tests.ptx.machine import EndOfPath, NotFollowed, Reader, warp_leaders
from tests.ptx.rings import Producer, Rings, barrier_of, is_arrive, is_load, is_wait, parity_of
from tests.ptx.text import Instruction, Kernel

COLUMNS = 512
_COLUMN = 0xFFFF  # of a tensor-memory address; lanes and a scale's byte lie above
_ADDRESS = 0x3FFF  # of a shared-memory descriptor: address / 16
_SCALE_ROWS, _SCALE_COLUMNS = 128, 4  # of one copy: rows of the operand, columns it fills


def uses_tensor_memory(kernel: Kernel) -> bool:
    """Whether the kernel multiplies with tcgen05."""
    return any(i.op.startswith("tcgen05.mma") for i in kernel.instructions)


def _between_warps(instruction: Instruction) -> bool:
    """A barrier of several roles' warps: a constant one that isn't the whole block's."""
    return instruction.args[0].isdigit() and instruction.args[0] != "0"


def with_known_base(kernel: Kernel) -> Kernel:
    """The kernel with its allocated tensor memory at column 0: where its address is read back, a constant is."""
    slots = {i.args[0] for i in kernel.instructions if i.op.startswith("tcgen05.alloc")}
    instructions = tuple(
        replace(i, op="mov.b32", args=(i.args[0], "0")) if i.op == "ld.shared.b32" and i.args[1] in slots else i
        for i in kernel.instructions
    )
    return replace(kernel, instructions=instructions)


@dataclass(frozen=True)
class _Multiplier:
    """Stages held (full barrier, phase); scale columns copied since the last wait; the accumulator's state."""

    held: frozenset[tuple[int, Value]] = frozenset()
    copied: frozenset[int] = frozenset()
    owned: bool = False
    fenced: bool = False
    wrote: bool = False
    synced: bool = False


@dataclass(frozen=True)
class _Storer:
    """The accumulator filled last and not given back (barrier, phase); fences, loads in flight, the allocation."""

    held: tuple[int, Value] | None = None
    released: bool = False
    after: bool = False
    before: bool = False
    loading: bool = False
    met: bool = False
    synced: bool = False
    allocated: bool = False


@dataclass
class Accumulators:
    """What the multiplying thread told: (first column, columns) of accumulators, and barriers of their hand-over."""

    columns: set[tuple[int, int]] = field(default_factory=set)
    full: set[int] = field(default_factory=set)
    empty: set[int] = field(default_factory=set)

    def owners(self, column: int) -> int:
        """How many accumulators use a column."""
        return sum(first <= column < first + count for first, count in self.columns)


class TensorMemory(Rings):
    """Follows the three roles of a kernel."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(with_known_base(kernel))
        self.accumulators = Accumulators()

    def check(self) -> list[Finding]:
        reached = {tid: self.machine.reached(tid) for tid in warp_leaders(self.kernel)}
        ops = {tid: [self.kernel.instructions[index] for index in indices] for tid, indices in reached.items()}
        roles = {
            name: [tid for tid in ops if any(test(i) for i in ops[tid])]
            for name, test in (
                ("load", is_load),
                ("multiply", lambda i: i.op.startswith("tcgen05.mma")),
                ("store", lambda i: i.op.startswith("tcgen05.ld")),
            )
        }
        if not all(roles.values()):
            raise NotFollowed(f"no thread is seen in one of the roles: {roles}")
        for tid in roles["load"]:
            self.machine.follow(tid, Producer(), self._fill)
        for index in self.ring.unclear:
            self.report("drain", self.kernel.instructions[index], "where it writes or what it signals isn't known")
        for tid in roles["multiply"]:
            self.machine.follow(tid, _Multiplier(), self._multiply)
        self.machine.most_values = COLUMNS // 8  # an epilogue counts through an accumulator's columns
        for tid in roles["store"]:
            self.machine.follow(tid, _Storer(), self._store)
        return list(self.found.values())

    def _fill(self, instruction: Instruction, read: Reader, state: Producer) -> Producer:
        """As `produce`; each arrival on a full barrier, with or without TMA loads, follows a wait of its own."""
        if instruction.op.startswith("mbarrier.arrive") and (state.signalled or not state.waited):
            self.report("fill", instruction, "arrives for a stage without having waited until it is empty")
        if instruction.op.startswith(("tcgen05.", "bar.sync", "ret")):
            return state
        return self.produce(instruction, read, state)

    def _stage_full(self, value: Value) -> set[int]:
        """Full barriers of the stage in which the matrix of a shared-memory descriptor lies."""
        owner = self.ring.owner((value & _ADDRESS) << 4) if isinstance(value, int) else None
        return set().union(*(self.ring.full[e] for e, starts in self.ring.regions.items() if owner in starts))

    def _multiply(self, instruction: Instruction, read: Reader, state: _Multiplier) -> _Multiplier:
        op = instruction.op
        if is_wait(instruction):
            return self._multiply_wait(instruction, read, state)
        if op.startswith("mbarrier.arrive"):
            self.report("drain", instruction, "arrives at once: only a commit waits until products have read a stage")
        elif op.startswith("bar.sync"):
            return replace(state, synced=state.synced or _between_warps(instruction))
        elif op.startswith("tcgen05.fence::after"):
            return replace(state, fenced=True)
        elif op.startswith("tcgen05.cp"):
            column = self._column(read.operand(instruction.args[0].strip("[]")), instruction)
            self._check_held(instruction, read, state, (instruction.args[1],))
            return replace(state, copied=state.copied | {column})
        elif op.startswith("tcgen05.mma"):
            return self._product(instruction, read, state)
        elif op.startswith("tcgen05.commit"):
            return self._commit(instruction, read, state)
        return state

    def _column(self, value: Value, instruction: Instruction) -> int:
        if isinstance(value, int):
            return value & _COLUMN
        self.report("tensor-memory", instruction, "which columns it uses isn't known")
        return -1

    def _check_held(
        self, instruction: Instruction, read: Reader, state: _Multiplier, descriptors: tuple[str, ...]
    ) -> None:
        held = {barrier for barrier, _ in state.held}
        for text in descriptors:
            signals = self._stage_full(read.operand(text))
            if not signals:
                self.report("fill", instruction, "which stage it reads isn't known")
            elif not held & signals:
                self.report("fill", instruction, "reads a stage without having waited until it is filled")

    def _multiply_wait(self, instruction: Instruction, read: Reader, state: _Multiplier) -> _Multiplier:
        barrier, parity = read.address(barrier_of(instruction)), read.operand(parity_of(instruction))
        if barrier is None:
            self.report("fill", instruction, "which barrier it waits on isn't known")
            return state
        every = set().union(*self.ring.full.values())
        if barrier not in every:
            self.accumulators.empty.add(barrier)
            if state.wrote:
                self.report("accumulator", instruction, "waits for the next and hasn't handed over the last one")
                raise EndOfPath
            return replace(state, owned=True, fenced=False)
        if {held for held, _ in state.held} >= every or any(b == barrier and p != parity for b, p in state.held):
            self.report("release", instruction, "waits for a stage and hasn't released its last filling")
            raise EndOfPath
        return replace(state, held=state.held | {(barrier, parity)}, copied=frozenset())

    def _product(self, instruction: Instruction, read: Reader, state: _Multiplier) -> _Multiplier:
        target, a, b, kind, *scales = instruction.args[:6]
        self._check_held(instruction, read, state, (a, b))
        if not state.synced:
            self.report("tensor-memory", instruction, "uses tensor memory without having met its allocation")
        if not state.owned:
            self.report("accumulator", instruction, "writes one that the epilogue may still read")
        elif not state.fenced:
            self.report("accumulator", instruction, "no fence orders it after the wait for the epilogue")
        first = self._column(read.operand(target.strip("[]")), instruction)
        descriptor = read.operand(kind)
        if not isinstance(descriptor, int):
            self.report("tensor-memory", instruction, "how many columns it writes isn't known")
            return replace(state, wrote=True)
        count = (descriptor >> 17 & 0x3F) * 8
        self.accumulators.columns.add((first, count))
        if first + count > COLUMNS:
            self.report("tensor-memory", instruction, f"writes columns {first} to {first + count}")
        for text, atoms in zip(scales, (1, -(-count // _SCALE_ROWS))):
            start = self._column(read.operand(text.strip("[]")), instruction)
            for column in range(start, start + atoms * _SCALE_COLUMNS, _SCALE_COLUMNS):
                if column not in state.copied:
                    self.report("fill", instruction, "its scales were not copied since the stage was waited for")
                if self.accumulators.owners(column):
                    self.report("tensor-memory", instruction, "its scales lie in an accumulator")
        return replace(state, wrote=True)

    def _commit(self, instruction: Instruction, read: Reader, state: _Multiplier) -> _Multiplier:
        barrier = read.address(instruction.args[0])
        if barrier is None:
            self.report("release", instruction, "which barrier it arrives on isn't known")
            return state
        if barrier in self.ring.regions:
            released = self.ring.full[barrier]
            if not released & {held for held, _ in state.held}:
                self.report("release", instruction, "releases a stage it doesn't hold")
            return replace(state, held=frozenset(h for h in state.held if h[0] not in released))
        self.accumulators.full.add(barrier)
        if not state.wrote:
            self.report("accumulator", instruction, "hands over an accumulator that has nothing in it")
        return replace(state, owned=False, wrote=False)

    def _store(self, instruction: Instruction, read: Reader, state: _Storer) -> _Storer:
        op = instruction.op
        if is_wait(instruction):
            return self._store_wait(instruction, read, state)
        if is_arrive(instruction):
            return self._give_back(instruction, read, state)
        if op.startswith("bar.sync"):
            meets = _between_warps(instruction)
            return replace(state, met=state.met or meets, synced=state.synced or meets)
        if op.startswith("tcgen05.fence::after"):
            return replace(state, after=True)
        if op.startswith("tcgen05.fence::before"):
            return replace(state, before=True)
        if op.startswith("tcgen05.wait::ld"):
            return replace(state, loading=False)
        if op.startswith("tcgen05.ld"):
            self._check_load(instruction, read, state)
            return replace(state, loading=True, before=False, synced=False)
        if op.startswith("tcgen05.alloc"):
            return replace(state, allocated=True, met=False)
        if op.startswith("tcgen05.dealloc"):
            if not state.synced or state.loading:
                self.report("tensor-memory", instruction, "frees what this or another warp may still load from")
            return replace(state, allocated=False)
        if op == "ret" and state.allocated:
            self.report("tensor-memory", instruction, "the thread ends and its allocation hasn't been freed")
        return state

    def _store_wait(self, instruction: Instruction, read: Reader, state: _Storer) -> _Storer:
        barrier, parity = read.address(barrier_of(instruction)), read.operand(parity_of(instruction))
        if barrier not in self.accumulators.full or state.held == (barrier, parity):  # another try of the same wait
            return state
        if state.held is not None and not state.released:
            self.report("accumulator", instruction, "waits for the next and hasn't given back the last one")
            raise EndOfPath
        assert barrier is not None
        return replace(state, held=(barrier, parity), released=False, after=False)

    def _give_back(self, instruction: Instruction, read: Reader, state: _Storer) -> _Storer:
        if read.address(barrier_of(instruction)) not in self.accumulators.empty:
            return state
        if state.loading:
            self.report("accumulator", instruction, "gives back an accumulator while a load of it may be in flight")
        if not state.before:
            self.report("accumulator", instruction, "no fence orders its loads before it is given back")
        if state.held is None or state.released:
            self.report("accumulator", instruction, "gives back an accumulator that it doesn't have")
        return replace(state, released=True)

    def _check_load(self, instruction: Instruction, read: Reader, state: _Storer) -> None:
        column = self._column(read.operand(instruction.args[1].strip("[]")), instruction)
        match = re.search(r"\.32x32b\.x(\d+)\b", instruction.op)
        owners = {self.accumulators.owners(column + i) for i in range(int(match[1]) if match else COLUMNS)}
        if not state.met:
            self.report("tensor-memory", instruction, "uses tensor memory without having met its allocation")
        if state.held is None:
            self.report("accumulator", instruction, "loads an accumulator that it hasn't waited for")
        elif not state.after:
            self.report("accumulator", instruction, "no fence orders it after the wait for the products")
        if 0 in owners:
            self.report("tensor-memory", instruction, "loads columns that no product writes")
        if state.released and (len(self.accumulators.full) > 1 or owners != {1}):
            self.report("accumulator", instruction, "loads columns that it has given back")


def check_loaded_registers(kernel: Kernel) -> list[Finding]:
    """Registers that tcgen05.ld fills are used only after tcgen05.wait::ld.

    The compiler groups them into wider ones before that wait: the new names wait as well.
    """

    def transfer(instruction: Instruction, pending: frozenset[str]) -> frozenset[str]:
        if instruction.op.startswith("tcgen05.wait::ld"):
            return frozenset()
        renames = instruction.op.startswith("mov.") and pending & set(read(instruction))
        if renames or instruction.op.startswith("tcgen05.ld"):
            return pending | set(written(instruction))
        return pending

    states = forward(kernel, frozenset[str](), transfer, lambda a, b: a | b)
    return [
        finding("registers", kernel, i, "reads what a tcgen05.ld may still be loading")
        for i in kernel.instructions
        if (pending := states[i.index]) and not i.op.startswith("mov.") and pending & set(read(i))
    ]


def hands_over(instruction: Instruction) -> bool:
    """An arrival or TMA store that gives what was stored to the async proxy."""
    arrives = instruction.op.startswith("mbarrier.arrive.expect_tx")
    return arrives or ".shared::cta" in instruction.op.partition(".global")[2]


def check_generic_stores(kernel: Kernel, hands_over: Callable[[Instruction], bool] = hands_over) -> list[Finding]:
    """Between ordinary stores to shared memory and what hands them over, a proxy fence.

    A barrier of the whole block or cluster ends what was stored before: offsets, never read by the async proxy.
    """

    def transfer(instruction: Instruction, unfenced: bool) -> bool:
        op = instruction.op
        if op.startswith("st.shared"):
            return True
        whole = op.startswith("barrier.cluster.wait") or (op.startswith("bar.sync") and instruction.args == ("0",))
        return unfenced and not (whole or op.startswith("fence.proxy.async"))

    states = forward(kernel, False, transfer, lambda a, b: a or b)
    return [
        finding("proxy", kernel, i, "no fence.proxy.async since a store to shared memory on some path")
        for i in kernel.instructions
        if states[i.index] and hands_over(i)
    ]


def check_tensor_memory(kernel: Kernel) -> list[Finding]:
    """All rules; a kernel that can't be followed is reported, not passed."""
    found = check_loaded_registers(kernel) + check_generic_stores(kernel)
    threads = TensorMemory(kernel)
    try:
        return found + threads.check()
    except NotFollowed as error:
        return [*found, *threads.found.values(), Finding("drain", kernel.name, 0, str(error))]
