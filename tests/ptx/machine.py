"""Follow one thread through all the states its control flow can reach.

Stage counters, phases and barrier addresses of a warp-specialised kernel depend on constants alone, so a thread's
reachable (place, counters, phases) states are few, and following all of them is a proof, not a sample. Values that come
from memory or parameters are unknown: a branch on one goes both ways, and the two ways remember which they took. Loop
counters are exact up to ``LARGE_FROM`` and "large" beyond. The thread followed is the first of its warp, which is the
one that is elected. Waiting loops are taken to end.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from tests.ptx import evaluate
from tests.ptx.evaluate import LARGE, LARGE_FROM, Comparison, Unknown, Value
from tests.ptx.flow import written
from tests.ptx.remainders import moduli
from tests.ptx.slicing import END, Slice, slice_kernel
from tests.ptx.text import REGISTER, Instruction, Kernel
from tests.ptx.values import Values

SHARED_BASE = 1024  # where dynamic shared memory is taken to begin: its declared alignment
_STATIC_BASE = 0x39000
_MOST_STATES = 40_000
_MOST_VALUES = 12  # of one register at one place; a ring has fewer stages, a loop counter soon has more

Monitor = TypeVar("Monitor")
Facts = frozenset[tuple[Comparison, bool]]


class EndOfPath(Exception):
    """Raised by an event's handler: what follows on this path needn't be seen."""


class NotFollowed(Exception):
    """The thread has too many states, or does something that isn't understood."""


@dataclass(frozen=True)
class _State(Generic[Monitor]):
    index: int
    registers: tuple[tuple[str, Value], ...]
    facts: Facts
    monitor: Monitor


class Reader:
    """What an event's handler may ask: values of the event's operands."""

    def __init__(self, machine: Machine, registers: dict[str, Value]) -> None:
        self._machine, self._registers = machine, registers

    def operand(self, text: str) -> Value:
        """Value of an operand."""
        return self._machine.value(text, self._registers)

    def address(self, text: str) -> int | None:
        """Shared-memory address in ``[register+offset, ...]``, or None if it isn't known."""
        match = re.match(r"\[\s*([^,\]\s+]+)\s*(?:\+\s*(-?\w+))?", text)
        assert match is not None, text
        base = self.operand(match[1])
        if isinstance(base, bool) or not isinstance(base, int):
            return None
        return (base + int(match[2] or "0", 0)) % (1 << 32)


