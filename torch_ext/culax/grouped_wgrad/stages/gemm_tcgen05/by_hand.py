"""Loads without TMA by one warp: groups whose rows are not 16-byte aligned, and scale atoms with unused bytes."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from culax.grouped_wgrad.stages.gemm.unaligned import fill
from culax.grouped_wgrad.stages.gemm_tcgen05.config import ATOM_BYTES, LANES, TILE_BYTES, WARP, Config, scale_strides


def group_bytes(config: Config, plain: cute.Tensor, begin: Int32, length: Int32) -> cute.Tensor:
    """One group's operand (X, bytes of tokens) in memory."""
    first, last = begin // config.packed, (begin + length) // config.packed
    if config.ragged:
        start = plain.iterator + Int64(first) * plain.shape[0]
        return cute.make_tensor(
            start, cute.make_layout((plain.shape[0], last - first), stride=(Int64(last - first), 1))
        )
    return cute.domain_offset((0, first), plain)


@cute.jit
def fill_operands(config: cutlass.Constexpr[Config], gmem, smem, tile, k: Int32, stage: Int32):
    """Stage `stage` = k tile `k` of A and B; zeros for rows past X and tokens past the group, which are not read."""
    _, row, column, begin, length, _ = tile
    size = length // config.packed
    b_row = column
    if cutlass.const_expr(config.pair):
        b_row = column * config.cluster_m + cute.arch.block_idx_in_cluster()
    for i in cutlass.range_constexpr(2):
        group = group_bytes(config, gmem.plain[i], begin, length)
        target = smem.loads[i][None, None, stage]
        first = (b_row if i else row) * cute.size(target, mode=[0])
        fill(target, group, first, k * TILE_BYTES, size, WARP)


@cute.jit
def fill_scales(config: cutlass.Constexpr[Config], gmem, smem, tile, k: Int32, stage: Int32):
    """Scales of stage `stage` = k tile `k`: bytes of blocks past the group become zeros, whatever they are in memory.

    A product with such a byte has a zero operand, but 0 times a NaN scale is NaN. Four blocks of a row share a word.
    """
    expert, row, column, _, length, _ = tile
    blocks = (length + config.block - 1) // config.block
    atoms = (blocks + 3) // 4
    for i in cutlass.range_constexpr(2):
        base = gmem.scales[i] + gmem.ws[expert, config.slot_bases, i]
        words = cute.make_ptr(Uint32, base.toint(), cute.AddressSpace.gmem, assumed_align=4)
        target = cute.recast_tensor(smem.loads[2 + i][None, None, None, stage], Uint32)
        last = (gmem.plain[i].shape[0] + LANES - 1) // LANES - 1
        rows: cutlass.Constexpr = config.scale_bytes[i] // (ATOM_BYTES * config.atoms_k)
        first = (column if i else row) * rows
        for a in cutlass.range_constexpr(rows * config.atoms_k):
            atom_row = cutlass.min(first + a // config.atoms_k, last)
            atom = k * config.atoms_k + a % config.atoms_k
            valid = cutlass.min(cutlass.max(blocks - 4 * atom, 0), 4)
            mask = Uint32(0xFFFFFFFF)
            if valid < 4:
                mask = (Uint32(1) << Uint32(8 * valid)) - 1
            _, step, row_step = scale_strides(Int64(atoms), 4)
            start = atom_row * row_step + cutlass.min(atom, atoms - 1) * step
            for j in cutlass.range_constexpr(LANES // WARP):
                word = cute.arch.lane_idx() + j * WARP
                value = cute.make_tensor(words + (start + word), cute.make_layout(1))[0]
                target[word, a % config.atoms_k, a // config.atoms_k] = value & mask


def publish() -> None:
    """Make what this warp wrote to shared memory visible to the tensor cores, before it arrives for the stage."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
