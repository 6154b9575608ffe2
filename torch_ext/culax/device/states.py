"""States [K, V] that a CTA keeps in registers while it walks over a sequence's chunks, a slice of value columns at a
time."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device import warp_tiles
from culax.device.sizes import BLOCK, CHUNK


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


@dataclass(frozen=True)
class Share:
    """A warp's share of a state [K, columns]: rows 16 i .. and `width` columns, width j .. ; of [64, columns]: 16 x
    16."""

    row: cutlass.Int32
    column: cutlass.Int32
    token: cutlass.Int32
    value: cutlass.Int32

    def of_state(self, state: cute.Tensor, width: int) -> cute.Tensor:
        """The share [16, width] of a tile [K, columns]."""
        return cute.local_tile(state, (BLOCK, width), (self.row, self.column))

    def of_rows(self, tile: cute.Tensor) -> cute.Tensor:
        """The share [16, 16] of a tile [64, columns]."""
        return cute.local_tile(tile, (BLOCK, BLOCK), (self.token, self.value))

    def tokens(self, tile: cute.Tensor) -> cute.Tensor:
        """The operand [16, n] of the share of [64, columns] in a tile [64, n]."""
        return cute.local_tile(tile, (BLOCK, tile.shape[1]), (self.token, 0))

    def values(self, tile: cute.Tensor) -> cute.Tensor:
        """The operand [16, n] of the share of [64, columns] in a tile [columns, n]."""
        return cute.local_tile(tile, (BLOCK, tile.shape[1]), (self.value, 0))

    def keys(self, tile: cute.Tensor) -> cute.Tensor:
        """The operand [16, n] of the share of the state in a tile [K, n]."""
        return cute.local_tile(tile, (BLOCK, tile.shape[1]), (self.row, 0))

    def state_values(self, tile: cute.Tensor, width: int) -> cute.Tensor:
        """The operand [width, n] of the share of the state in a tile [columns, n]."""
        return cute.local_tile(tile, (width, tile.shape[1]), (self.column, 0))


def share_of_warp(key_dim: int) -> Share:
    """The calling warp's share: states are dealt out by rows first, then by columns; [64, columns] likewise."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    down, tokens = key_dim // BLOCK, CHUNK // BLOCK
    return Share(warp % down, warp // down, warp % tokens, warp // tokens)


def _in_memory(states: cute.Tensor, place: Place, share: Share, sizes: tuple[int, int]) -> cute.Tensor:
    columns, width = sizes
    state = states[place.sequence, place.value_head, None, None]
    key_dim = state.shape[0]
    return warp_tiles.fragment_of(share.of_state(cute.local_tile(state, (key_dim, columns), (0, place.slice)), width))


@cute.jit
def load_state(states: cute.Tensor, place: Place, share: Share, sizes: cutlass.Constexpr) -> cute.Tensor:
    """The warp's share of a state in [N, HV, K, V] fp32 as a fragment; zeros where the tensor is empty.

    sizes: the columns of a CTA and of a warp.
    """
    state = warp_tiles.accumulator(BLOCK, sizes[1])
    if states.shape[0] > 0:
        cute.autovec_copy(_in_memory(states, place, share, sizes), state)
    return state


@cute.jit
def store_state(state: cute.Tensor, states: cute.Tensor, place: Place, share: Share, sizes: cutlass.Constexpr) -> None:
    """Write such a fragment, unless the tensor is empty."""
    if states.shape[0] > 0:
        cute.autovec_copy(state, _in_memory(states, place, share, sizes))


def slice_of(tape: cute.Tensor, index: cutlass.Int32, place: Place, columns: int) -> cute.Tensor:
    """A CTA's value columns [R, columns] of a chunk's entry in a tape [NT, HV, R, V]."""
    rows = tape.shape[2]
    return cute.local_tile(tape[index, place.value_head, None, None], (rows, columns), (0, place.slice))
