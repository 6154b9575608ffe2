"""What the group sum kernel is compiled for, and its threads as plain numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupSumConfig:
    """Key dimension, 64 or 128."""

    key_dim: int

    @property
    def threads(self) -> int:
        """Each sums four neighbouring elements over a group's value heads."""
        return 256
