"""The walk from the first chunk on (F4): a warp that loads chunks into the ring, a warpgroup that multiplies.

Equation numbers are those of kda/README.md.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from culax.device import bulk, images, results, rings, states
from culax.device.sizes import CHUNK
from culax.device.walks import WARPGROUP
from culax.kda.stages.scans import layouts, roles


@dataclass(frozen=True)
class Gmem:
    """Tapes [NT, HV, ...] of prep (images but for the decay), bounds [N + 1], and the states that walks start from in
    fp32 (empty if absent): [N * segments, HV, K, V], or [N, HV, K, V] in summaries."""

    minus_w: cute.Tensor
    u: cute.Tensor
    kg: cute.Tensor
    decay: cute.Tensor
    bounds: cute.Tensor
    initial: cute.Tensor


@cute.jit
def run(
    config: cutlass.Constexpr,
    gmem: Gmem,
    out: roles.Walked | roles.Summary,
    place: states.Place,
    transition: cutlass.Boolean,
) -> None:
    """One CTA's walk over a segment; with transition, in summaries only, that of the identity without U."""
    smem = layouts.allocate_forward(config)
    rings.init_ring(smem.ring)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < WARPGROUP // 32:
        walk(config, gmem, smem, out, place, transition)
    else:
        load(config, gmem, smem, place, transition)


@cute.jit
def load(
    config: cutlass.Constexpr,
    gmem: Gmem,
    smem: layouts.Forward,
    place: states.Place,
    transition: cutlass.Boolean,
) -> None:
    """Producer warp: each chunk's -W, kg, decay and columns of U into the next stage of the ring."""
    first, past = states.span(gmem.bounds, place)
    state = rings.loading(config.stages)
    for index in cutlass.range(first, past, unroll=1):
        smem.ring.acquire(state)
        stage = state.index
        if cutlass.const_expr(config.poison):
            rings.poison([smem.u, smem.minus_w, smem.kg], stage)
        u = gmem.u[index, place.value_head, None]
        columns = [
            (cute.local_tile(u, (CHUNK * states.SLICE,), (place.slice,)), images.flat(smem.u[None, None, stage]))
        ]
        pairs = [
            (gmem.minus_w[index, place.value_head, None], images.flat(smem.minus_w[None, None, stage])),
            (gmem.decay[index, place.value_head, None], smem.decay[None, stage]),
            (gmem.kg[index, place.value_head, None], images.flat(smem.kg[None, None, stage])),
        ]
        full = smem.ring.full + stage
        if cutlass.const_expr(config.summary):
            if transition:
                with cute.arch.elect_one():
                    bulk.load_images(pairs, full)
            else:
                with cute.arch.elect_one():
                    bulk.load_images(columns + pairs, full)
        else:
            with cute.arch.elect_one():
                bulk.load_images(columns + pairs, full)
        state.advance()


@cute.jit
def _start(
    config: cutlass.Constexpr,
    gmem: Gmem,
    smem: layouts.Forward,
    place: states.Place,
    transition: cutlass.Boolean,
) -> cute.Tensor:
    """The state that a walk starts from: a given one; of summaries only the first segment's is known, others start from
    zero. A transition's is the identity, and its U, which is never loaded, is zero."""
    state = states.zeros(config.key_dim)
    if cutlass.const_expr(config.summary):
        if transition:
            states.fill_identity(state, place)
            for stage in cutlass.range_constexpr(config.stages):
                roles.clear_rows(smem.u[None, None, stage], cutlass.Int32(0))
            roles.cleared()
        elif place.segment == 0:
            states.load_state(state, gmem.initial, place.sequence, place)
    else:
        states.load_state(state, gmem.initial, place.row, place)
    return state


@cute.jit
def walk(
    config: cutlass.Constexpr,
    gmem: Gmem,
    smem: layouts.Forward,
    out: roles.Walked | roles.Summary,
    place: states.Place,
    transition: cutlass.Boolean,
) -> None:
    """Consumer warpgroup, F4 over the chunks of one segment, transposed: v_new^T = U^T - S^T W^T; S^T <- 2^G_last S^T +
    v_new^T kg; h is S before each chunk."""
    first, past = states.span(gmem.bounds, place)
    state = _start(config, gmem, smem, place, transition)
    over_keys = states.product(CHUNK, states.REGISTERS, states.ALONG_K)
    over_tokens = states.product(config.key_dim, states.REGISTERS, states.ALONG_MN)
    minus_w = states.right(over_keys, smem.minus_w)
    kg = states.right(over_tokens, images.transposed(smem.kg))
    u = images.transposed(smem.u)
    at = rings.reading(config.stages)
    for index in cutlass.range(first, past, unroll=1):
        stage = at.index
        smem.ring.ready(at)
        v_new = states.load_transposed(u[None, None, stage])
        operand = states.rounded(state)
        if cutlass.const_expr(not config.summary):
            buffer = (index - first) % config.results
            results.write(operand, smem.results.states, buffer)
        # Nothing is in flight; without this wait the assembler does not see it, and adds one where S is decayed.
        warpgroup.wait_group(0)
        states.issue(over_keys, v_new, operand, minus_w[None, None, None, stage])
        states.scale_columns(state, smem.decay[None, stage])
        if cutlass.const_expr(not config.summary):
            results.send(smem.results.states, buffer, out.states, index, place)
        warpgroup.wait_group(0)
        operand = states.rounded(v_new)
        if cutlass.const_expr(not config.summary):
            results.write(operand, smem.results.rows, buffer)
        states.issue(over_tokens, state, operand, kg[None, None, None, stage])
        if cutlass.const_expr(config.fault == "weak_release"):
            smem.ring.release(at)
        if cutlass.const_expr(not config.summary):
            results.send(smem.results.rows, buffer, out.rows, index, place)
        # Both products with this stage have completed, and U and the decay are in registers: it may be refilled.
        warpgroup.wait_group(0)
        if cutlass.const_expr(config.fault != "weak_release"):
            smem.ring.release(at)
        at.advance()
    if cutlass.const_expr(config.summary):
        if transition:
            states.store_state(state, out.transitions, place.row, place)
            states.store_transposed_state(state, out.transposed, place.row, place)
        else:
            states.store_state(state, out.last, place.row + 1, place)
    else:
        if place.segment == place.segments - 1:
            states.store_state(state, out.last, place.sequence, place)
        results.sent()
