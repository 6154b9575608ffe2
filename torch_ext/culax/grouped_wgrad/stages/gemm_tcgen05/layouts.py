"""Layouts and atoms as functions of Config: shared memory as TMA and as the tensor cores see it, tensor memory."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.blockscaled_layout as scaled
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from culax.grouped_wgrad.stages.gemm.layouts import DTYPES
from culax.grouped_wgrad.stages.gemm_tcgen05.config import ATOM_BYTES, LANES, TILE_BYTES, Config, scale_strides

ELEMENTS = {"e4m3": cutlass.Float8E4M3FN, "e5m2": cutlass.Float8E5M2, "e2m1": cutlass.Float4E2M1FN}
ATOM_WORDS = ATOM_BYTES // 2
"""A scale atom in the 16-bit words TMA moves it in: at most 256 a box dimension."""


def scale_type(config: Config):
    """e4m3 for NVFP4, e8m0 for MXFP8."""
    return cutlass.Float8E4M3FN if config.nvfp4 else cutlass.Float8E8M0FNU


def cta_group(config: Config) -> tcgen05.CtaGroup:
    """Whether one CTA or a pair issues each tensor-core instruction."""
    return tcgen05.CtaGroup.TWO if config.pair else tcgen05.CtaGroup.ONE


def tile(config: Config) -> tuple[int, int, int]:
    """(M, N, K) of what the tensor cores multiply in one stage, both CTAs of a pair together."""
    return config.tile_m * config.cluster_m, config.tile_n, config.tile_k


def tiled_mma(config: Config) -> cute.TiledMma:
    """Block-scaled product, operands in shared memory, scales and fp32 accumulators in tensor memory."""
    modes = {"mn": OperandMajorMode.MN, "k": OperandMajorMode.K}
    return blackwell.make_blockscaled_trivial_tiled_mma(
        ELEMENTS[config.a_format],
        ELEMENTS[config.b_format],
        modes[config.a_major],
        modes[config.b_major],
        scale_type(config),
        config.block,
        cta_group(config),
        tile(config)[:2],
    )


def operand_bytes(rows: int, major: str, stages: int) -> cute.ComposedLayout:
    """(rows, 128 bytes of tokens, stages) in 128-byte swizzled atoms, contiguous along `major`: as TMA writes it.

    Token-major tiles hold a token a byte; packed fp4 is always "k".
    """
    kinds = tcgen05.SmemLayoutAtomKind
    atom = tcgen05.make_smem_layout_atom(kinds.MN_SW128 if major == "mn" else kinds.K_SW128, cutlass.Uint8)
    return cute.tile_to_shape(atom, (rows, TILE_BYTES, stages), order=(1, 0, 2) if major == "mn" else (0, 1, 2))


def operands(config: Config, mma: cute.TiledMma) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
    """The same bytes as the tensor cores read them: A and B as (MMA, rows, K, stages)."""
    a, b = ELEMENTS[config.a_format], ELEMENTS[config.b_format]
    return (
        blackwell.make_smem_layout_a(mma, tile(config), a, config.stages),
        blackwell.make_smem_layout_b(mma, tile(config), b, config.stages),
    )


def scale_box(config: Config, operand: int) -> tuple[int, int, int]:
    """(words, atoms along the tokens, atoms along the rows) of the scales of A (0) or B (1) in one stage."""
    return ATOM_WORDS, config.atoms_k, config.scale_bytes[operand] // (ATOM_BYTES * config.atoms_k)


def scale_words(box: tuple[int, int, int], config: Config) -> cute.Layout:
    """The stages of a box in shared memory, as TMA writes them."""
    return cute.make_ordered_layout((*box, config.stages), order=(0, 1, 2, 3))


def scales(config: Config, mma: cute.TiledMma) -> tuple[cute.Layout, cute.Layout]:
    """The same bytes as scales of A and of B: (MMA, rows, K, stages)."""
    return (
        scaled.make_smem_layout_sfa(mma, tile(config), config.block, config.stages),
        scaled.make_smem_layout_sfb(mma, tile(config), config.block, config.stages),
    )


def scale_columns(config: Config, mma: cute.TiledMma) -> tuple[cute.Layout, cute.Layout]:
    """Scales of A and of B in tensor memory: (MMA, rows, K)."""
    a, b = (cute.slice_(layout, (None, None, None, 0)) for layout in scales(config, mma))
    return (
        scaled.make_tmem_layout_sfa(mma, tile(config), config.block, a),
        scaled.make_tmem_layout_sfb(mma, tile(config), config.block, b),
    )


def scale_tensor(base: cute.Pointer, rows: cutlass.Int32, atoms: cutlass.Int32) -> cute.Tensor:
    """One expert's scales in global memory as (words, atoms along the tokens, atoms along the rows)."""
    stride = scale_strides(cutlass.Int64(atoms), 2)
    return cute.make_tensor(base, cute.make_layout((ATOM_WORDS, atoms, (rows + LANES - 1) // LANES), stride=stride))


def load_atom(tensor: cute.Tensor, layout, tiler: tuple[int, ...], config: Config):
    """TMA load of one stage's tile -> (atom, coordinate tensor). In a pair it signals the leading CTA's barrier."""
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(cta_group(config)),
        tensor,
        cute.select(layout, mode=[*range(len(tiler))]),
        tiler,
    )


def accumulator(config: Config, mma: cute.TiledMma) -> cute.Layout:
    """(MMA, rows, columns, accumulators) in tensor memory: 128 lanes, accumulator_stride columns apart."""
    shape = mma.partition_shape_C(tile(config)[:2])
    one = mma.make_fragment_C(cute.append(shape, config.accumulators)).layout
    stride = (*one.stride[:3], config.accumulator_stride * one.stride[0][1])
    return cute.make_layout(one.shape, stride=stride)


def tensor_to_register(config: Config, chunk: cute.Tensor) -> cute.TiledCopy:
    """Load of one epilogue chunk: each thread gets epi_n columns of its own row."""
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(config.epi_n)), cutlass.Float32)
    return tcgen05.make_tmem_copy(atom, chunk)


def register_to_shared(config: Config, load: cute.TiledCopy) -> cute.TiledCopy:
    """Copy of converted chunks to shared memory, 16 bytes at a time."""
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), DTYPES[config.out_dtype], num_bits_per_copy=128)
    return cute.make_tiled_copy_D(atom, load)
