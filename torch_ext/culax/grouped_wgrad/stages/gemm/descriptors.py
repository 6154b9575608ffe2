"""Descriptors written on the device: where they live, and the kernel that writes them before each GEMM."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import TensorMapManager, TensorMapUpdateMode

from culax.grouped_wgrad.stages.gemm import layouts, schedule
from culax.grouped_wgrad.stages.gemm.config import DESCRIPTOR_BYTES, Config

POINTERS = 64
"""Output addresses one launch of the writer carries as kernel parameters."""


MANAGER = TensorMapManager(TensorMapUpdateMode.GMEM, DESCRIPTOR_BYTES)


def descriptor(ws: cute.Tensor, expert: Int32, slot: int, space: cute.AddressSpace = cute.AddressSpace.generic):
    """Pointer to descriptor `slot` of an expert in ws (E, slots, 16) int64: generic for TMA, global for its writer."""
    return MANAGER.get_tensormap_ptr(ws[expert, slot, None].iterator, space)


@dataclass(frozen=True)
class Sources:
    """What descriptors are written from: TMA atoms (None where parameter descriptors serve) and plain tensors."""

    tma_a: cute.CopyAtom | None
    tma_b: cute.CopyAtom | None
    tma_c: cute.CopyAtom | None
    a: cute.Tensor
    b: cute.Tensor
    c_stride: Int64


@cute.jit
def write(atom: cute.CopyAtom, tensor: cute.Tensor, ws: cute.Tensor, expert: Int32, slot: cutlass.Constexpr[int]):
    """One warp: the atom's descriptor with this tensor's address, extents and strides.

    copy_tensormap copies the 64 bytes that hold the fields; the rest of a tiled descriptor is zero.
    """
    target = descriptor(ws, expert, slot, cute.AddressSpace.gmem)
    lane = cute.arch.lane_idx()
    if lane < DESCRIPTOR_BYTES // 8:
        ws[expert, slot, lane] = Int64(0)
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cpasync.copy_tensormap(atom, target)
    cute.arch.sync_warp()
    cpasync.update_tma_descriptor(atom, tensor, target)
    cute.arch.sync_warp()


@cute.jit
def operand(config: cutlass.Constexpr[Config], tensor: cute.Tensor, begin: Int32, end: Int32) -> cute.Tensor:
    """A or B (X, T) with tokens contiguous, as one group may read it.

    2d: the whole tensor with its extent cut at the group's end, so that the 16-byte aligned base stays. An extent of
    zero would wrap; groups that end at token 0 are empty and never loaded.
    ragged: the group's own block. Its row stride must be a multiple of 16 bytes: other lengths are never read
    through the descriptor, so any legal stride will do for them.
    """
    rows = tensor.shape[0]
    result = cute.make_tensor(tensor.iterator, cute.make_layout((rows, cutlass.max(end, 1)), stride=tensor.stride))
    if cutlass.const_expr(config.ragged):
        pitch = Int64(cutlass.max((end - begin) // config.vector * config.vector, config.vector))
        start = tensor.iterator + Int64(begin) * rows
        shape = (rows, cutlass.max(end - begin, 1))
        result = cute.make_tensor(start.align(16), cute.make_layout(shape, stride=(pitch, 1)))
    return result


@cute.kernel
def write_descriptors(
    config: cutlass.Constexpr[Config],
    sources: Sources,
    offs: cute.Tensor,
    space: schedule.Space,
    shape: tuple[Int32, Int32],
    ws: cute.Tensor,
    first: Int32,
    pointers: tuple[Int64, ...],
):
    """Block i, one warp: every descriptor of expert first + i.

    The output addresses are kernel parameters: a captured graph keeps them as it keeps any launch argument.
    """
    expert = first + cute.arch.block_idx()[0]
    begin, end = Int32(0), Int32(0)
    for e in cutlass.range(cute.arch.lane_idx(), expert + 1, 32, unroll=1):
        value = schedule.clamped(offs, e, space.tokens)
        end = cutlass.max(end, value)
        if e < expert:
            begin = cutlass.max(begin, value)
    begin = cute.arch.warp_redux_sync(begin, "max")
    end = cute.arch.warp_redux_sync(end, "max")
    begin, end = begin // config.packed, end // config.packed
    if cutlass.const_expr(config.a_written):
        write(sources.tma_a, operand(config, sources.a, begin, end), ws, expert, 0)
    if cutlass.const_expr(config.b_written):
        write(sources.tma_b, operand(config, sources.b, begin, end), ws, expert, config.slot_b)
    if cutlass.const_expr(config.discrete):
        address = pointers[0]
        for i in cutlass.range_constexpr(1, len(pointers)):
            if cute.arch.block_idx()[0] == i:
                address = pointers[i]
        base = cute.make_ptr(layouts.DTYPES[config.out_dtype], address, cute.AddressSpace.gmem, assumed_align=16)
        out = cute.make_tensor(base, cute.make_layout(shape, stride=(sources.c_stride, 1)))
        write(sources.tma_c, out, ws, expert, config.slot_c)
    cpasync.fence_tma_desc_release()
