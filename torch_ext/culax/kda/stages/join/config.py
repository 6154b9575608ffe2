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
        """Groups of threads that share a sum over K; a thread of a group has one row of the state."""
        return 4

    @property
    def threads(self) -> int:
        """Rows times groups."""
        return self.groups * self.key_dim

    @property
    def smem_bytes(self) -> int:
        """A state and the groups' sums, fp32."""
        return 4 * (1 + self.groups) * self.key_dim * self.columns
