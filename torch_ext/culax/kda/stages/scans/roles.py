"""What both walks have in common: what they leave behind, and tiles cleared by hand."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device import bulk, results
from culax.device.sizes import CHUNK
from culax.device.walks import WARPGROUP


@dataclass(frozen=True)
class Walked:
    """What a walk leaves: tapes [NT, HV, ...] of the state and of rows [64, V] at every chunk, and the last states [N,
    HV, K, V] fp32 (empty if not wanted)."""

    states: cute.Tensor
    rows: cute.Tensor
    last: cute.Tensor


@dataclass(frozen=True)
class Summary:
    """What walks over segments leave, fp32, an entry a segment: the last states [N * segments, HV, K, V], each with the
    segment that it is next to, and the transitions [N * segments, HV, K, K], as they are and transposed."""

    last: cute.Tensor
    transitions: cute.Tensor
    transposed: cute.Tensor


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
