"""What a thread of the group sum kernel does."""

import cutlass
import cutlass.cute as cute

from culax.kda.stages.group_sum import layouts


@cute.jit
def sum_group(
    config: cutlass.Constexpr, shares: cute.Tensor, total: cute.Tensor, index: cutlass.Int32, place: cutlass.Int32
) -> None:
    """B5: four columns of one query head's gradient, its value heads added in order in fp32 and rounded once."""
    sums = cute.make_rmem_tensor((layouts.VECTOR,), cutlass.Float32)
    sums.fill(0.0)
    for head in cutlass.range(shares.shape[1], unroll=1):
        share = layouts.vector(shares[index, head, None], place)
        sums.store(sums.load() + share.load())
    rounded = cute.make_rmem_tensor((layouts.VECTOR,), cutlass.BFloat16)
    rounded.store(sums.load().to(cutlass.BFloat16))
    cute.autovec_copy(rounded, layouts.vector(total[index, None], place))
