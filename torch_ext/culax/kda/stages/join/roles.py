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


def _columns(config: cutlass.Constexpr, states: cute.Tensor, row: cutlass.Int32, place: Place) -> cute.Tensor:
    """The CTA's columns [K, columns] of an entry of states."""
    state = states[row, place.value_head, None, None]
    return cute.local_tile(state, (config.key_dim, config.columns), (0, place.block))


@cute.jit
def _sum_part(
    config: cutlass.Constexpr, smem: Smem, matrix: cute.Tensor, key: cutlass.Int32, group: cutlass.Int32
) -> None:
    """A group's part of row `key` of the product of a transposed matrix [K, K] and the state: K / groups terms."""
    count = config.key_dim // config.groups
    factors = cute.make_rmem_tensor((count,), cutlass.Float32)
    for j in cutlass.range_constexpr(count):
        factors[j] = matrix[group * count + j, key]
    total = cute.make_rmem_tensor((config.columns,), cutlass.Float32)
    total.fill(0.0)
    row = cute.make_rmem_tensor((config.columns,), cutlass.Float32)
    for j in cutlass.range_constexpr(count):
        cute.autovec_copy(smem.state[group * count + j, None], row)
        for c in cutlass.range_constexpr(config.columns):
            total[c] = total[c] + factors[j] * row[c]
    cute.autovec_copy(total, smem.parts[group, key, None])


@cute.jit
def join(config: cutlass.Constexpr, gmem: Gmem, smem: Smem, place: Place) -> None:
    """Columns of the states next to all segments of a sequence and head, one after the other.

    The first is given, the second is there; the next ones are, in place, the sum of what is there and the transition of
    the segment in between times the one before, in fp32 and in one order.
    """
    thread = cute.arch.thread_idx()[0]
    key, group = thread % config.key_dim, thread // config.key_dim
    values = cute.make_rmem_tensor((config.columns,), cutlass.Float32)
    if group == 0:
        values.fill(0.0)
        if gmem.given.shape[0] > 0:
            cute.autovec_copy(_columns(config, gmem.given, place.sequence, place)[key, None], values)
        cute.autovec_copy(values, _columns(config, gmem.states, place.first, place)[key, None])
        second = _columns(config, gmem.states, place.first + place.step, place)
        cute.autovec_copy(second[key, None], values)
        cute.autovec_copy(values, smem.state[key, None])
    cute.arch.sync_threads()
    for segment in cutlass.range(1, place.segments - 1, unroll=1):
        row = place.first + segment * place.step
        _sum_part(config, smem, gmem.matrices[row, place.value_head, None, None], key, group)
        cute.arch.sync_threads()
        if group == 0:
            there = _columns(config, gmem.states, row + place.step, place)[key, None]
            cute.autovec_copy(there, values)
            for other in cutlass.range_constexpr(config.groups):
                values.store(values.load() + smem.parts[other, key, None].load())
            cute.autovec_copy(values, there)
            cute.autovec_copy(values, smem.state[key, None])
        cute.arch.sync_threads()
