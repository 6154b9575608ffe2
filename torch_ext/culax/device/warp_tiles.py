"""Tiles of shared memory and the warp-level tensor-core product over them.

Every tile is row-major with a padded row: rows start 16 bytes apart modulo 128, so that `ldmatrix` meets no bank
conflict in either direction. A product is made by one warp: ``acc[m, n] += sum_k a[m, k] b[n, k]`` with bf16 operands
and fp32 accumulation; an operand stored with its first index contiguous is read through the transposing `ldmatrix`.

The functions run while a kernel is traced.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from culax.device.sizes import PAD, tile_elements


def padded_tile(start: cute.Pointer, rows: int, columns: int) -> cute.Tensor:
    """The padded row-major tile [rows, columns] that begins at a 16-byte aligned pointer."""
    return cute.make_tensor(start, cute.make_layout((rows, columns), stride=(columns + PAD, 1)))


def allocate_tile(memory: cutlass.memory.SmemAllocator, rows: int, columns: int) -> cute.Tensor:
    """A padded row-major bf16 tile [rows, columns] of shared memory."""
    start = memory.allocate_array(cutlass.BFloat16, tile_elements(rows, columns), byte_alignment=16)
    return padded_tile(start, rows, columns)


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


def store_fragment(acc: cute.Tensor, target: cute.Tensor) -> None:
    """Round a fp32 fragment to the target's dtype and write it to a [m, n] tensor, two neighbouring elements at a
    time."""
    rounded = cute.make_fragment_like(acc, target.element_type)
    rounded.store(acc.load().to(target.element_type))
    cute.autovec_copy(rounded, fragment_of(target))


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
