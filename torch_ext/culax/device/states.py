"""States [K, V] that a CTA keeps in registers while it walks over a sequence's chunks, a slice of value columns at a
time."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device import chunks, warp_tiles


@dataclass(frozen=True)
class Place:
    """What a CTA works on: a sequence, a value head and a slice of value columns."""

    sequence: cutlass.Int32
    value_head: cutlass.Int32
    slice: cutlass.Int32


def place_of_cta(value_heads: cutlass.Int32, slices: int) -> Place:
    """CTA i of a grid of N * HV * slices; the slices of one state are neighbours, as they read the same tiles."""
    cta = cute.arch.block_idx()[0]
    row = cta // slices
    return Place(row // value_heads, row % value_heads, cta % slices)


def _warp_rows(states: cute.Tensor, place: Place, shape: tuple[int, int]) -> cute.Tensor:
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    state = states[place.sequence, place.value_head, None, None]
    return warp_tiles.fragment_of(cute.local_tile(state, shape, (warp, place.slice)))


@cute.jit
def load_state(states: cute.Tensor, place: Place, rows: cutlass.Constexpr, columns: cutlass.Constexpr) -> cute.Tensor:
    """The fragment [rows, columns] of the calling warp's rows of a state in [N, HV, K, V] fp32; zeros where the tensor
    is empty."""
    state = warp_tiles.accumulator(rows, columns)
    if states.shape[0] > 0:
        cute.autovec_copy(_warp_rows(states, place, (rows, columns)), state)
    return state


@cute.jit
def store_state(
    state: cute.Tensor, states: cute.Tensor, place: Place, rows: cutlass.Constexpr, columns: cutlass.Constexpr
) -> None:
    """Write such a fragment, unless the tensor is empty."""
    if states.shape[0] > 0:
        cute.autovec_copy(state, _warp_rows(states, place, (rows, columns)))


def store_slice(tile: cute.Tensor, tape: cute.Tensor, index: cutlass.Int32, place: Place, threads: int) -> None:
    """Copy a tile [R, columns] to its slice of a chunk's entry in a tape [NT, HV, R, V]."""
    rows, columns = tile.shape
    target = cute.local_tile(tape[index, place.value_head, None, None], (rows, columns), (0, place.slice))
    chunks.store_rows(tile, target, rows, threads)
