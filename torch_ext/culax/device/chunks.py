"""Chunks of 64 tokens: the chunk table, views of a chunk's rows, and copies of them to and from shared memory.

The chunk table is int32 [NT, 4] with one row (sequence, batch, first token, rows) for each chunk; rows is 0 in surplus
chunks. A chunk's rows past its last valid one belong to somebody else: they are neither read nor written, and arrive in
shared memory as zeros.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from culax.device.sizes import CHUNK

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Chunk:
    """One row of the chunk table, Int32 each."""

    sequence: cutlass.Int32
    batch: cutlass.Int32
    first: cutlass.Int32
    rows: cutlass.Int32


def read_chunk(table: cute.Tensor, index: cutlass.Int32) -> Chunk:
    """Row `index` of the chunk table."""
    return Chunk(*(table[index, field] for field in range(4)))


def chunk_rows(tensor: cute.Tensor, chunk: Chunk, head: cutlass.Int32) -> cute.Tensor:
    """View [64, D] of a chunk's rows in a tensor [B, T, heads, D] of any strides with a contiguous last dimension."""
    tokens = tensor[chunk.batch, None, head, None]
    begin = cute.domain_offset((chunk.first, 0), tokens)
    return cute.make_tensor(begin.iterator, cute.make_layout((CHUNK, tensor.shape[3]), stride=(tokens.stride[0], 1)))


def chunk_column(tensor: cute.Tensor, chunk: Chunk, head: cutlass.Int32) -> cute.Tensor:
    """View [64] of a chunk's entries in a tensor [B, T, heads]."""
    tokens = tensor[chunk.batch, None, head]
    begin = cute.domain_offset(chunk.first, tokens)
    return cute.make_tensor(begin.iterator, cute.make_layout((CHUNK,), stride=tokens.stride))


def select(condition: cutlass.Boolean, yes: cutlass.Float32, no: float | cutlass.Float32) -> cutlass.Float32:
    """`yes` where the condition holds, else `no`, as a select and not as a product: NaN times 0 is NaN."""
    return cutlass.Float32(cutlass.cutlass_dsl.select_(condition, cutlass.Float32(yes), cutlass.Float32(no)))


def select_int(condition: cutlass.Boolean, yes: int | cutlass.Int32, no: int | cutlass.Int32) -> cutlass.Int32:
    """`yes` where the condition holds, else `no`."""
    return cutlass.Int32(cutlass.cutlass_dsl.select_(condition, cutlass.Int32(yes), cutlass.Int32(no)))


def exp2(x: cutlass.Float32) -> cutlass.Float32:
    """2 to the power x, error within 2 ulp, 0 below the normal range."""
    return cute.math.exp2(x, fastmath=True)


def _row_copy(atom: cute.CopyAtom, threads: int, columns: int, vector: int) -> cute.TiledCopy:
    across = columns // vector
    order = cute.make_layout((threads // across, across), stride=(across, 1))
    return cute.make_tiled_copy_tv(atom, order, cute.make_layout((1, vector)))


def _row_parts(
    atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, threads: int
) -> tuple[cute.TiledCopy, cute.Tensor, cute.Tensor, cute.Tensor]:
    copy = _row_copy(atom, threads, source.shape[1], 128 // source.element_type.width)
    mine = copy.get_slice(cute.arch.thread_idx()[0])
    where = mine.partition_S(cute.make_identity_tensor(source.shape))
    return copy, mine.partition_S(source), mine.partition_D(target), where


def _async_atom(dtype: type[cutlass.Numeric]) -> cute.CopyAtom:
    return cute.make_copy_atom(cpasync.CopyG2SOp(), dtype, num_bits_per_copy=128)


@cute.jit
def load_rows(source: cute.Tensor, tile: cute.Tensor, rows: cutlass.Int32, threads: cutlass.Constexpr) -> None:
    """Start copying [R, D] bf16 rows from global memory to a tile, 16 bytes a thread; rows from `rows` on become zero.

    The copies join the calling thread's current cp.async group.
    """
    copy, source_part, tile_part, where = _row_parts(_async_atom(cutlass.BFloat16), source, tile, threads)
    for i in cutlass.range_constexpr(cute.size(tile_part, mode=[1])):
        if where[0, i, 0][0] < rows:
            cute.copy(copy, source_part[None, i, None], tile_part[None, i, None])
        else:
            tile_part[None, i, None].fill(0)
