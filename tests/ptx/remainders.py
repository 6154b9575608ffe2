"""Recognise remainders by a constant, which the compiler spells as multiplications and shifts.

A stage index that jumps by an unknown number of stages is such a remainder: unknown, but one of few values.
"""

from __future__ import annotations

import random

from tests.ptx import evaluate
from tests.ptx.flow import written
from tests.ptx.text import REGISTER, Instruction, Kernel
from tests.ptx.values import Values

_LARGEST = 64
_MOST_STEPS = 12
_TRIALS = (*range(512), *(random.Random(0).randrange(1 << 31) for _ in range(512)), (1 << 31) - 1)


def moduli(kernel: Kernel, values: Values) -> dict[int, int]:
    """For each instruction that computes x mod c of a register x: its index and c.

    Found by trial: what is subtracted from x must depend on x and constants alone, and the difference must be x mod c
    for a thousand non-negative values of x. Dividends are taken to be non-negative, as counts are.
    """
    found = {}
    for instruction in kernel.instructions:
        if instruction.predicate:
            continue
        modulus = None
        if instruction.op.startswith("rem."):
            modulus = evaluate.constant(instruction.args[2])
        elif instruction.op in ("sub.s32", "sub.u32") and REGISTER.fullmatch(instruction.args[1]):
            modulus = _by_trial(instruction, values)
        if modulus is not None and 1 < modulus <= _LARGEST:
            found[instruction.index] = modulus
    return found


def _by_trial(difference: Instruction, values: Values) -> int | None:
    _, dividend, subtrahend = difference.args
    steps = _steps(subtrahend, dividend, difference.index, values)
    if not steps:
        return None
    outcomes = []
    for trial in _TRIALS:
        known: dict[str, evaluate.Value] = {dividend: trial}
        for step in (*steps, difference):
            operands = tuple(known.get(text, evaluate.constant(text)) for text in step.args[1:])
            known[step.args[0]] = evaluate.result(step, operands)
        outcome = known[difference.args[0]]
        if not isinstance(outcome, int) or not 0 <= outcome < _LARGEST:
            return None
        outcomes.append(outcome)
    modulus = max(outcomes) + 1
    return modulus if all(outcome == trial % modulus for outcome, trial in zip(outcomes, _TRIALS)) else None


def _steps(register: str, dividend: str, use: int, values: Values) -> list[Instruction]:
    """Instructions that compute `register` from `dividend` and constants, in order; [] if there is more to it."""
    start = values.definitions(dividend, use)
    found: dict[int, Instruction] = {}
    todo = [(register, use)]
    while todo:
        name, index = todo.pop()
        definition = values.definition(name, index)
        if definition is None or definition.op.split(".")[0] not in evaluate.PURE or len(written(definition)) != 1:
            return []
        if definition.index in found:
            continue
        found[definition.index] = definition
        if len(found) > _MOST_STEPS:
            return []
        for text in definition.args[1:]:
            if text == dividend and values.definitions(text, definition.index) == start:
                continue
            if REGISTER.fullmatch(text):
                todo.append((text, definition.index))
            elif evaluate.constant(text) is None:
                return []
    return [found[index] for index in sorted(found)]
