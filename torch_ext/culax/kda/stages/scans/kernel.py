"""The walks over the chunks: the state before every chunk and v_new (F4), and, from the last chunk on, the gradient of
the state after every chunk and dvn (B1, B2). Neither needs the other, so one launch has both.

One CTA a segment of a sequence, value head and slice of 64 columns, whichever way it walks: a consumer warpgroup that
keeps the state in registers, and a producer warp. A sequence has one segment, or several. Of several the first one on
either way is walked over for good by another launch, while it summarises the ones behind it: it walks over them from
zero, and keeps the last state only. Join makes the states that these walks should have started from.

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

from culax.device import chunks, fakes, states
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
    """Grid (N * max(segments - 1, 1) * HV * V / 64, 2): first those that walk from the last chunk, which take longer.

    Of several segments the last one is left out on the way back and the first one on the way forward.
    """
    walked = cutlass.max(segments - 1, 1)
    place = replace(states.place_of_cta(value_heads, config.forward.slices, walked), segments=segments)
    if cute.arch.block_idx()[1] == 0:
        wanted = chunks.select_int(place.segment == 0, place.sequence, -1)
        reverse.run(config.reverse, reverse_gmem, reverse_out, place, roles.Ends(place.row, wanted))
    else:
        place = replace(place, segment=place.segment + segments - walked)
        wanted = chunks.select_int(place.segment == segments - 1, place.sequence, -1)
        forward.run(config.forward, gmem, out, place, roles.Ends(place.row, wanted))


@cute.kernel
def summary_kernel(
    gmem: forward.Gmem,
    out: roles.Walked,
    transitions: roles.Transitions,
    reverse_gmem: reverse.Gmem,
    reverse_out: roles.Walked,
    value_heads: cutlass.Int32,
    segments: cutlass.Int32,
    config: cutlass.Constexpr,
) -> None:
    """Grid (N * (segments - 1) * HV * max(K, V) / 64, 3): the walks back over all segments but the first, those forward
    over all but the last, and the transitions of those in between."""
    place = states.place_of_cta(value_heads, config.most_slices, segments - 1)
    kind, slices = cute.arch.block_idx()[1], config.forward.slices
    place = replace(place, segments=segments)
    if kind == 0:
        if place.slice < slices:
            reverse.summarise(config.reverse, reverse_gmem, reverse_out, replace(place, segment=place.segment + 1))
    else:
        transition = kind == 2
        wanted = place.slice < slices
        if transition:
            wanted = place.slice < config.key_dim // states.SLICE and place.segment > 0
        if wanted:
            forward.summarise(config.forward, gmem, out, transitions, place, transition)


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
    """The function to compile and its fake arguments: what walks read (as _reads has it); h, v_new, the final states,
    dh, dvn, dh0; in summaries the states before the segments in place of the final ones and the gradients of those
    after them in place of dh0, and then the transitions as they are and transposed; the number of segments, the
    stream."""
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
        count = (gmem.bounds.shape[0] - 1) * heads * cutlass.max(segments - 1, 1)
        if count > 0:
            out, reverse_out = roles.Walked(h, v_new, final), roles.Walked(dh, dvn, dh0)
            scans_kernel(gmem, out, reverse_gmem, reverse_out, heads, segments, config).launch(
                grid=(count * config.forward.slices, 2, 1),
                block=(config.threads, 1, 1),
                smem_merge_branch_allocs=True,
                stream=stream,
            )

    return scans, (tuple(_reads(config)), *_walked(config), *_walked(config), cutlass.Int32(1), fakes.stream())


def _walked(config: ScansConfig) -> list:
    """Fakes of (h, v_new, final states), or (dh, dvn, dh0)."""
    key, value = config.key_dim, config.value_dim
    return [fakes.image(key, value), fakes.image(CHUNK, value), fakes.compact(key, value)]


def _summaries(config: ScansConfig) -> tuple:
    @cute.jit
    def summaries(
        reads: tuple,
        h: cute.Tensor,
        v_new: cute.Tensor,
        starts: cute.Tensor,
        dh: cute.Tensor,
        dvn: cute.Tensor,
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
            out, reverse_out = roles.Walked(h, v_new, starts), roles.Walked(dh, dvn, ends)
            matrices = roles.Transitions(transitions, transposed)
            summary_kernel(gmem, out, matrices, reverse_gmem, reverse_out, heads, segments, config).launch(
                grid=(count * config.most_slices, 3, 1),
                block=(config.threads, 1, 1),
                smem_merge_branch_allocs=True,
                stream=stream,
            )

    matrices = [fakes.compact(config.key_dim, config.key_dim) for _ in range(2)]
    walked = *_walked(config), *_walked(config)
    return summaries, (tuple(_reads(config)), *walked, *matrices, cutlass.Int32(1), fakes.stream())
