"""Device-side schedule: clamped group offsets, and which tile a cluster works on.

Work is ordered expert by expert, so a cluster never straddles two; within an expert, bands of `band` clusters along M
are walked column by column, so that the CTAs running together share rows of A and columns of B in L2.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from culax.grouped_wgrad.stages.gemm.config import Config

LANES = 32


@dataclass(frozen=True)
class Space:
    """Work space in units of clusters; `tokens` is T. `edge` is the height of the last band, which may be partial."""

    tokens: Int32
    total: Int32
    clusters_m: Int32
    per_expert: cute.FastDivmodDivisorV2
    per_band: cute.FastDivmodDivisorV2
    edge: cute.FastDivmodDivisorV2


def make_space(config: Config, m: Int32, n: Int32, experts: Int32, tokens: Int32) -> Space:
    """Space of `experts` (m, n) outputs."""
    clusters_m = cute.ceil_div(m, config.tile_m * config.cluster_m)
    clusters_n = cute.ceil_div(n, config.tile_n * config.cluster_n)
    return Space(
        tokens,
        experts * clusters_m * clusters_n,
        clusters_m,
        cute.fast_divmod_create_divisor_v2(clusters_m * clusters_n),
        cute.fast_divmod_create_divisor_v2(clusters_n * config.band),
        cute.fast_divmod_create_divisor_v2((clusters_m - 1) % config.band + 1),
    )


@cute.jit
def clamped(offs: cute.Tensor, index: Int32, tokens: Int32) -> Int32:
    """offs[index] within [0, T]."""
    return cutlass.max(cutlass.min(offs[index], tokens), 0)


@cute.jit
def write_offsets(offs: cute.Tensor, tokens: Int32, s_offs: cute.Tensor):
    """One warp: s_offs[e + 1] = max(s_offs[e], min(offs[e], T)), s_offs[0] = 0, as a running maximum."""
    lane = cute.arch.lane_idx()
    experts = offs.shape[0]
    per_lane = cute.ceil_div(experts, LANES)
    first = lane * per_lane
    last = cutlass.min(first + per_lane, experts)
    top = Int32(0)
    for e in cutlass.range(first, last, unroll=1):
        top = cutlass.max(top, clamped(offs, e, tokens))
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(top, 1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            top = cutlass.max(top, below)
    running = cute.arch.shuffle_sync_up(top, 1, mask_and_clamp=0)
    if lane == 0:
        running = Int32(0)
        s_offs[0] = Int32(0)
    for e in cutlass.range(first, last, unroll=1):
        running = cutlass.max(running, clamped(offs, e, tokens))
        s_offs[e + 1] = running


@cute.jit
def write_scale_atoms(s_offs: cute.Tensor, experts: Int32, block: cutlass.Constexpr[int], s_atoms: cute.Tensor):
    """The warp that wrote s_offs: s_atoms[e] = columns of scale atoms (4 blocks of tokens each) before expert e."""
    cute.arch.sync_warp()
    lane = cute.arch.lane_idx()
    per_lane = cute.ceil_div(experts, LANES)
    first = lane * per_lane
    last = cutlass.min(first + per_lane, experts)
    total = Int32(0)
    for e in cutlass.range(first, last, unroll=1):
        total += (s_offs[e + 1] - s_offs[e] + 4 * block - 1) // (4 * block)
    running = total
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(running, 1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            running += below
    running -= total
    for e in cutlass.range(first, last, unroll=1):
        s_atoms[e] = running
        running += (s_offs[e + 1] - s_offs[e] + 4 * block - 1) // (4 * block)


@cute.jit
def locate(config: cutlass.Constexpr[Config], space: Space, index: Int32):
    """Work index -> (expert, tile row, tile column) of this CTA."""
    expert, rest = divmod(index, space.per_expert)
    band, rest = divmod(rest, space.per_band)
    first = band * config.band
    column, row = divmod(rest, space.edge)
    if first + config.band <= space.clusters_m:
        column = rest // config.band
        row = rest - column * config.band
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    row = (first + row) * config.cluster_m + rank % config.cluster_m
    return expert, row, column * config.cluster_n + rank // config.cluster_m
