"""What the join kernel is compiled for, and its shared memory and threads as plain numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class JoinConfig:
    """Key and value dimension, 64 or 128 each."""

    key_dim: int
    value_dim: int

    @property
    def columns(self) -> int:
        """Value columns of a CTA."""
        return 8

    @property
    def groups(self) -> int:
        """Warps, each of which has a share of the terms of every sum over K."""
        return 8

    @property
    def threads(self) -> int:
        """Every lane of a warp has K / 32 rows."""
        return 32 * self.groups

    @property
    def width(self) -> int:
        """Columns of one row that a thread reads and writes."""
        return self.key_dim * self.columns // self.threads

    @property
    def smem_bytes(self) -> int:
        """A state and the groups' sums, fp32."""
        return 4 * (1 + self.groups) * self.key_dim * self.columns
