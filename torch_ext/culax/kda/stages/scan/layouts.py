"""Shared memory of the scan kernel."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device.bulk import allocate_barriers
from culax.device.sizes import CHUNK
from culax.device.warp_tiles import allocate_tiles
from culax.kda.stages.scan.config import ScanConfig


@dataclass(frozen=True)
class Smem:
    """Staged inputs (last mode: stage): -W and kg [64, K, S], U [64, columns, S], decay [K, S], and a barrier a stage;
    operands: state [K, columns], v_new [64, columns]."""

    minus_w: cute.Tensor
    kg: cute.Tensor
    u: cute.Tensor
    arrived: cute.Pointer
    decay: cute.Tensor
    state: cute.Tensor
    v_new: cute.Tensor


def allocate(config: ScanConfig) -> Smem:
    """Take the tiles from the CTA's shared memory."""
    memory = cutlass.memory.SmemAllocator()
    stages = config.stages
    decay = cute.make_layout((config.key_dim, stages))
    return Smem(
        minus_w=allocate_tiles(memory, CHUNK, config.key_dim, stages),
        kg=allocate_tiles(memory, CHUNK, config.key_dim, stages),
        u=allocate_tiles(memory, CHUNK, config.columns, stages),
        arrived=allocate_barriers(memory, stages),
        decay=memory.allocate_tensor(cutlass.Float32, decay, 16),
        state=allocate_tiles(memory, config.key_dim, config.columns, 2),
        v_new=allocate_tiles(memory, CHUNK, config.columns),
    )
