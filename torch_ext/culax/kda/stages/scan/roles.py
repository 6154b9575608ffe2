"""The two roles of the scan kernel: a warp that loads chunks into the ring, a warpgroup that walks over them.

Equation numbers are those of kda/README.md.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from culax.device import bulk, images, results, rings, states
from culax.device.sizes import CHUNK
from culax.kda.stages.scan.layouts import Smem


@dataclass(frozen=True)
class Gmem:
    """Tapes [NT, HV, ...] of prep (images but for the decay), bounds [N + 1], states [N, HV, K, V] fp32 (empty if
    absent), and the tapes h and v_new."""

    minus_w: cute.Tensor
    u: cute.Tensor
    kg: cute.Tensor
    decay: cute.Tensor
    bounds: cute.Tensor
    initial: cute.Tensor
    h: cute.Tensor
    v_new: cute.Tensor
    final: cute.Tensor


@cute.jit
def load(config: cutlass.Constexpr, gmem: Gmem, smem: Smem, place: states.Place) -> None:
    """Producer warp: each chunk's -W, kg, decay and columns of U into the next stage of the ring."""
    first, past = gmem.bounds[place.sequence], gmem.bounds[place.sequence + 1]
    state = rings.loading(config.stages)
    for index in cutlass.range(first, past, unroll=1):
        smem.ring.acquire(state)
        stage = state.index
        if cutlass.const_expr(config.poison):
            rings.poison([smem.u, smem.minus_w, smem.kg], stage)
        u = gmem.u[index, place.value_head, None]
        pairs = [
            (gmem.minus_w[index, place.value_head, None], images.flat(smem.minus_w[None, None, stage])),
            (cute.local_tile(u, (CHUNK * states.SLICE,), (place.slice,)), images.flat(smem.u[None, None, stage])),
            (gmem.decay[index, place.value_head, None], smem.decay[None, stage]),
            (gmem.kg[index, place.value_head, None], images.flat(smem.kg[None, None, stage])),
        ]
        with cute.arch.elect_one():
            bulk.load_images(pairs, smem.ring.full + stage)
        state.advance()


@cute.jit
def scan(config: cutlass.Constexpr, gmem: Gmem, smem: Smem, place: states.Place) -> None:
    """Consumer warpgroup, F4 over the chunks of one sequence, transposed: v_new^T = U^T - S^T W^T; S^T <- 2^G_last S^T
    + v_new^T kg; h is S before each chunk."""
    first, past = gmem.bounds[place.sequence], gmem.bounds[place.sequence + 1]
    state = states.load_state(gmem.initial, place)
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
        results.write(operand, smem.results.states, buffer)
        # Nothing is in flight; without this wait the assembler does not see it, and adds one where S is decayed.
        warpgroup.wait_group(0)
        states.issue(over_keys, v_new, operand, minus_w[None, None, None, stage])
        states.scale_columns(state, smem.decay[None, stage])
        results.send(smem.results.states, buffer, gmem.h, index, place)
        warpgroup.wait_group(0)
        operand = states.rounded(v_new)
        results.write(operand, smem.results.rows, buffer)
        states.issue(over_tokens, state, operand, kg[None, None, None, stage])
        if cutlass.const_expr(config.fault == "weak_release"):
            smem.ring.release(at)
        results.send(smem.results.rows, buffer, gmem.v_new, index, place)
        # Both products with this stage have completed, and U and the decay are in registers: it may be refilled.
        warpgroup.wait_group(0)
        if cutlass.const_expr(config.fault != "weak_release"):
            smem.ring.release(at)
        at.advance()
    states.store_state(state, gmem.final, place)
    results.sent()
