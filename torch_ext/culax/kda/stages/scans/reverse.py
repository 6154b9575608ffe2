"""The walk from the last chunk on (B1, B2): a warp that loads chunks into the ring, a warpgroup that multiplies.

Equation numbers are those of kda/README.md.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from culax.device import bulk, chunks, images, results, rings, states
from culax.device.sizes import CHUNK
from culax.device.walks import SLICE
from culax.kda.stages.scans import layouts, roles


@dataclass(frozen=True)
class Gmem:
    """Tapes [NT, HV, ...] of prep (images but for the decay), TMA atoms with their coordinates of do [T, V, HV, B] and
    Aqk [T, 64, HV, B], the chunk table and bounds, and the gradients that walks start from [rows, HV, K, V] fp32 (empty
    if absent)."""

    qg: cute.Tensor
    minus_w: cute.Tensor
    kg: cute.Tensor
    decay: cute.Tensor
    tma_do: cute.CopyAtom
    do: cute.Tensor
    tma_aqk: cute.CopyAtom
    aqk: cute.Tensor
    table: cute.Tensor
    bounds: cute.Tensor
    dht: cute.Tensor


@cute.jit
def run(config: cutlass.Constexpr, gmem: Gmem, out: roles.Walked, place: states.Place, ends: roles.Ends) -> None:
    """One CTA's walk over a segment."""
    smem = layouts.allocate_reverse(config)
    rings.init_ring(smem.ring)
    if roles.consumes():
        state = roles.first_state(config, gmem.dht, ends, place)
        walk(config, True, gmem, smem, out, place, state)
        roles.keep_state(state, out, ends, place)
    else:
        load(config, gmem, smem, place)


@cute.jit
def summarise(config: cutlass.Constexpr, gmem: Gmem, out: roles.Walked, place: states.Place) -> None:
    """One CTA's part of a segment's summary: its last state, from zero. What the last segment starts from is known, so
    it is walked over for good."""
    smem = layouts.allocate_reverse(config)
    rings.init_ring(smem.ring)
    if roles.consumes():
        known = place.segment == place.segments - 1
        ends = roles.Ends(chunks.select_int(known, place.sequence, -1), place.row - 1)
        state = roles.first_state(config, gmem.dht, ends, place)
        if known:
            walk(config, True, gmem, smem, out, place, state)
        else:
            walk(config, False, gmem, smem, out, place, state)
        roles.keep_state(state, out, ends, place)
    else:
        load(config, gmem, smem, place)


def _tile(atom: cute.CopyAtom, source: cute.Tensor, where: tuple, target: cute.Tensor) -> tuple:
    """Both sides of one TMA load: [64, 64] of coordinates [T, D, heads, B] from (token, column block, head, batch)."""
    token, block, head, batch = where
    rows = cute.domain_offset((token, 0), source[None, None, head, batch])
    tile = cute.local_tile(rows, (CHUNK, SLICE), (0, block))
    grouped = cute.group_modes(target, 0, 2), cute.group_modes(tile, 0, 2)
    shared, coordinates = cpasync.tma_partition(atom, 0, cute.make_layout(1), *grouped)
    return coordinates, shared


@cute.jit
def load(config: cutlass.Constexpr, gmem: Gmem, smem: layouts.Reverse, place: states.Place) -> None:
    """Producer warp: from the last chunk on, qg, -W, kg, decay, Aqk and columns of do into the next stage of the
    ring."""
    first, past = states.span(gmem.bounds, place)
    state = rings.loading(config.stages)
    head = place.value_head
    if past > first:
        begin = chunks.read_chunk(gmem.table, first)
        for done in cutlass.range(past - first, unroll=1):
            index = past - 1 - done
            token = begin.first + (index - first) * CHUNK
            smem.ring.acquire(state)
            stage = state.index
            full = smem.ring.full + stage
            if cutlass.const_expr(config.poison):
                rings.poison([smem.aqk, smem.kg, smem.do, smem.qg, smem.minus_w], stage)
            do, to_do = _tile(gmem.tma_do, gmem.do, (token, place.slice, head, begin.batch), smem.do[None, None, stage])
            aqk, to_aqk = _tile(gmem.tma_aqk, gmem.aqk, (token, 0, head, begin.batch), smem.aqk[None, None, stage])
            pairs = [
                (gmem.kg[index, head, None], images.flat(smem.kg[None, None, stage])),
                (gmem.decay[index, head, None], smem.decay[None, stage]),
                (gmem.qg[index, head, None], images.flat(smem.qg[None, None, stage])),
                (gmem.minus_w[index, head, None], images.flat(smem.minus_w[None, None, stage])),
            ]
            with cute.arch.elect_one():
                bulk.announce(full, config.stage_bytes)
                bulk.start_loads(pairs, full)
            cute.copy(gmem.tma_do, do, to_do, tma_bar_ptr=full)
            cute.copy(gmem.tma_aqk, aqk, to_aqk, tma_bar_ptr=full)
            state.advance()


