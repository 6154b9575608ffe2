"""Shared memory of the walks, and the TMA views of what the reverse one reads from the caller's tensors."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from culax.device.images import allocate_images, image_layout
from culax.device.results import Results, allocate_results
from culax.device.rings import Ring, allocate_ring
from culax.device.sizes import CHUNK
from culax.device.walks import SLICE, Walk
from culax.kda.stages.scans.config import ForwardConfig, ReverseConfig


@dataclass(frozen=True)
class Common:
    """Images of a chunk a stage (last mode): -W and kg [64, K, S]; decay [K, S] fp32; the ring's barriers, and what
    goes out."""

    minus_w: cute.Tensor
    kg: cute.Tensor
    decay: cute.Tensor
    ring: Ring
    results: Results


@dataclass(frozen=True)
class Forward(Common):
    """And U [64, 64, S]."""

    u: cute.Tensor


@dataclass(frozen=True)
class Reverse(Common):
    """And qg [64, K, S], Aqk and do [64, 64, S]."""

    qg: cute.Tensor
    aqk: cute.Tensor
    do: cute.Tensor


def _allocate(memory: cutlass.memory.SmemAllocator, config: Walk, widths: dict[str, int]) -> dict:
    """Images of these widths, and what both walks have."""
    stages = config.stages
    widths = {"minus_w": config.key_dim, "kg": config.key_dim} | widths
    tiles = {name: allocate_images(memory, CHUNK, width, stages) for name, width in widths.items()}
    results = allocate_results(memory, config)
    decay = memory.allocate_tensor(cutlass.Float32, cute.make_layout((config.key_dim, stages)), 16)
    return tiles | {"results": results, "decay": decay, "ring": allocate_ring(memory, stages)}


def allocate_forward(config: ForwardConfig) -> Forward:
    """Take the tiles from the CTA's shared memory."""
    return Forward(**_allocate(cutlass.memory.SmemAllocator(), config, {"u": SLICE}))


def allocate_reverse(config: ReverseConfig) -> Reverse:
    """Take the tiles from the CTA's shared memory."""
    widths = {"qg": config.key_dim, "aqk": CHUNK, "do": SLICE}
    return Reverse(**_allocate(cutlass.memory.SmemAllocator(), config, widths))


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
