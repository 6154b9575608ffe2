"""Work by columns: who owns which, access to them, and the cumulated gates of a chunk.

A thread owns `width` neighbouring key columns in the 16 rows of one block: the warp with index w has block I and
columns 32 width c .. of it, where I, c = divmod(w, K / (32 width)), and its lanes follow one another. Gates are in log2
units: G = cumsum(gate) log2(e), inclusive, within the chunk.
"""

import cutlass
import cutlass.cute as cute

from culax.device.chunks import LOG2_E, select
from culax.device.sizes import BLOCK, CHUNK


def column_owner(key_dim: int, width: int) -> tuple[cutlass.Int32, cutlass.Int32]:
    """This thread's block I and the place of its columns: they begin at width times place."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    groups = key_dim // (32 * width)
    return warp // groups, warp % groups * 32 + cute.arch.lane_idx()


def read_cells(tile: cute.Tensor, row: cutlass.Int32, place: cutlass.Int32, width: int) -> list[cutlass.Float32]:
    """The owner's elements of a row of a [64, K] tile, in fp32."""
    raw = cute.make_rmem_tensor((1, width), tile.element_type)
    cute.autovec_copy(cute.local_tile(tile, (1, width), (row, place)), raw)
    return [raw[0, c].to(cutlass.Float32) for c in range(width)]


def write_cells(tile: cute.Tensor, row: cutlass.Int32, place: cutlass.Int32, values: list[cutlass.Float32]) -> None:
    """Round and store the owner's elements of a row of a [64, K] tile."""
    rounded = cute.make_rmem_tensor((1, len(values)), tile.element_type)
    for c, value in enumerate(values):
        rounded[0, c] = value.to(tile.element_type)
    cute.autovec_copy(rounded, cute.local_tile(tile, (1, len(values)), (row, place)))


def load_gates(rows: cute.Tensor, valid: cutlass.Int32, width: int) -> cute.Tensor:
    """Start reading the owner's gates [16, width] in log2 units; a row past the valid ones is not read and is 0."""
    block, place = column_owner(rows.shape[1], width)
    gates = cute.make_rmem_tensor((BLOCK, width), cutlass.Float32)
    for r in range(BLOCK):
        row = block * BLOCK + r
        values = read_cells(rows, cutlass.min(row, valid - 1), place, width)
        for c in range(width):
            gates[r, c] = select(row < valid, values[c], 0.0) * LOG2_E
    return gates


def cumulate(gates: cute.Tensor, sums: cute.Tensor) -> cute.Tensor:
    """Inclusive sums [16, width] of the owner's gates over the rows of its own block; `sums` [4, K] gets the totals.

    G stays at its last valid value in the rows behind. A barrier must follow before `sums` is read.
    """
    width = gates.shape[1]
    inside = cute.make_rmem_tensor((BLOCK, width), cutlass.Float32)
    for r in range(BLOCK):
        for c in range(width):
            inside[r, c] = gates[r, c] + (inside[r - 1, c] if r else 0.0)
    block, place = column_owner(sums.shape[1], width)
    write_cells(sums, block, place, [inside[BLOCK - 1, c] for c in range(width)])
    return inside


def before_and_last(sums: cute.Tensor, width: int) -> tuple[cute.Tensor, cute.Tensor]:
    """G before the first row of the owner's block, and G of the chunk's last row, [width] each."""
    block, place = column_owner(sums.shape[1], width)
    before = cute.make_rmem_tensor((width,), cutlass.Float32)
    last = cute.make_rmem_tensor((width,), cutlass.Float32)
    before.fill(0.0)
    last.fill(0.0)
    for other in range(CHUNK // BLOCK):
        total = read_cells(sums, other, place, width)
        for c in range(width):
            before[c] = before[c] + select(block > other, total[c], 0.0)
            last[c] = last[c] + total[c]
    return before, last


@cute.jit
def load_beta(column: cute.Tensor, target: cute.Tensor, valid: cutlass.Int32) -> None:
    """A chunk's beta [64] to shared memory in fp32, zeros past the valid rows; a barrier must follow."""
    row = cute.arch.thread_idx()[0]
    if row < CHUNK:
        value = cutlass.Float32(0.0)
        if row < valid:
            value = cutlass.Float32(column[row])
        target[row] = value
