"""The walks over the chunks: the state before every chunk and v_new (F4), and, from the last chunk on, the gradient of
the state after every chunk and dvn (B1, B2). Neither needs the other, so one launch has both.

One CTA a segment of a sequence, value head and slice of 64 columns, whichever way it walks: a consumer warpgroup that
keeps the state in registers, and a producer warp. A sequence has one segment, or several, whose first states another
launch has found: summaries, which walk over all segments at once and keep the last state only (join makes the states
out of them).

Ring (rings.py): a chunk's operands a stage, bulk copies, TMA for do and Aqk; full: one arrival with the bytes, empty:
one arrival a consumer warp, behind the wait for the chunk's last product.
A chunk of the consumers: round S, write h, start S^T W^T, meanwhile decay S and send h; round v_new, write it, start
v_new^T kg, meanwhile send it; release the stage. The other way: start do^T Aqk, round dS, write dh, start dS^T kg^T,
meanwhile decay dS, start do^T qg, send dh; round dvn, write it, start dvn^T W, meanwhile send it; release the stage.
Rows behind the last chunk's valid ones are cleared before they are read.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute

from culax.device import fakes, states
from culax.device.sizes import CHUNK
from culax.kda.stages.scans import forward, layouts, reverse, roles
from culax.kda.stages.scans.config import ScansConfig


@cute.kernel
def scans_kernel(
    gmem: forward.Gmem,
    out: roles.Walked,
    reverse_gmem: reverse.Gmem,
    reverse_out: roles.Walked,
    value_heads: cutlass.Int32,
    segments: cutlass.Int32,
    config: cutlass.Constexpr,
) -> None:
    """Grid (N * segments * HV * V / 64, 2): first those that walk from the last chunk, which take longer."""
    place = states.place_of_cta(value_heads, config.forward.slices, segments)
    if cute.arch.block_idx()[1] == 0:
        reverse.run(config.reverse, reverse_gmem, reverse_out, place)
    else:
        forward.run(config.forward, gmem, out, place, cutlass.Boolean(False))


@cute.kernel
def summary_kernel(
    gmem: forward.Gmem,
    starts: roles.Summary,
    reverse_gmem: reverse.Gmem,
    ends: roles.Summary,
    value_heads: cutlass.Int32,
    segments: cutlass.Int32,
    config: cutlass.Constexpr,
) -> None:
    """Grid (N * (segments - 1) * HV * max(K, V) / 64, 3): the last states from the end and from the start, of all
    segments but the last one on either way, and the transitions of those in between."""
    place = states.place_of_cta(value_heads, config.most_slices, segments - 1)
    kind, slices = cute.arch.block_idx()[1], config.forward.slices
    walked = replace(place, segments=segments)
    if kind == 0:
        if place.slice < slices:
            reverse.run(config.reverse, reverse_gmem, ends, replace(walked, segment=place.segment + 1))
    else:
        transition = kind == 2
        wanted = place.slice < slices
        if transition:
            wanted = place.slice < config.key_dim // states.SLICE and place.segment > 0
        if wanted:
            forward.run(config.forward, gmem, starts, walked, transition)


def _reads(config: ScansConfig) -> list:
    """Fakes of (qg, -W, U, kg, decay, do, Aqk, table, bounds, initial, dht)."""
    key, value = config.key_dim, config.value_dim
    bf16 = cutlass.BFloat16
    return [
        fakes.image(CHUNK, key),
        fakes.image(CHUNK, key),
        fakes.image(CHUNK, value),
        fakes.image(CHUNK, key),
        fakes.compact(key),
        fakes.rows(bf16, value),
        fakes.rows(bf16, CHUNK),
        fakes.table(),
        fakes.vector(cutlass.Int32),
        fakes.compact(key, value),
        fakes.compact(key, value),
    ]


def _gmem(reads: tuple) -> tuple[forward.Gmem, reverse.Gmem]:
    qg, minus_w, u, kg, decay, do, aqk, table, bounds, initial, dht = reads
    loads = *layouts.tile_loads(do), *layouts.tile_loads(aqk)
    return (
        forward.Gmem(minus_w, u, kg, decay, bounds, initial),
        reverse.Gmem(qg, minus_w, kg, decay, *loads, table, bounds, dht),
    )


def entry(config: ScansConfig) -> tuple:
    """The function to compile and its fake arguments: what walks read (as _reads has it), then h, v_new, the final
    states, dh, dvn, dh0, or for summaries the states before the segments, the gradients of those after them, the
    transitions as they are and transposed; then the number of segments, and the stream."""
    if config.summary:
        return _summaries(config)

    @cute.jit
    def scans(
        reads: tuple,
        h: cute.Tensor,
        v_new: cute.Tensor,
        final: cute.Tensor,
        dh: cute.Tensor,
        dvn: cute.Tensor,
        dh0: cute.Tensor,
        segments: cutlass.Int32,
        stream,
    ) -> None:
        gmem, reverse_gmem = _gmem(reads)
        heads = gmem.u.shape[1]
        count = (gmem.bounds.shape[0] - 1) * heads
        if count > 0:
            out, reverse_out = roles.Walked(h, v_new, final), roles.Walked(dh, dvn, dh0)
            scans_kernel(gmem, out, reverse_gmem, reverse_out, heads, segments, config).launch(
                grid=(count * segments * config.forward.slices, 2, 1),
                block=(config.threads, 1, 1),
                smem_merge_branch_allocs=True,
                stream=stream,
            )

    key, value = config.key_dim, config.value_dim
    tapes = [fakes.image(key, value), fakes.image(CHUNK, value), fakes.compact(key, value)]
    more = [fakes.image(key, value), fakes.image(CHUNK, value), fakes.compact(key, value)]
    return scans, (tuple(_reads(config)), *tapes, *more, cutlass.Int32(1), fakes.stream())


def _summaries(config: ScansConfig) -> tuple:
    @cute.jit
    def summaries(
        reads: tuple,
        starts: cute.Tensor,
        ends: cute.Tensor,
        transitions: cute.Tensor,
        transposed: cute.Tensor,
        segments: cutlass.Int32,
        stream,
    ) -> None:
        gmem, reverse_gmem = _gmem(reads)
        heads = gmem.u.shape[1]
        count = (gmem.bounds.shape[0] - 1) * heads * (segments - 1)
        if count > 0:
            out, reverse_out = (roles.Summary(last, transitions, transposed) for last in (starts, ends))
            summary_kernel(gmem, out, reverse_gmem, reverse_out, heads, segments, config).launch(
                grid=(count * config.most_slices, 3, 1),
                block=(config.threads, 1, 1),
                smem_merge_branch_allocs=True,
                stream=stream,
            )

    key, value = config.key_dim, config.value_dim
    states_of = [fakes.compact(key, value) for _ in range(2)]
    matrices = [fakes.compact(key, key) for _ in range(2)]
    return summaries, (tuple(_reads(config)), *states_of, *matrices, cutlass.Int32(1), fakes.stream())
