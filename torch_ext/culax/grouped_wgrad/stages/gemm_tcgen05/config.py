"""Every host fact of one compiled SM100 variant, in pure Python: what is built, and the arithmetic it rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from culax.grouped_wgrad.stages.gemm.config import BYTES, CONSUMERS, MAX_EXPERTS, SMEM_LIMIT, STORE_ROWS

WARP = 32
EPILOGUE_WARPS = 4
MULTIPLY_WARP = 4
LOAD_WARP = 5
THREADS = WARP * 6
TMEM_COLUMNS = 512
"""Tensor memory of a multiprocessor: 128 lanes of so many 4-byte columns. A CTA takes all of it."""
LANES = 128
"""Rows of one CTA's accumulator, and of one atom of scale bytes."""
TILE_BYTES = 128
"""Bytes along the tokens of one stage: one 128-byte swizzle atom of a K-major row."""
ATOM_BYTES = 512
"""Scale bytes of 128 rows and 4 blocks."""
FORMATS = {"e4m3": 8, "e5m2": 8, "e2m1": 4}
"""Operand element types and their bits."""
LOAD_SLOTS = 4
"""Device-written descriptors every expert has: A, B, scales of A, scales of B."""


# Address arithmetic by operators alone: the same functions serve device integers and Python's.


def scale_strides(atoms: Any, unit: int) -> tuple[Any, ...]:
    """Strides of (units of an atom, atoms along the tokens, atoms along the rows); `atoms` along the tokens.

    unit: bytes one step of the first dimension takes.
    """
    return 1, ATOM_BYTES // unit, atoms * (ATOM_BYTES // unit)


def padded_base(rows: Any, atoms_before: Any) -> Any:
    """First scale byte of an expert in the padded layout; atoms_before along the tokens, of all experts before it."""
    return (rows + LANES - 1) // LANES * ATOM_BYTES * atoms_before


def concatenated_base(rows: Any, begin: Any, block: int) -> Any:
    """The same in the concatenated layout, for an expert that begins at token `begin`."""
    return (rows + LANES - 1) // LANES * LANES * (begin // block)


