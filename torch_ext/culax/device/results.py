"""What a walk over chunks leaves behind: the states and rows [64, 64] of each chunk, on their way to their tapes.

The consumer warpgroup writes a tile in shared memory, its first thread starts one bulk copy of it, and the tile is
written again when that copy has read it. The two kinds of tiles take turns, state, rows, state, rows, each sent from
behind a barrier of the warpgroup, before which the first thread makes sure that the tile to be written next is free:
with b buffers of each kind, all copies but the newest 2 b - 2 have read theirs.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from culax.device import bulk, images, states
from culax.device.sizes import CHUNK
from culax.device.walks import SLICE, WARPGROUP, Walk

SENDING = 1
"""Named barrier of the consumer warpgroup."""


@dataclass(frozen=True)
class Results:
    """States [K, 64, buffers] and rows [64, 64, buffers] in bf16."""

    states: cute.Tensor
    rows: cute.Tensor


def allocate_results(memory: cutlass.memory.SmemAllocator, walk: Walk) -> Results:
    """Take the tiles from the CTA's shared memory."""
    return Results(*(images.allocate_images(memory, rows, SLICE, walk.results) for rows in (walk.key_dim, CHUNK)))


def write(operand: cute.Tensor, tiles: cute.Tensor, buffer: cutlass.Int32) -> None:
    """Write a rounded accumulator [64, n] to tile [n, 64] number `buffer`, transposed."""
    states.store_transposed(operand, images.transposed(tiles)[None, None, buffer])


def meet() -> None:
    """Wait for all threads of the warpgroup."""
    cute.arch.barrier(barrier_id=SENDING, number_of_threads=WARPGROUP)


@cute.jit
def send(
    tiles: cute.Tensor,
    buffer: cutlass.Int32,
    tape: cute.Tensor,
    index: cutlass.Int32,
    place: states.Place,
) -> None:
    """Send a tile that all threads have written to its chunk's entry in a tape; whole warpgroup, in turns."""
    tile = tiles[None, None, buffer]
    first = cute.arch.thread_idx()[0] == 0
    bulk.publish()
    if first:
        cute.arch.cp_async_bulk_wait_group(2 * cute.size(tiles, mode=[2]) - 2, read=True)
    meet()
    if first:
        atom = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), cutlass.BFloat16)
        entry = cute.local_tile(tape[index, place.value_head, None], (cute.size(tile),), (place.slice,))
        cute.copy(atom, images.flat(tile), entry)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def sent() -> None:
    """Wait until all tiles have been read, so that the CTA may end; whole warpgroup."""
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
