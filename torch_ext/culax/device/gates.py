"""Cumulated gates of a chunk, held by column owners.

Of the 2 K threads that share a chunk, the thread with warp w owns the pair of columns 64 c + 2 lane, + 1 in rows 16 I
.. 16 I + 15, where I, c = divmod(w, K / 64). Gates are in log2 units: G = cumsum(gate) log2(e), inclusive, within the
chunk.
"""

import cutlass
import cutlass.cute as cute

from culax.device.chunks import LOG2_E, select
from culax.device.sizes import BLOCK, CHUNK


def column_owner(key_dim: int) -> tuple[cutlass.Int32, cutlass.Int32]:
    """This thread's row block I and its pair of columns (an index of pairs)."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    groups = key_dim // 64
    return warp // groups, warp % groups * 32 + cute.arch.lane_idx()


def load_pair(
    rows: cute.Tensor, row: cutlass.Int32, pair: cutlass.Int32, valid: cutlass.Int32
) -> tuple[cutlass.Float32, cutlass.Float32]:
    """Two neighbouring elements of a row of a [64, D] view in fp32; zeros for a row past the valid ones, which is not
    read."""
    inside = row < valid
    source = cute.local_tile(rows, (1, 2), (cutlass.min(row, valid - 1), pair))
    values = cute.make_rmem_tensor((1, 2), rows.element_type)
    cute.autovec_copy(source, values)
    return tuple(select(inside, values[0, c].to(cutlass.Float32), 0.0) for c in range(2))


def cumulate(rows: cute.Tensor, sums: cute.Tensor, valid: cutlass.Int32, key_dim: int) -> cute.Tensor:
    """Inclusive sums [16, 2] of the owner's gates over the rows of its own block; `sums` [4, K] gets the blocks'
    totals.

    Rows past the valid ones add nothing, so that G stays at its last valid value there. A barrier must follow before
    `sums` is read.
    """
    block, pair = column_owner(key_dim)
    inside = cute.make_rmem_tensor((BLOCK, 2), cutlass.Float32)
    for r in range(BLOCK):
        values = load_pair(rows, block * BLOCK + r, pair, valid)
        for c in range(2):
            inside[r, c] = values[c] * LOG2_E + (inside[r - 1, c] if r else 0.0)
    total = cute.local_tile(sums, (1, 2), (block, pair))
    for c in range(2):
        total[0, c] = inside[BLOCK - 1, c]
    return inside


def before_and_last(inside: cute.Tensor, sums: cute.Tensor, key_dim: int) -> tuple[cute.Tensor, cute.Tensor]:
    """G before the first row of the owner's block, and G of the chunk's last row, [2] each."""
    block, pair = column_owner(key_dim)
    before = cute.make_rmem_tensor((2,), cutlass.Float32)
    last = cute.make_rmem_tensor((2,), cutlass.Float32)
    before.fill(0.0)
    last.fill(0.0)
    for other in range(CHUNK // BLOCK):
        total = cute.local_tile(sums, (1, 2), (other, pair))
        for c in range(2):
            before[c] = before[c] + select(block > other, total[0, c], 0.0)
            last[c] = last[c] + total[0, c]
    return before, last


def load_beta(column: cute.Tensor, target: cute.Tensor, valid: cutlass.Int32) -> None:
    """A chunk's beta [64] (fp32) to shared memory, zeros past the valid rows; a barrier must follow."""
    row = cute.arch.thread_idx()[0]
    _load_beta(column, target, valid, row)


@cute.jit
def _load_beta(column: cute.Tensor, target: cute.Tensor, valid: cutlass.Int32, row: cutlass.Int32) -> None:
    if row < CHUNK:
        value = cutlass.Float32(0.0)
        if row < valid:
            value = column[row]
        target[row] = value