@dataclass(frozen=True)
class Config:
    """One variant.

    a_format, b_format: "e4m3" or "e5m2" (MXFP8, e8m0 scale a 32 tokens), both "e2m1" (NVFP4, e4m3 scale a 16 tokens).
    out_dtype: "bfloat16", "float16" or "float32". a_major, b_major: "mn" (token-major tensors) or "k".
    ragged: expert-major operands, always "k". discrete: one output tensor an expert. accumulate: fp32 reduce-add.
    pair: two CTAs multiply one 256-row tile together. tile_n: columns of a tile.
    stages: operand pipeline depth. epi_n, epi_stages: columns of one epilogue chunk, chunks in flight.
    band: clusters along M that share a rasterisation band, a power of two.
    fault: a planted fault, which only tests build.
    """

    a_format: str = "e4m3"
    b_format: str = "e4m3"
    out_dtype: str = "bfloat16"
    a_major: str = "mn"
    b_major: str = "mn"
    ragged: bool = False
    discrete: bool = False
    accumulate: bool = False
    pair: bool = True
    tile_n: int = 256
    stages: int = 5
    epi_n: int = 32
    epi_stages: int = 4
    band: int = 8
    fault: str = ""

    def __post_init__(self) -> None:
        """Reject what the kernel cannot build; these are our own invariants, never user input."""
        assert self.a_format in FORMATS and self.b_format in FORMATS and self.out_dtype in BYTES
        assert (self.a_format == "e2m1") == (self.b_format == "e2m1")
        assert not self.ragged or (self.a_major, self.b_major) == ("k", "k")
        assert not self.nvfp4 or (self.a_major, self.b_major) == ("k", "k"), "packed tokens are contiguous"
        assert not self.accumulate or self.out_dtype == "float32"
        assert self.tile_n in (128, 256) and self.chunks % self.epi_stages == 0
        assert self.epi_n * BYTES[self.out_dtype] in (64, 128)
        assert self.band & (self.band - 1) == 0
        assert self.columns <= TMEM_COLUMNS, self.columns
        assert self.smem_bytes <= SMEM_LIMIT, self.smem_bytes

    @property
    def nvfp4(self) -> bool:
        """Whether operands are NVFP4; else they are MXFP8."""
        return self.a_format == "e2m1"

    @property
    def block(self) -> int:
        """Tokens that share a scale."""
        return 16 if self.nvfp4 else 32

    @property
    def packed(self) -> int:
        """Tokens a byte."""
        return 2 if self.nvfp4 else 1

    @property
    def vector(self) -> int:
        """Bytes that TMA aligns the rows of a K-major operand to."""
        return 16

    @property
    def tile_k(self) -> int:
        """Tokens of one stage: four instructions' worth."""
        return TILE_BYTES * self.packed

    @property
    def instruction_k(self) -> int:
        """Tokens of one instruction: one MXFP8 block, four NVFP4 blocks."""
        return self.tile_k // 4

    def instructions(self, rest: Any) -> Any:
        """Instructions that a k tile needs where `rest` tokens of the group are left: of its four, those they reach."""
        return (rest + self.instruction_k - 1) // self.instruction_k

    @property
    def tile_m(self) -> int:
        """Rows of one CTA's tile."""
        return LANES

    @property
    def cluster_m(self) -> int:
        """CTAs of a cluster, along M."""
        return 2 if self.pair else 1

    @property
    def cluster_n(self) -> int:
        """CTAs of a cluster along N."""
        return 1

    @property
    def cluster_size(self) -> int:
        """CTAs a cluster: they multiply one tile together."""
        return self.cluster_m

    @property
    def b_rows(self) -> int:
        """Columns of a tile whose B this CTA loads: a pair shares them."""
        return self.tile_n // self.cluster_m

    @property
    def atoms_k(self) -> int:
        """Scale atoms of one stage along the tokens: 1 for MXFP8, 4 for NVFP4."""
        return self.tile_k // (4 * self.block)

    @property
    def scale_bytes(self) -> tuple[int, int]:
        """Bytes of A's and B's scales in one stage. Each CTA of a pair holds all of B's."""
        return self.atoms_k * ATOM_BYTES, self.tile_n // LANES * self.atoms_k * ATOM_BYTES

    @property
    def operand_bytes(self) -> int:
        """Bytes of A and B in one stage of one CTA."""
        return (self.tile_m + self.b_rows) * TILE_BYTES

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage of one CTA, scales included: what the full barrier expects of it."""
        return self.operand_bytes + sum(self.scale_bytes)

    @property
    def scale_columns(self) -> tuple[int, int]:
        """Tensor-memory columns of A's and B's scales: four bytes a row and column, 128 rows in 4 columns."""
        a, b = self.scale_bytes
        return a // ATOM_BYTES * 4, b // ATOM_BYTES * 4

    @property
    def accumulators(self) -> int:
        """Accumulator tiles in flight: one is stored while the next is computed."""
        return 2

    @property
    def accumulator_stride(self) -> int:
        """Columns from one accumulator to the next. Two of 256 columns overlap where scales need room."""
        return min(self.tile_n, (TMEM_COLUMNS - sum(self.scale_columns) - self.tile_n) // self.epi_n * self.epi_n)

    @property
    def overlap(self) -> int:
        """Columns that both accumulators use: read first by the epilogue, then given back."""
        return self.tile_n - self.accumulator_stride

    @property
    def columns(self) -> int:
        """Tensor-memory columns in use."""
        return self.accumulator_stride + self.tile_n + sum(self.scale_columns)

    @property
    def chunks(self) -> int:
        """Epilogue chunks of a tile: all rows, epi_n columns."""
        return self.tile_n // self.epi_n

    @property
    def release_after(self) -> int:
        """The chunk, in the order of storing, after which the accumulator is given back."""
        return (self.overlap // self.epi_n or self.chunks) - 1

    @property
    def epilogue_bytes(self) -> int:
        """Bytes of all epilogue buffers, one of 64 rows for each half of the epilogue warps and chunk in flight."""
        return CONSUMERS * self.epi_stages * STORE_ROWS * self.epi_n * BYTES[self.out_dtype]

    @property
    def barriers(self) -> int:
        """Memory barriers: two a stage, two an accumulator pipeline stage, and that of the pair's deallocation."""
        return 2 * self.stages + 2 * self.accumulator_stages + 1

    @property
    def accumulator_stages(self) -> int:
        """Stages of the accumulator pipeline: overlapping accumulators are handed over one at a time."""
        return 1 if self.overlap else self.accumulators

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory: stages, epilogue buffers, offsets, barriers, the address of the tensor memory."""
        offsets = -(-(MAX_EXPERTS + 1) * 4 // 128) * 128
        used = self.stages * self.stage_bytes + self.epilogue_bytes + offsets + self.barriers * 8 + 16
        return -(-used // 1024) * 1024

    @property
    def slots(self) -> int:
        """Entries of 128 bytes an expert: descriptors of A, B, their scales and C; then bases of the scales."""
        return LOAD_SLOTS + int(self.discrete) + 1

    @property
    def slot_bases(self) -> int:
        """Entry that holds the first scale byte of A and of B, two int64."""
        return self.slots - 1

    @property
    def slot_c(self) -> int:
        """Slot of C's descriptor."""
        return LOAD_SLOTS
