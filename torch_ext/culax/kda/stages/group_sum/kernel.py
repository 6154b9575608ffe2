"""Group sum: dq and dk of a query head from its value heads' fp32 shares (B5), in a fixed order. Elementwise,
memory-bound."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor

from culax.device import fakes
from culax.kda.stages.group_sum import layouts, roles
from culax.kda.stages.group_sum.config import GroupSumConfig


@cute.kernel
def group_sum_kernel(
    dq_shares: cute.Tensor, dk_shares: cute.Tensor, dq: cute.Tensor, dk: cute.Tensor, config: cutlass.Constexpr
) -> None:
    """Grid (rows K / 4 / threads)."""
    across = layouts.vectors_per_row(config)
    thread = cutlass.Int64(cute.arch.block_idx()[0]) * config.threads + cute.arch.thread_idx()[0]
    row, place = cutlass.Int32(thread // across), cutlass.Int32(thread % across)
    if row < dq.shape[0]:
        roles.sum_group(config, dq_shares, dq, row, place)
        roles.sum_group(config, dk_shares, dk, row, place)


def entry(config: GroupSumConfig) -> tuple:
    """The function to compile and its fake arguments: (dq shares [R, group, K] fp32, dk shares, dq [R, K] bf16, dk,
    stream)."""

    @cute.jit
    def group_sum(dq_shares: cute.Tensor, dk_shares: cute.Tensor, dq: cute.Tensor, dk: cute.Tensor, stream) -> None:
        rows = dq.shape[0]
        if rows > 0:
            grid = cute.ceil_div(cutlass.Int64(rows) * layouts.vectors_per_row(config), config.threads)
            group_sum_kernel(dq_shares, dk_shares, dq, dk, config).launch(
                grid=(cutlass.Int32(grid), 1, 1), block=(config.threads, 1, 1), stream=stream
            )

    def out() -> cute.Tensor:
        return make_fake_compact_tensor(
            cutlass.BFloat16, (cute.sym_int32(), config.key_dim), stride_order=(1, 0), assumed_align=16
        )

    shares = (fakes.compact(config.key_dim) for _ in range(2))
    return group_sum, (*shares, out(), out(), fakes.stream())
