"""What both walks have in common: what they start from and leave behind, and tiles cleared by hand."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device import bulk, results, states
from culax.device.sizes import CHUNK
from culax.device.walks import WARPGROUP


@dataclass(frozen=True)
class Walked:
    """What a walk leaves: tapes [NT, HV, ...] of the state and of rows [64, V] at every chunk, and last states [rows,
    HV, K, V] fp32 (empty if not wanted)."""

    states: cute.Tensor
    rows: cute.Tensor
    last: cute.Tensor


@dataclass(frozen=True)
class Transitions:
    """The segments' transitions [N * segments, HV, K, K] fp32, as they are and transposed."""

    matrices: cute.Tensor
    transposed: cute.Tensor


@dataclass(frozen=True)
class Ends:
    """Rows of the state that a walk starts from and of the one that it ends with, among those given and wanted; -1
    where it starts from zero, or where the last state is not wanted."""

    start: cutlass.Int32
    last: cutlass.Int32


def consumes() -> cutlass.Boolean:
    """Whether the calling warp is one of those that multiply; the other one loads."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) < WARPGROUP // 32


@cute.jit
def first_state(config: cutlass.Constexpr, given: cute.Tensor, ends: Ends, place: states.Place) -> cute.Tensor:
    """Consumer warpgroup: the state that a walk starts from."""
    state = states.zeros(config.key_dim)
    if ends.start >= 0:
        states.load_state(state, given, ends.start, place)
    return state


@cute.jit
def keep_state(state: cute.Tensor, out: Walked, ends: Ends, place: states.Place) -> None:
    """Consumer warpgroup: write the last state, and wait until all that was sent has been read."""
    if ends.last >= 0:
        states.store_state(state, out.last, ends.last, place)
    results.sent()


@cute.jit
def clear_rows(tile: cute.Tensor, rows: cutlass.Int32) -> None:
    """Warpgroup: zeros in the rows of an image [64, 64] from `rows` on; `cleared` must follow."""
    vector = cute.make_rmem_tensor((1, 8), cutlass.BFloat16)
    vector.fill(0.0)
    thread = cute.arch.thread_idx()[0]
    for step in cutlass.range_constexpr(CHUNK * 8 // WARPGROUP):
        row = step * (WARPGROUP // 8) + thread // 8
        if row >= rows:
            cute.autovec_copy(vector, cute.local_tile(tile, (1, 8), (row, thread % 8)))


def cleared() -> None:
    """Warpgroup: what was cleared may be read, by products too."""
    bulk.publish()
    results.meet()
