"""Layouts of block-scaled operands in shared memory, and the MMA that takes A from registers."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from culax.grouped_wgrad.stages.gemm.config import STORE_ROWS
from culax.grouped_wgrad.stages.gemm_scaled.config import Config

CHUNK = 16
"""Bytes that swizzles move as one."""


def loaded(extent: int, config: Config) -> cute.ComposedLayout:
    """(extent, loaded_k, stages) bytes, a row of one k tile (64 or 32 bytes) in one line of the swizzle."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = kinds.K_SW64 if config.loaded_k == 64 else kinds.K_SW32
    atom = warpgroup.make_smem_layout_atom(kind, cutlass.Uint8)
    return cute.tile_to_shape(atom, (extent, config.loaded_k, config.stages), order=(0, 1, 2))


def ready(config: Config) -> cute.ComposedLayout:
    """(tile_n, tile_k, ready_stages) of B as bf16, a row in one 128-byte line of the swizzle."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, cutlass.BFloat16)
    return cute.tile_to_shape(atom, (config.tile_n, config.tile_k, config.ready_stages), order=(0, 1, 2))


def chunk_offset(config: Config, row, chunk):
    """Where 16-byte chunk `chunk` of row `row` (within one stage of `loaded`) lies, in chunks."""
    if config.loaded_k == 64:
        return row * 4 + (chunk ^ (row // 2 % 4))
    return row * 2 + (chunk ^ (row // 4 % 2))


def tiled_mma(config: Config) -> cute.TiledMma:
    """One warpgroup's m64 n128 k16 product, A in registers, B in shared memory, fp32 accumulators.

    A launch of 512 threads has 128 registers a thread when it is compiled: too few for an instruction with n256.
    """
    return hopper.make_trivial_tiled_mma(
        cutlass.BFloat16,
        cutlass.BFloat16,
        OperandMajorMode.K,
        OperandMajorMode.K,
        cutlass.Float32,
        atom_layout_mnk=(1, 1, 1),
        tiler_mn=(STORE_ROWS, 128),
        a_source=warpgroup.OperandSource.RMEM,
    )
