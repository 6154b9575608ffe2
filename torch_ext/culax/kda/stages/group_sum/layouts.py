"""Views of the group sum kernel; it uses no shared memory."""

import cutlass.cute as cute

from culax.kda.stages.group_sum.config import GroupSumConfig

VECTOR = 4
"""fp32 elements of one 16-byte access."""


def vectors_per_row(config: GroupSumConfig) -> int:
    """Threads that share a row of key columns."""
    return config.key_dim // VECTOR


def vector(row: cute.Tensor, index: int) -> cute.Tensor:
    """The `index`-th 4 elements of a row [K]."""
    return cute.local_tile(row, (VECTOR,), (index,))
