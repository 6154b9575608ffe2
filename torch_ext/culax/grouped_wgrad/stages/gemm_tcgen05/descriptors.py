"""What is written on the device before each GEMM: an expert's descriptors, and where its scales lie."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from culax.grouped_wgrad.stages.gemm import schedule
from culax.grouped_wgrad.stages.gemm.config import MAX_EXPERTS
from culax.grouped_wgrad.stages.gemm.descriptors import operand, write
from culax.grouped_wgrad.stages.gemm.layouts import DTYPES
from culax.grouped_wgrad.stages.gemm_tcgen05 import config as facts
from culax.grouped_wgrad.stages.gemm_tcgen05 import layouts
from culax.grouped_wgrad.stages.gemm_tcgen05.config import Config


@dataclass(frozen=True)
class Operand:
    """One operand: its bytes (X, T / packed) uint8, its scale bytes, and the TMA atoms of both."""

    tma: cute.CopyAtom
    bytes: cute.Tensor
    tma_scale: cute.CopyAtom
    scale: cute.Pointer


@dataclass(frozen=True)
class Output:
    """What C's descriptors are written from: atom (None where one parameter descriptor serves), (M, N), row stride."""

    tma: cute.CopyAtom | None
    shape: tuple[Int32, Int32]
    stride: Int64


@cute.jit
def scale_base(
    config: cutlass.Constexpr[Config], rows: Int32, atoms_before: Int32, begin: Int32, concatenated: Int32
) -> Int64:
    """First scale byte of an expert. atoms_before: atoms along the tokens of all experts before it."""
    base = facts.padded_base(Int64(rows), atoms_before)
    if concatenated != 0:
        base = facts.concatenated_base(Int64(rows), begin, config.block)
    return base


@cute.kernel
def write_descriptors(
    config: cutlass.Constexpr[Config],
    operands: tuple[Operand, Operand],
    output: Output,
    offs: cute.Tensor,
    space: schedule.Space,
    concatenated: Int32,
    ws: cute.Tensor,
    first: Int32,
    pointers: tuple[Int64, ...],
):
    """Block i, one warp: every descriptor of expert first + i, and the bases of its scales.

    The output addresses are kernel parameters: a captured graph keeps them as it keeps any launch argument.
    """
    expert = first + cute.arch.block_idx()[0]
    s_offs = cutlass.utils.SmemAllocator().allocate_tensor(Int32, cute.make_layout(MAX_EXPERTS + 1), 16)
    schedule.write_offsets(offs, space.tokens, s_offs)
    cute.arch.sync_warp()
    s_atoms = cutlass.utils.SmemAllocator().allocate_tensor(Int32, cute.make_layout(MAX_EXPERTS), 16)
    schedule.write_scale_atoms(s_offs, offs.shape[0], config.block, s_atoms)
    cute.arch.sync_warp()
    begin, end = s_offs[expert], s_offs[expert + 1]
    per_atom: cutlass.Constexpr = 4 * config.block
    atoms = cutlass.max((end - begin + per_atom - 1) // per_atom, 1)
    for i in cutlass.range_constexpr(2):
        source = operands[i]
        rows = source.bytes.shape[0]
        group = operand(config, source.bytes, begin // config.packed, end // config.packed)
        write(source.tma, group, ws, expert, i)
        base = scale_base(config, rows, s_atoms[expert], begin, concatenated)
        words = cute.recast_ptr((source.scale + base).align(16), dtype=cutlass.Uint16)
        write(source.tma_scale, layouts.scale_tensor(words, rows, atoms), ws, expert, 2 + i)
        if cute.arch.lane_idx() == 0:
            ws[expert, config.slot_bases, i] = base
    if cutlass.const_expr(config.discrete):
        address = pointers[0]
        for i in cutlass.range_constexpr(1, len(pointers)):
            if cute.arch.block_idx()[0] == i:
                address = pointers[i]
        base = cute.make_ptr(DTYPES[config.out_dtype], address, cute.AddressSpace.gmem, assumed_align=16)
        out = cute.make_tensor(base, cute.make_layout(output.shape, stride=(output.stride, 1)))
        write(output.tma, out, ws, expert, config.slot_c)
    cpasync.fence_tma_desc_release()
