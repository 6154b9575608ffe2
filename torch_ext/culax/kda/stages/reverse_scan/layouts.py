"""Shared memory of the reverse scan kernel."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device.bulk import allocate_barriers
from culax.device.sizes import CHUNK
from culax.device.warp_tiles import allocate_tiles
from culax.kda.stages.reverse_scan.config import ReverseScanConfig


@dataclass(frozen=True)
class Smem:
    """Staged inputs (last mode: stage): qg, -W, kg [64, K, S], Aqk [64, 64, S], do [64, columns, S], decay [K, S];
    operands: dS [K, columns], dvn [64, columns]."""

    qg: cute.Tensor
    minus_w: cute.Tensor
    kg: cute.Tensor
    aqk: cute.Tensor
    do: cute.Tensor
    arrived: cute.Pointer
    decay: cute.Tensor
    state: cute.Tensor
    dvn: cute.Tensor


def allocate(config: ReverseScanConfig) -> Smem:
    """Take the tiles from the CTA's shared memory."""
    memory = cutlass.memory.SmemAllocator()
    stages = config.stages
    decay = cute.make_layout((config.key_dim, stages))
    return Smem(
        qg=allocate_tiles(memory, CHUNK, config.key_dim, stages),
        minus_w=allocate_tiles(memory, CHUNK, config.key_dim, stages),
        kg=allocate_tiles(memory, CHUNK, config.key_dim, stages),
        aqk=allocate_tiles(memory, CHUNK, CHUNK, stages),
        do=allocate_tiles(memory, CHUNK, config.columns, stages),
        arrived=allocate_barriers(memory, stages),
        decay=memory.allocate_tensor(cutlass.Float32, decay, 16),
        state=allocate_tiles(memory, config.key_dim, config.columns, 2),
        dvn=allocate_tiles(memory, CHUNK, config.columns),
    )