@cute.jit
def walk(
    config: cutlass.Constexpr,
    tapes: cutlass.Constexpr,
    gmem: Gmem,
    smem: layouts.Reverse,
    out: roles.Walked,
    place: states.Place,
    state: cute.Tensor,
) -> None:
    """Consumer warpgroup, B2 over the chunks of one segment, last first, with B1's dv_loc, all transposed: dvn^T =
    do^T Aqk + dS^T kg^T; dS^T <- 2^G_last dS^T + do^T qg - dvn^T W; dh is dS after each chunk. Without tapes only the
    state changes."""
    first, past = states.span(gmem.bounds, place)
    from_do = states.product(CHUNK, states.IMAGE, states.ALONG_MN)
    over_keys = states.product(CHUNK, states.REGISTERS, states.ALONG_K)
    into_state = states.product(config.key_dim, states.IMAGE, states.ALONG_MN)
    over_tokens = states.product(config.key_dim, states.REGISTERS, states.ALONG_MN)
    do = states.left(from_do, images.transposed(smem.do))
    aqk = states.right(from_do, images.transposed(smem.aqk))
    kg = states.right(over_keys, smem.kg)
    qg = states.right(into_state, images.transposed(smem.qg))
    minus_w = states.right(over_tokens, images.transposed(smem.minus_w))
    dvn = states.accumulator(CHUNK)
    at = rings.reading(config.stages)
    for done in cutlass.range(past - first, unroll=1):
        index = past - 1 - done
        stage, buffer = at.index, done % config.results
        smem.ring.ready(at)
        if done == 0:
            rows = chunks.read_chunk(gmem.table, index).rows
            if rows < CHUNK:
                # They belong to somebody else, who may have left NaN there.
                roles.clear_rows(smem.do[None, None, stage], rows)
                roles.clear_rows(smem.aqk[None, None, stage], rows)
                roles.cleared()
        here = (None, None, None, stage)
        # Nothing is in flight; without this wait the assembler does not see it, and adds one where dS is decayed.
        warpgroup.wait_group(0)
        states.issue(from_do, dvn, do[here], aqk[here], add=False)
        operand = states.rounded(state)
        if cutlass.const_expr(tapes):
            results.write(operand, smem.results.states, buffer)
        states.issue(over_keys, dvn, operand, kg[here])
        states.scale_columns(state, smem.decay[None, stage])
        states.issue(into_state, state, do[here], qg[here])
        if cutlass.const_expr(tapes):
            results.send(smem.results.states, buffer, out.states, index, place)
        warpgroup.wait_group(1)
        operand = states.rounded(dvn)
        if cutlass.const_expr(tapes):
            results.write(operand, smem.results.rows, buffer)
        states.issue(over_tokens, state, operand, minus_w[here])
        if cutlass.const_expr(config.fault == "weak_release"):
            smem.ring.release(at)
        if cutlass.const_expr(tapes):
            results.send(smem.results.rows, buffer, out.rows, index, place)
        # All products with this stage have completed, and the decay is in registers: it may be refilled.
        warpgroup.wait_group(0)
        if cutlass.const_expr(config.fault != "weak_release"):
            smem.ring.release(at)
        at.advance()
