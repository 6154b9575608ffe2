"""What a rule reports."""

from __future__ import annotations

from dataclasses import dataclass

from tests.ptx.text import Instruction, Kernel


@dataclass(frozen=True)
class Finding:
    """A rule that doesn't hold: which, in which kernel, at which line, and why."""

    rule: str
    kernel: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: line {self.line} of {self.kernel[:60]}: {self.message}"


def finding(rule: str, kernel: Kernel, instruction: Instruction, why: str) -> Finding:
    """A finding at an instruction."""
    return Finding(rule, kernel.name, instruction.line, f"{instruction}: {why}")
