"""Shared memory of the reverse scan kernel, and the TMA views of what it reads from the caller's tensors."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from culax.device.images import allocate_images, image_layout
from culax.device.results import Results, allocate_results
from culax.device.rings import Ring, allocate_ring
from culax.device.sizes import CHUNK
from culax.device.walks import SLICE
from culax.kda.stages.reverse_scan.config import ReverseScanConfig


@dataclass(frozen=True)
class Smem:
    """Images of a chunk a stage (last mode): qg, -W, kg [64, K, S], Aqk and do [64, 64, S]; decay [K, S] fp32; the
    ring's barriers, and what goes out."""

    qg: cute.Tensor
    minus_w: cute.Tensor
    kg: cute.Tensor
    aqk: cute.Tensor
    do: cute.Tensor
    decay: cute.Tensor
    ring: Ring
    results: Results


def allocate(config: ReverseScanConfig) -> Smem:
    """Take the tiles from the CTA's shared memory."""
    memory = cutlass.memory.SmemAllocator()
    stages = config.stages
    return Smem(
        qg=allocate_images(memory, CHUNK, config.key_dim, stages),
        minus_w=allocate_images(memory, CHUNK, config.key_dim, stages),
        kg=allocate_images(memory, CHUNK, config.key_dim, stages),
        aqk=allocate_images(memory, CHUNK, CHUNK, stages),
        do=allocate_images(memory, CHUNK, SLICE, stages),
        results=allocate_results(memory, config),
        decay=memory.allocate_tensor(cutlass.Float32, cute.make_layout((config.key_dim, stages)), 16),
        ring=allocate_ring(memory, stages),
    )


def tile_loads(tensor: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
    """TMA loads of [64 tokens, 64 columns] from a tensor [B, T, heads, D] of any strides that are multiples of 16
    bytes -> (atom, coordinates [T, D, heads, B]). What lies outside the tensor arrives as zeros."""
    batch, tokens, heads, width = tensor.shape
    # A descriptor has no empty dimension; without tokens nothing is loaded.
    shape = (cutlass.max(tokens, 1), width, heads, batch)
    strides = tuple(tensor.stride[mode] for mode in (1, 3, 2, 0))
    view = cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=strides))
    layout = cute.slice_(image_layout(CHUNK, SLICE, 1), (None, None, 0))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, layout, (CHUNK, SLICE))
