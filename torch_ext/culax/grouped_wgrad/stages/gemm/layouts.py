"""Layouts and atoms as functions of Config: shared-memory tiles, the MMA, TMA views of global memory."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum

from culax.grouped_wgrad.stages.gemm.config import BYTES, CONSUMERS, STORE_ROWS, Config

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}
BIG = 2**30
WRAP = 2**34
"""BIG * WRAP elements of 2 bytes are 2**65 bytes: zero in 64-bit address arithmetic."""
INDEX_MAX = 2**31 - 1


def operand(extent: int, major: str, config: Config) -> cute.ComposedLayout:
    """(extent, tile_k, stages) in 128-byte swizzled atoms, contiguous along `major` ("mn" or "k")."""
    kinds = warpgroup.SmemLayoutAtomKind
    atom = warpgroup.make_smem_layout_atom(kinds.MN_SW128 if major == "mn" else kinds.K_SW128, DTYPES[config.dtype])
    order = (1, 0, 2) if major == "mn" else (0, 1, 2)
    return cute.tile_to_shape(atom, (extent, config.tile_k, config.stages), order=order)


def epilogue(config: Config) -> cute.ComposedLayout:
    """(64, epi_n, buffers of both warpgroups), rows contiguous along N."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = kinds.K_SW128 if config.epi_n * BYTES[config.out_dtype] % 128 == 0 else kinds.K_SW64
    atom = warpgroup.make_smem_layout_atom(kind, DTYPES[config.out_dtype])
    return cute.tile_to_shape(atom, (STORE_ROWS, config.epi_n, CONSUMERS * config.epi_stages), order=(0, 1, 2))


def tiled_mma(config: Config) -> cute.TiledMma:
    """One warpgroup's m64 n(tile_n) k16 product, both operands in shared memory, fp32 accumulators."""
    dtype = DTYPES[config.dtype]
    modes = {"mn": OperandMajorMode.MN, "k": OperandMajorMode.K}
    majors = modes[config.a_major], modes[config.b_major]
    return hopper.make_trivial_tiled_mma(
        dtype, dtype, *majors, cutlass.Float32, atom_layout_mnk=(1, 1, 1), tiler_mn=(STORE_ROWS, config.tile_n)
    )


def wrapped(tensor: cute.Tensor) -> cute.Tensor:
    """(X, T) with X contiguous as (X, BIG, INDEX_MAX, INDEX_MAX): hardware zero fill past any token, without edits.

    Token t of a group that starts at o and has k tokens is read at coordinates (x, BIG - k + t, BIG, o + k): the
    strides (s, WRAP - s, s) of the three token modes cancel to base + (o + t) * s in 64-bit arithmetic, and t >= k is
    past the extent BIG, so it is filled with zeros.
    """
    stride = tensor.stride[1]
    shape = (tensor.shape[0], BIG, INDEX_MAX, INDEX_MAX)
    strides = (tensor.stride[0], stride, cutlass.Int64(WRAP) - stride, stride)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=strides))


def base(tensor: cute.Tensor, config: Config) -> cute.Tensor:
    """What the descriptors of a K-major operand (X, T) start from; expert-major rows get a legal pitch for now."""
    if not config.ragged:
        return tensor
    pitch = (cutlass.Int64(tensor.shape[1]) + config.vector - 1) // config.vector * config.vector
    return cute.make_tensor(tensor.iterator, cute.make_layout(tensor.shape, stride=(pitch, 1)))


def group_of(tensor: cute.Tensor, begin: cutlass.Int32, length: cutlass.Int32) -> cute.Tensor:
    """The (X, tokens) coordinates of one group of a `wrapped` TMA tensor."""
    return cute.domain_offset((0, BIG - length), tensor[None, None, BIG, begin + length])


def load_atom(tensor: cute.Tensor, layout: cute.ComposedLayout, extent: int, multicast: int, config: Config):
    """TMA load of (extent, tile_k) tiles, multicast to `multicast` CTAs -> (atom, coordinate tensor)."""
    op = cpasync.CopyBulkTensorTileG2SOp() if multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    stage = cute.slice_(layout, (None, None, 0))
    return cpasync.make_tiled_tma_atom(op, tensor, stage, (extent, config.loaded_k), num_multicast=multicast)


def store_atom(tensor: cute.Tensor, config: Config):
    """TMA store, or fp32 reduce-add, of (64, epi_n) chunks -> (atom, coordinate tensor)."""
    op = cpasync.CopyReduceBulkTensorTileS2GOp() if config.accumulate else cpasync.CopyBulkTensorTileS2GOp()
    stage = cute.slice_(epilogue(config), (None, None, 0))
    return cpasync.make_tiled_tma_atom(op, tensor, stage, (STORE_ROWS, config.epi_n))


def register_to_shared(config: Config, mma: cute.TiledMma) -> cute.TiledCopy:
    """Copy of accumulator chunks to shared memory: stmatrix for 16-bit outputs, 8-byte stores for fp32."""
    out = DTYPES[config.out_dtype]
    pattern = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), cutlass.Float16)
    store = hopper.get_smem_store_op(LayoutEnum.ROW_MAJOR, elem_ty_d=out, elem_ty_acc=cutlass.Float32)
    return cute.make_tiled_copy_S(store, cute.make_tiled_copy_C_atom(pattern, mma))
