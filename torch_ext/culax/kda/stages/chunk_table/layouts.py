"""Shared memory of the kernel that sums up the sequences' chunks."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.kda.stages.chunk_table.config import ChunkTableConfig


@dataclass(frozen=True)
class Smem:
    """Each warp's last value in a scan over the CTA, int32 [warps]: of the maxima, of the sums."""

    maxima: cute.Tensor
    sums: cute.Tensor


def allocate(config: ChunkTableConfig) -> Smem:
    """Take the vectors from the CTA's shared memory."""
    memory = cutlass.memory.SmemAllocator()
    layout = cute.make_layout((config.scan_threads // 32,))
    return Smem(*(memory.allocate_tensor(cutlass.Int32, layout, 16) for _ in range(2)))
