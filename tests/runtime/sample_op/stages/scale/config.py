"""Configuration of the scale kernel."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """threads a block, and a shift added at compile time."""

    threads: int = 128
    shift: int = 0
