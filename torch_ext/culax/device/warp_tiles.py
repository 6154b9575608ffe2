"""Tiles of shared memory and the warp-level tensor-core product over them.

Every tile is row-major with a padded row: rows start 16 bytes apart modulo 128, so that `ldmatrix` meets no bank
conflict in either direction. A product is made by one warp: ``acc[m, n] += sum_k a[m, k] b[n, k]`` with bf16 operands
and fp32 accumulation; an operand stored with its first index contiguous is read through the transposing `ldmatrix`.

The functions run while a kernel is traced.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from culax.device.sizes import BLOCK, PAD, tile_elements


def padded_tile(start: cute.Pointer, rows: int, columns: int) -> cute.Tensor:
    """The padded row-major tile [rows, columns] that begins at a 16-byte aligned pointer."""
    return cute.make_tensor(start, cute.make_layout((rows, columns), stride=(columns + PAD, 1)))


def allocate_tiles(
    memory: cutlass.memory.SmemAllocator, rows: int, columns: int, stages: int | None = None
) -> cute.Tensor:
    """A padded row-major bf16 tile [rows, columns] of shared memory, or `stages` of them as [rows, columns, stages]."""
    elements = tile_elements(rows, columns)
    start = memory.allocate_array(cutlass.BFloat16, elements * (stages or 1), byte_alignment=16)
    if stages is None:
        return padded_tile(start, rows, columns)
    return cute.make_tensor(start, cute.make_layout((rows, columns, stages), stride=(columns + PAD, 1, elements)))


def transposed(tile: cute.Tensor) -> cute.Tensor:
    """View of a [rows, columns] tile as [columns, rows]."""
    rows, columns = tile.shape
    return cute.make_tensor(tile.iterator, cute.make_layout((columns, rows), stride=(tile.stride[1], tile.stride[0])))


def _warp_mma() -> cute.TiledMma:
    op = warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 16))
    return cute.make_tiled_mma(op, cute.make_layout((1, 1, 1)), permutation_mnk=(16, 16, 16))


def accumulator(m: int, n: int) -> cute.Tensor:
    """Zeroed fp32 fragment of one warp's [m, n] product (m, n multiples of 16); per thread m n / 32 registers."""
    acc = cute.make_rmem_tensor(_warp_mma().get_slice(0).partition_shape_C((m, n)), cutlass.Float32)
    acc.fill(0.0)
    return acc


def fragment_of(tensor: cute.Tensor) -> cute.Tensor:
    """This thread's elements of a [m, n] tensor, in the order of `accumulator`."""
    return _warp_mma().get_slice(cute.arch.lane_idx()).partition_C(tensor)


def coordinates(m: int, n: int) -> cute.Tensor:
    """Coordinates (row, column) of this thread's elements of a [m, n] product."""
    return fragment_of(cute.make_identity_tensor((m, n)))


def load_fragment(source: cute.Tensor) -> cute.Tensor:
    """This thread's elements of a [m, n] tensor in fp32."""
    part = fragment_of(source)
    raw = cute.make_fragment_like(part, source.element_type)
    cute.autovec_copy(part, raw)
    values = cute.make_fragment_like(raw, cutlass.Float32)
    values.store(raw.load().to(cutlass.Float32))
    return values


def store_fragment(acc: cute.Tensor, target: cute.Tensor) -> None:
    """Round a fp32 fragment to the target's dtype and write it to a [m, n] tensor, two neighbouring elements at a
    time."""
    rounded = cute.make_fragment_like(acc, target.element_type)
    rounded.store(acc.load().to(target.element_type))
    cute.autovec_copy(rounded, fragment_of(target))


def scale_rows(acc: cute.Tensor, factor: cute.Tensor) -> None:
    """Multiply row i of a fp32 fragment of [m, n] by ``factor[i]`` (a vector [m])."""
    where = coordinates(factor.shape[0], cute.size(acc.shape) * 32 // factor.shape[0])
    for m in range(cute.size(acc, mode=[1])):
        for upper in range(2):
            by = factor[where[(0, upper), m, 0][0]]
            for n in range(cute.size(acc, mode=[2])):
                for left in range(2):
                    acc[(left, upper), m, n] = acc[(left, upper), m, n] * by


def _ldmatrix(tile: cute.Tensor) -> cute.CopyAtom:
    return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=tile.stride[1] != 1, num_matrices=4), cutlass.BFloat16)


