"""The walk from the first chunk on (F4): a warp that loads chunks into the ring, a warpgroup that multiplies.

Equation numbers are those of kda/README.md.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from culax.device import bulk, chunks, images, results, rings, states
from culax.device.sizes import CHUNK
from culax.kda.stages.scans import layouts, roles


@dataclass(frozen=True)
class Gmem:
    """Tapes [NT, HV, ...] of prep (images but for the decay), bounds [N + 1], and the states that walks start from
    [rows, HV, K, V] fp32 (empty if absent)."""

    minus_w: cute.Tensor
    u: cute.Tensor
    kg: cute.Tensor
    decay: cute.Tensor
    bounds: cute.Tensor
    initial: cute.Tensor


@cute.jit
def run(config: cutlass.Constexpr, gmem: Gmem, out: roles.Walked, place: states.Place, ends: roles.Ends) -> None:
    """One CTA's walk over a segment."""
    smem = layouts.allocate_forward(config)
    rings.init_ring(smem.ring)
    if roles.consumes():
        state = roles.first_state(config, gmem.initial, ends, place)
        walk(config, True, gmem, smem, out, place, state)
        roles.keep_state(state, out, ends, place)
    else:
        load(config, gmem, smem, place, cutlass.Boolean(False))


@cute.jit
def summarise(
    config: cutlass.Constexpr,
    gmem: Gmem,
    out: roles.Walked,
    transitions: roles.Transitions,
    place: states.Place,
    transition: cutlass.Boolean,
) -> None:
    """One CTA's part of a segment's summary: its last state, from zero, or its transition, which is the walk from the
    identity without U. The first segment's state is known, so it is walked over for good."""
    smem = layouts.allocate_forward(config)
    rings.init_ring(smem.ring)
    if roles.consumes():
        known = place.segment == 0
        start = chunks.select_int(known, place.sequence, -1)
        ends = roles.Ends(start, place.row + 1)
        state = roles.first_state(config, gmem.initial, ends, place)
        if transition:
            states.fill_identity(state, place)
            for stage in cutlass.range_constexpr(config.stages):
                roles.clear_rows(smem.u[None, None, stage], cutlass.Int32(0))
            roles.cleared()
        if known:
            walk(config, True, gmem, smem, out, place, state)
        else:
            walk(config, False, gmem, smem, out, place, state)
        if transition:
            states.store_state(state, transitions.matrices, place.row, place)
            states.store_transposed_state(state, transitions.transposed, place.row, place)
        else:
            roles.keep_state(state, out, ends, place)
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
    """Producer warp: each chunk's -W, kg, decay and, but for a transition, columns of U into the next stage of the
    ring."""
    first, past = states.span(gmem.bounds, place)
    state = rings.loading(config.stages)
    for index in cutlass.range(first, past, unroll=1):
        smem.ring.acquire(state)
        stage = state.index
        if cutlass.const_expr(config.poison):
            rings.poison([smem.u, smem.minus_w, smem.kg], stage)
        u = gmem.u[index, place.value_head, None]
        columns = (cute.local_tile(u, (CHUNK * states.SLICE,), (place.slice,)), images.flat(smem.u[None, None, stage]))
        pairs = [
            (gmem.minus_w[index, place.value_head, None], images.flat(smem.minus_w[None, None, stage])),
            (gmem.decay[index, place.value_head, None], smem.decay[None, stage]),
            (gmem.kg[index, place.value_head, None], images.flat(smem.kg[None, None, stage])),
        ]
        full = smem.ring.full + stage
        if transition:
            with cute.arch.elect_one():
                bulk.load_images(pairs, full)
        else:
            with cute.arch.elect_one():
                bulk.load_images([pairs[0], columns, *pairs[1:]], full)
        state.advance()


@cute.jit
def walk(
    config: cutlass.Constexpr,
    tapes: cutlass.Constexpr,
    gmem: Gmem,
    smem: layouts.Forward,
    out: roles.Walked,
    place: states.Place,
    state: cute.Tensor,
) -> None:
    """Consumer warpgroup, F4 over the chunks of one segment, transposed: v_new^T = U^T - S^T W^T; S^T <- 2^G_last S^T +
    v_new^T kg; h is S before each chunk. Without tapes only the state changes."""
    first, past = states.span(gmem.bounds, place)
    over_keys = states.product(CHUNK, states.REGISTERS, states.ALONG_K)
    over_tokens = states.product(config.key_dim, states.REGISTERS, states.ALONG_MN)
    minus_w = states.right(over_keys, smem.minus_w)
    kg = states.right(over_tokens, images.transposed(smem.kg))
    u = images.transposed(smem.u)
    at = rings.reading(config.stages)
    for index in cutlass.range(first, past, unroll=1):
        stage, buffer = at.index, (index - first) % config.results
        smem.ring.ready(at)
        v_new = states.load_transposed(u[None, None, stage])
        operand = states.rounded(state)
        if cutlass.const_expr(tapes):
            results.write(operand, smem.results.states, buffer)
        # Nothing is in flight; without this wait the assembler does not see it, and adds one where S is decayed.
        warpgroup.wait_group(0)
        states.issue(over_keys, v_new, operand, minus_w[None, None, None, stage])
        states.scale_columns(state, smem.decay[None, stage])
        if cutlass.const_expr(tapes):
            results.send(smem.results.states, buffer, out.states, index, place)
        warpgroup.wait_group(0)
        operand = states.rounded(v_new)
        if cutlass.const_expr(tapes):
            results.write(operand, smem.results.rows, buffer)
        states.issue(over_tokens, state, operand, kg[None, None, None, stage])
        if cutlass.const_expr(config.fault == "weak_release"):
            smem.ring.release(at)
        if cutlass.const_expr(tapes):
            results.send(smem.results.rows, buffer, out.rows, index, place)
        # Both products with this stage have completed, and U and the decay are in registers: it may be refilled.
        warpgroup.wait_group(0)
        if cutlass.const_expr(config.fault != "weak_release"):
            smem.ring.release(at)
        at.advance()
