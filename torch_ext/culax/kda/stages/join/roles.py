"""What the threads of the join kernel do."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.kda.stages.join.layouts import Smem


@dataclass(frozen=True)
class Gmem:
    """One direction, fp32: the given states [N, HV, K, V] (empty if absent); the matrices [N * segments, HV, K, K],
    along whose second to last dimension the sum runs; the states next to the segments [N * segments, HV, K, V]."""

    given: cute.Tensor
    matrices: cute.Tensor
    states: cute.Tensor


@dataclass(frozen=True)
class Place:
    """A sequence, a value head, the block of value columns; the row of the sequence's first state and the step from a
    state's row to the next one's, 1 or -1; the number of segments."""

    sequence: cutlass.Int32
    value_head: cutlass.Int32
    block: cutlass.Int32
    first: cutlass.Int32
    step: cutlass.Int32
    segments: cutlass.Int32


def _mine(config: cutlass.Constexpr, states: cute.Tensor, row: cutlass.Int32, place: Place) -> cute.Tensor:
    """This thread's elements of the CTA's columns of an entry of states: a few of one of its rows."""
    across = config.columns // config.width
    thread = cute.arch.thread_idx()[0]
    state = states[row, place.value_head, thread // across, None]
    return cute.local_tile(state, (config.width,), (place.block * across + thread % across,))


def _mine_of(config: cutlass.Constexpr, tile: cute.Tensor) -> cute.Tensor:
    """The same elements of a tile [K, columns] in shared memory."""
    across = config.columns // config.width
    thread = cute.arch.thread_idx()[0]
    return cute.local_tile(tile[thread // across, None], (config.width,), (thread % across,))


@cute.jit
def _load_factors(factors: cute.Tensor, matrix: cute.Tensor) -> None:
    """Ask for factors [terms, rows]: of a warp's share of the terms, in each lane those of its rows."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    terms, rows = factors.shape
    for term in cutlass.range_constexpr(terms):
        for row in cutlass.range_constexpr(rows):
            factors[term, row] = matrix[warp * terms + term, row * 32 + lane]


@cute.jit
def _sum_part(config: cutlass.Constexpr, smem: Smem, factors: cute.Tensor) -> None:
    """A warp's part of the product of a transposed matrix [K, K] and the state.

    What is read of the state serves all of a lane's rows: shared memory hands a warp 4 bytes a lane in a cycle.
    """
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    terms, rows = factors.shape
    totals = cute.make_rmem_tensor(
        cute.make_layout((rows, config.columns), stride=(config.columns, 1)), cutlass.Float32
    )
    totals.fill(0.0)
    values = cute.make_rmem_tensor((config.columns,), cutlass.Float32)
    for term in cutlass.range_constexpr(terms):
        cute.autovec_copy(smem.state[warp * terms + term, None], values)
        for row in cutlass.range_constexpr(rows):
            for c in cutlass.range_constexpr(config.columns):
                totals[row, c] = totals[row, c] + factors[term, row] * values[c]
    for row in cutlass.range_constexpr(rows):
        cute.autovec_copy(totals[row, None], smem.parts[warp, row * 32 + lane, None])


@cute.jit
def join(config: cutlass.Constexpr, gmem: Gmem, smem: Smem, place: Place) -> None:
    """Columns of the states next to all segments of a sequence and head, one after the other.

    The first is given, the second is there; the next ones are, in place, the sum of what is there and the transition of
    the segment in between times the one before, in fp32 and in one order. The factors of the next product are on their
    way while one is computed.
    """
    past = place.segments - 1
    shape = config.key_dim // config.groups, config.key_dim // 32
    factors, ahead = (cute.make_rmem_tensor(shape, cutlass.Float32) for _ in range(2))
    values = cute.make_rmem_tensor((config.width,), cutlass.Float32)
    values.fill(0.0)
    if past > 1:
        _load_factors(ahead, gmem.matrices[place.first + place.step, place.value_head, None, None])
    if gmem.given.shape[0] > 0:
        cute.autovec_copy(_mine(config, gmem.given, place.sequence, place), values)
    cute.autovec_copy(values, _mine(config, gmem.states, place.first, place))
    cute.autovec_copy(_mine(config, gmem.states, place.first + place.step, place), values)
    kept = _mine_of(config, smem.state)
    cute.autovec_copy(values, kept)
    cute.arch.sync_threads()
    for segment in cutlass.range(1, past, unroll=1):
        after = place.first + (segment + 1) * place.step
        there = _mine(config, gmem.states, after, place)
        cute.autovec_copy(there, values)
        factors.store(ahead.load())
        if segment + 1 < past:
            _load_factors(ahead, gmem.matrices[after, place.value_head, None, None])
        _sum_part(config, smem, factors)
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(config.groups):
            values.store(values.load() + _mine_of(config, smem.parts[warp, None, None]).load())
        cute.autovec_copy(values, there)
        cute.autovec_copy(values, kept)
        cute.arch.sync_threads()
