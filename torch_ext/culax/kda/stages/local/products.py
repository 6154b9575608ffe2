"""Products of a warpgroup: ``acc[m, n] += sum_k a[m, k] b[n, k]`` over [64, 64] fp32 by wgmma, operands bf16 images.

Element 4 n + 2 u + l of an accumulator is column 8 n + 2 (lane % 4) + l of row 16 w + 8 u + lane / 4, w the warp's
index in its group; `warp_tiles.gemm` keeps a warp's [16, 64] the same way.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from culax.device import images
from culax.device.sizes import BLOCK, CHUNK
from culax.kda.stages.local.config import KEYS


@dataclass(frozen=True)
class Operand:
    """a or b as [rows, k, 1] of an image (rows first), or a in registers."""

    tensor: cute.Tensor
    major: OperandMajorMode = OperandMajorMode.K
    source: object = warpgroup.OperandSource.SMEM


def by_rows(start: cute.Pointer, rows: int, columns: int) -> Operand:
    """An image [rows, k]."""
    return Operand(images.image_at(start, rows, columns))


def by_columns(start: cute.Pointer, rows: int, columns: int) -> Operand:
    """An image [k, rows] as an operand [rows, k]; its shape is that of the image."""
    return Operand(images.transposed(images.image_at(start, rows, columns)), OperandMajorMode.MN)


def rounded(acc: cute.Tensor) -> Operand:
    """An accumulator in bf16 as the left operand of a product over its columns: the same elements in the same
    threads."""
    operand = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, KEYS // BLOCK)), cutlass.BFloat16)
    cute.make_tensor(operand.iterator, acc.layout).store(acc.load().to(cutlass.BFloat16))
    return Operand(operand, source=warpgroup.OperandSource.RMEM)


def _product(a: Operand, b: Operand) -> cute.TiledMma:
    bf16 = cutlass.BFloat16
    return hopper.make_trivial_tiled_mma(
        bf16, bf16, a.major, b.major, cutlass.Float32, (1, 1, 1), (CHUNK, KEYS), a.source
    )


def accumulator() -> cute.Tensor:
    """fp32 registers of a product, not set."""
    bf16, along_k = cutlass.BFloat16, OperandMajorMode.K
    mma = hopper.make_trivial_tiled_mma(bf16, bf16, along_k, along_k, cutlass.Float32, (1, 1, 1), (CHUNK, KEYS))
    return cute.make_rmem_tensor(mma.partition_shape_C((CHUNK, KEYS)), cutlass.Float32)


def add(
    acc: cute.Tensor,
    a: Operand,
    b: Operand,
    *,
    fresh: bool = True,
    depth: int = CHUNK,
    first: int | cutlass.Int32 = 0,
    columns: int | cutlass.Int32 = 0,
) -> None:
    """Start acc = a b^T, or acc += a b^T unless `fresh`, over k < depth.

    a is read from k step `first` (of 16) on, b from its rows 64 `columns` on. `wait` before anything touches acc.
    """
    mma = _product(a, b)
    thread = mma.get_slice(0)
    tile = cute.local_tile(b.tensor, (KEYS, cute.size(b.tensor, mode=[1]), 1), (columns, 0, 0))
    right = thread.make_fragment_B(thread.partition_B(tile))
    in_registers = a.source is warpgroup.OperandSource.RMEM
    left = a.tensor if in_registers else thread.make_fragment_A(thread.partition_A(a.tensor))
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not fresh)
    for k in range(depth // BLOCK):
        from_left = left[None, None, k] if in_registers else left[None, None, first + k, 0]
        cute.gemm(atom, acc, from_left, right[None, None, k, 0], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)


def begin() -> None:
    """Before the first product that touches registers."""
    warpgroup.fence()


def commit() -> None:
    """Close the group of the products since the last one."""
    warpgroup.commit_group()


def wait() -> None:
    """Until all products have completed: their accumulators may be read, and their operands overwritten."""
    warpgroup.wait_group(0)
