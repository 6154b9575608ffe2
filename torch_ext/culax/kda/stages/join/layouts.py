"""Shared memory of the join kernel."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.kda.stages.join.config import JoinConfig


@dataclass(frozen=True)
class Smem:
    """fp32: the CTA's columns of a state [K, columns], the groups' parts of the next one [groups, K, columns]."""

    state: cute.Tensor
    parts: cute.Tensor


def allocate(config: JoinConfig) -> Smem:
    """Take the tiles from the CTA's shared memory."""
    memory = cutlass.memory.SmemAllocator()
    keys, columns, fp32 = config.key_dim, config.columns, cutlass.Float32
    parts = cute.make_layout((config.groups, keys, columns), stride=(keys * columns, columns, 1))
    return Smem(
        state=memory.allocate_tensor(fp32, cute.make_layout((keys, columns), stride=(columns, 1)), 16),
        parts=memory.allocate_tensor(fp32, parts, 16),
    )