def gemm(acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, keep: tuple[int, int] | None = None) -> None:
    """Add one warp's product ``a b^T`` to `acc` (fp32 fragment of [m, n]); a is [m, k], b [n, k] in shared memory, k a
    multiple of 16. `keep`: which of the 8 x 8 quadrants of an a of [16, 16] counts, the others are taken for zero."""
    mma = _warp_mma()
    lane = cute.arch.lane_idx()
    mine = mma.get_slice(lane)
    load_a = cute.make_tiled_copy_A(_ldmatrix(a), mma)
    load_b = cute.make_tiled_copy_B(_ldmatrix(b), mma)
    frag_a = mine.make_fragment_A(mine.partition_A(a))
    frag_b = mine.make_fragment_B(mine.partition_B(b))
    source_a, into_a = load_a.get_slice(lane).partition_S(a), load_a.get_slice(lane).retile(frag_a)
    source_b, into_b = load_b.get_slice(lane).partition_S(b), load_b.get_slice(lane).retile(frag_b)
    for k in range(cute.size(frag_a, mode=[2])):
        cute.copy(load_a, source_a[None, None, k], into_a[None, None, k])
        cute.copy(load_b, source_b[None, None, k], into_b[None, None, k])
        if keep is not None:
            for i in range(cute.size(frag_a)):
                if (i // 2 % 2, i // 4) != keep:
                    frag_a[i] = cutlass.BFloat16(0.0)
        cute.gemm(mma, acc, frag_a[None, None, k], frag_b[None, None, k], acc)


def load_left(a: cute.Tensor) -> cute.Tensor:
    """All of a product's left operand [m, k] into registers, m k / 64 a thread; see `multiply`."""
    mma, lane = _warp_mma(), cute.arch.lane_idx()
    copy = cute.make_tiled_copy_A(_ldmatrix(a), mma)
    operand = mma.get_slice(lane).make_fragment_A(mma.get_slice(lane).partition_A(a))
    cute.copy(copy, copy.get_slice(lane).partition_S(a), copy.get_slice(lane).retile(operand))
    return operand


def load_right(b: cute.Tensor) -> cute.Tensor:
    """All of a product's right operand [n, k] into registers, n k / 64 a thread; see `multiply`."""
    mma, lane = _warp_mma(), cute.arch.lane_idx()
    copy = cute.make_tiled_copy_B(_ldmatrix(b), mma)
    operand = mma.get_slice(lane).make_fragment_B(mma.get_slice(lane).partition_B(b))
    cute.copy(copy, copy.get_slice(lane).partition_S(b), copy.get_slice(lane).retile(operand))
    return operand


def multiply(acc: cute.Tensor, left: cute.Tensor, right: cute.Tensor) -> None:
    """`gemm` of operands in registers: for few warps, whose loads must be on their way before they are needed."""
    for k in range(cute.size(left, mode=[2])):
        cute.gemm(_warp_mma(), acc, left[None, None, k], right[None, None, k], acc)


def row_fragment(row: cute.Tensor) -> cute.Tensor:
    """A row vector [n] as a fragment of [16, n]: this thread's columns of it, once for each of its rows."""
    columns = row.shape[0]
    return load_fragment(cute.make_tensor(row.iterator, cute.make_layout((BLOCK, columns), stride=(0, 1))))


def sum_of_rows(acc: cute.Tensor) -> tuple[cutlass.Float32, cutlass.Float32]:
    """Sums over the columns of a [16, n] fragment: of rows lane / 4 and lane / 4 + 8, in all four lanes that share
    them."""
    sums = []
    for upper in range(2):
        total = cutlass.Float32(0.0)
        for n in range(cute.size(acc, mode=[2])):
            total = total + acc[(0, upper), 0, n] + acc[(1, upper), 0, n]
        for step in (1, 2):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=step)
        sums.append(total)
    return sums[0], sums[1]