class Machine:
    """A kernel prepared for following threads with respect to some events."""

    def __init__(self, kernel: Kernel, events: dict[int, tuple[str, ...]]) -> None:
        """`events`: instruction indices, each with the operands that matter."""
        self.kernel = kernel
        self._events = events
        operands = [register for texts in events.values() for text in texts for register in REGISTER.findall(text)]
        opaque = frozenset(i.op.split(".")[0] for i in kernel.instructions) - evaluate.PURE
        self._slice: Slice = slice_kernel(kernel, events, operands, opaque)
        self._merges = frozenset(leader for leader in kernel.leaders if len(kernel.predecessors[leader]) != 1)
        self._next = self._next_stops()
        self._written = [written(instruction) for instruction in kernel.instructions]
        self._named: set[object] = set()  # unknowns that registers or facts mention
        self._moduli = moduli(kernel, Values(kernel))
        self._symbols: dict[str, int] = {}
        self._tid = 0
        self.rank = 0  # of the followed thread's block in its cluster
        self.kind = 0  # of its block: where it lies along the grid's second dimension
        self.most_values = _MOST_VALUES

    def _next_stops(self) -> list[int]:
        """For each instruction the next one that matters: an event, a definition, a branch, an end or a merge."""
        following = len(self.kernel.instructions)
        found = [following] * following
        for instruction in reversed(self.kernel.instructions):
            index = instruction.index
            found[index] = following
            ends = instruction.op in ("ret", "exit", "trap")
            if ends or instruction.is_branch or index in self._slice.instructions or index in self._merges:
                following = index
        return found

    def value(self, text: str, registers: dict[str, Value]) -> Value:
        """Value of an operand, given the registers'."""
        if text.startswith("%"):
            if text in ("%tid.x", "%tid"):
                return self._tid
            if text == "%laneid":
                return self._tid % 32
            if text == "%warpid":
                return self._tid // 32
            if text in ("%tid.y", "%tid.z"):
                return 0
            if text == "%cluster_ctarank":
                return self.rank
            if text == "%ctaid.y":
                return self.kind
            return registers.get(text)
        if (number := evaluate.constant(text)) is not None:
            return number
        if "shmem" in text and re.fullmatch(r"[$\w]+", text):
            return SHARED_BASE
        if re.fullmatch(r"[$A-Za-z_]\w*", text) and "param" not in text:
            return self._symbols.setdefault(text, _STATIC_BASE + 1024 * len(self._symbols))
        return None

    def follow(
        self,
        tid: int,
        monitor: Monitor,
        handle: Callable[[Instruction, Reader, Monitor], Monitor],
    ) -> int:
        """Follow thread `tid`; `handle` is called at each event in each state and returns the next monitor.

        Monitors must be hashable. A handler may raise EndOfPath. Returns the number of states.

        Raises:
            NotFollowed: there are more than 40,000 states.
        """
        self._tid = tid
        seen: set[_State[Monitor]] = set()
        values_at: dict[tuple[int, str], set[Value]] = {}
        todo = [_State(0, (), frozenset(), monitor)]
        while todo:
            state = self._settled(todo.pop(), values_at)
            if state in seen:
                continue
            seen.add(state)
            if len(seen) > _MOST_STATES:
                raise NotFollowed(f"thread {tid} has more than {_MOST_STATES} states")
            with contextlib.suppress(EndOfPath):
                todo.extend(self._run_block(state, handle))
        return len(seen)

    def reached(self, tid: int) -> frozenset[int]:
        """Events that thread `tid` can reach, every loop-carried value taken as unknown: a superset, found quickly."""
        self._tid = tid
        found: set[int] = set()
        known: dict[int, dict[str, Value]] = {}
        todo: list[_State[None]] = [_State(0, (), frozenset(), None)]
        while todo:
            state = todo.pop()
            registers = dict(state.registers)
            if state.index in known:
                old = known[state.index]
                registers = {name: value for name, value in old.items() if registers.get(name) == value}
                if registers == old:
                    continue
            known[state.index] = registers
            state = replace(state, registers=tuple(registers.items()), facts=frozenset())
            todo.extend(self._run_block(state, lambda instruction, read, monitor: found.add(instruction.index)))
        return frozenset(found)

    def _settled(self, state: _State[Monitor], values_at: dict[tuple[int, str], set[Value]]) -> _State[Monitor]:
        """`state` at a block's start with dead registers dropped and counters that ran far made large."""
        live = self._slice.live.get(state.index, self._slice.registers)
        registers = []
        for name, value in state.registers:
            if name not in live or value is None:
                continue
            if isinstance(value, int) and not isinstance(value, bool) and LARGE_FROM <= value < 1 << 31:
                known = values_at.setdefault((state.index, name), set())
                if value not in known and len(known) >= self.most_values:
                    value = LARGE
                else:
                    known.add(value)
            registers.append((name, value))
        alive = {value for _, value in registers}
        mentioned = {side for value in alive if isinstance(value, Comparison) for side in (value.left, value.right)}
        facts = frozenset(
            (comparison, truth)
            for comparison, truth in state.facts
            if all(
                not isinstance(side, Unknown) or side in alive | mentioned
                for side in (comparison.left, comparison.right)
            )
        )
        return replace(state, registers=tuple(sorted(registers)), facts=facts)

    def _run_block(
        self, state: _State[Monitor], handle: Callable[[Instruction, Reader, Monitor], Monitor]
    ) -> list[_State[Monitor]]:
        registers, facts, monitor = dict(state.registers), dict(state.facts), state.monitor
        comparisons = [*facts, *(value for value in registers.values() if isinstance(value, Comparison))]
        self._named = {*registers.values(), *(side for c in comparisons for side in (c.left, c.right))}
        index = state.index
        while True:
            instruction = self.kernel.instructions[index]
            if instruction.is_branch:
                return self._branch(instruction, registers, facts, monitor)
            if instruction.ends_thread:
                if index in self._events:
                    handle(instruction, Reader(self, registers), monitor)
                return []
            guard = self._guard(instruction, registers, facts)
            if guard is not False:
                if index in self._events:
                    monitor = handle(instruction, Reader(self, registers), monitor)
                if index in self._slice.instructions:
                    self._define(instruction, guard is True, registers, facts)
                    if index in self._moduli and not isinstance(registers.get(instruction.args[0]), int):
                        return self._each_remainder(instruction, registers, facts, monitor)
            if instruction.op in ("ret", "exit") and guard is True:
                return []
            index = self._next[index]
            if index >= len(self.kernel.instructions):
                return []
            if index in self._merges:
                return [_State(index, tuple(registers.items()), frozenset(facts.items()), monitor)]

    def _each_remainder(
        self, instruction: Instruction, registers: dict[str, Value], facts: dict[Comparison, bool], monitor: Monitor
    ) -> list[_State[Monitor]]:
        """One state for each value an unknown remainder can have."""
        return [
            _State(
                instruction.index + 1,
                tuple({**registers, instruction.args[0]: remainder}.items()),
                frozenset(facts.items()),
                monitor,
            )
            for remainder in range(self._moduli[instruction.index])
        ]

    def _guard(
        self, instruction: Instruction, registers: dict[str, Value], facts: dict[Comparison, bool]
    ) -> bool | Comparison | None:
        """Whether the instruction executes: True, False, or not known (a comparison, or None)."""
        if not instruction.predicate:
            return True
        value = registers.get(instruction.predicate)
        if isinstance(value, Comparison) and value.positive in facts:
            value = facts[value.positive] != value.negated
        if isinstance(value, bool):
            return value != instruction.negated
        if isinstance(value, Comparison):
            return value.inverted() if instruction.negated else value
        return None

    def _branch(
        self, instruction: Instruction, registers: dict[str, Value], facts: dict[Comparison, bool], monitor: Monitor
    ) -> list[_State[Monitor]]:
        index = instruction.index
        if index in self._slice.joins:
            join = self._slice.joins[index]
            return [] if join == END else [_State(join, tuple(registers.items()), frozenset(facts.items()), monitor)]
        target = self.kernel.successors[index][0]
        guard = self._guard(instruction, registers, facts)
        if isinstance(guard, bool):
            following = target if guard else index + 1
            return [_State(following, tuple(registers.items()), frozenset(facts.items()), monitor)]
        states = []
        for taken in (True, False):
            new_registers, new_facts = dict(registers), dict(facts)
            new_registers[instruction.predicate] = taken != instruction.negated
            if isinstance(guard, Comparison) and _worth_keeping(guard, taken != guard.negated):
                new_facts[guard.positive] = taken != guard.negated
            following = target if taken else index + 1
            states.append(_State(following, tuple(new_registers.items()), frozenset(new_facts.items()), monitor))
        return states

    def _define(
        self, instruction: Instruction, certain: bool, registers: dict[str, Value], facts: dict[Comparison, bool]
    ) -> None:
        """Execute a definition of tracked registers."""
        names = [name for name in self._written[instruction.index] if name in self._slice.registers]
        if not names:
            return
        fresh = Unknown(instruction.index)
        values = self._results(instruction, registers, facts)
        if fresh in self._named:  # the name of what this instruction gave last time now means something else
            for name, value in list(registers.items()):
                if value == fresh or (isinstance(value, Comparison) and value.mentions(fresh)):
                    registers[name] = None
            for comparison in [comparison for comparison in facts if comparison.mentions(fresh)]:
                del facts[comparison]
        for name in names:
            value = values.get(name)
            if isinstance(value, Unknown) and value == fresh:
                value = None
            if isinstance(value, Comparison) and value.mentions(fresh):
                value = None
            if not certain and registers.get(name) != value:
                value = None
            if value is None and certain and len(names) == 1:
                value = fresh
                self._named.add(fresh)
            registers[name] = value

    def _results(
        self, instruction: Instruction, registers: dict[str, Value], facts: dict[Comparison, bool]
    ) -> dict[str, Value]:
        op = instruction.op.split(".")[0]
        if op not in evaluate.PURE:
            return {}
        if op == "elect":  # the followed thread is its warp's first, which is the one elected
            return dict.fromkeys(written(instruction)[1:], True)
        first, *others = instruction.args
        operands = tuple(self._fact(self.value(text, registers), facts) for text in others)
        if op == "setp":
            value = self._fact(evaluate.compare(instruction, *operands[:2]), facts)
            return {first: value}
        if op == "mov" and first.startswith("{"):
            whole, parts = operands[0], written(instruction)
            bits = evaluate.width(instruction.op) // len(parts)
            if not isinstance(whole, int):
                return {}
            return {name: (whole >> (bits * i)) & ((1 << bits) - 1) for i, name in enumerate(parts)}
        if op == "mov" and others[0].startswith("{"):
            names = REGISTER.findall(others[0])
            bits = evaluate.width(instruction.op) // len(names)
            whole = 0
            for i, name in enumerate(names):
                part = registers.get(name)
                if not isinstance(part, int):
                    return {}
                whole |= part << (bits * i)
            return {first: whole}
        return {first: evaluate.result(instruction, operands)}

    @staticmethod
    def _fact(value: Value, facts: dict[Comparison, bool]) -> Value:
        if isinstance(value, Comparison) and value.positive in facts:
            return facts[value.positive] != value.negated
        return value


def _worth_keeping(comparison: Comparison, truth: bool) -> bool:
    """Whether later branches could repeat it: that a loop's bound isn't this trip's counter never recurs."""
    sides = (comparison.left, comparison.right)
    return truth or not any(isinstance(side, int) and side > 1 for side in sides)


def warp_leaders(kernel: Kernel) -> range:
    """The first thread of each warp."""
    return range(0, kernel.threads, 32)
