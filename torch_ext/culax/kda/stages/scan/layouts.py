"""Shared memory of the scan kernel."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device.images import allocate_images
from culax.device.results import Results, allocate_results
from culax.device.rings import Ring, allocate_ring
from culax.device.sizes import CHUNK
from culax.device.walks import SLICE
from culax.kda.stages.scan.config import ScanConfig


@dataclass(frozen=True)
class Smem:
    """Images of a chunk a stage (last mode): -W and kg [64, K, S], U [64, 64, S]; decay [K, S] fp32; the ring's
    barriers, and what goes out."""

    minus_w: cute.Tensor
    kg: cute.Tensor
    u: cute.Tensor
    decay: cute.Tensor
    ring: Ring
    results: Results


def allocate(config: ScanConfig) -> Smem:
    """Take the tiles from the CTA's shared memory."""
    memory = cutlass.memory.SmemAllocator()
    stages = config.stages
    return Smem(
        minus_w=allocate_images(memory, CHUNK, config.key_dim, stages),
        kg=allocate_images(memory, CHUNK, config.key_dim, stages),
        u=allocate_images(memory, CHUNK, SLICE, stages),
        results=allocate_results(memory, config),
        decay=memory.allocate_tensor(cutlass.Float32, cute.make_layout((config.key_dim, stages)), 16),
        ring=allocate_ring(memory, stages),
    )
