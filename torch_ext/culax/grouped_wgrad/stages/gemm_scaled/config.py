"""Host facts of one compiled variant for block-scaled operands, in pure Python, on top of the plain kernel's."""

from __future__ import annotations

from dataclasses import dataclass

from culax.grouped_wgrad.stages.gemm import config as plain
from culax.grouped_wgrad.stages.gemm.config import BYTES, CONSUMERS, MAX_EXPERTS, WARPGROUP

PRODUCERS = 2
"""Warpgroups before the consumers: loads and scales, then the conversion of B."""
THREADS = WARPGROUP * (PRODUCERS + CONSUMERS)
LOADER_REGISTERS = 56
CONVERTER_REGISTERS = 56
CONSUMER_REGISTERS = 200
DECODING_WARPS = 2
"""One an operand."""
CONVERTING_WARPS = WARPGROUP // 32
FORMATS = {"e4m3": 8, "e5m2": 8, "e2m1": 4}
"""Bits of an element."""
FACTOR_BYTES = 4
"""A scale as the conversion wants it: the same bf16 number twice."""
ATOM = 128
"""Rows of a scale atom, and of a tile of either operand."""


@dataclass(frozen=True)
class Config(plain.Config):
    """One variant; dtype is what is multiplied (bf16), a_format and b_format what is loaded.

    Both operands have contiguous tokens. The CTAs of a cluster have rows of their own, tile_m each, and all of
    tile_n columns. A stage of the loaded ring holds bytes and factors (scales) of a CTA's rows of A and of its part of
    B; a stage of the ready ring all of B converted to bf16, each CTA its part, which it sends to the others. A is
    converted into registers by the warpgroup that multiplies it.
    stages, ready_stages: depths of the two rings.
    """

    a_major: str = "k"
    b_major: str = "k"
    tile_n: int = 256
    stages: int = 5
    ready_stages: int = 3
    a_format: str = "e4m3"
    b_format: str = "e4m3"

    def __post_init__(self) -> None:
        """Reject what the kernel cannot build."""
        super().__post_init__()
        assert self.dtype == "bfloat16" and (self.a_major, self.b_major) == ("k", "k")
        assert self.tile_m == self.b_rows == ATOM and self.tile_k == 64
        assert (self.cluster_m, self.cluster_n) == (2, 1), "a CTA sends its part of B to one other"
        assert {self.a_format, self.b_format} <= {"e4m3", "e5m2"} or self.a_format == self.b_format == "e2m1"

    @property
    def multicasts(self) -> bool:
        """Each CTA loads for itself."""
        return False

    @property
    def rows(self) -> int:
        """Rows of a tile that one consumer multiplies and stores: both work on the same tile."""
        return self.tile_m // CONSUMERS

    @property
    def b_rows(self) -> int:
        """Columns of the product whose B a CTA loads and converts."""
        return self.tile_n // self.cluster_m

    @property
    def producers(self) -> int:
        """Warpgroups before the consumers."""
        return PRODUCERS

    @property
    def turns(self) -> bool:
        """The consumers work side by side."""
        return False

    @property
    def nv(self) -> bool:
        """True for NVFP4, False for MXFP8."""
        return self.a_format == "e2m1"

    @property
    def masked(self) -> bool:
        """Whether tiles may hold tokens of other groups, whose factors are 0: all fp4 numbers are finite."""
        return self.nv and not self.ragged

    @property
    def wrapped(self) -> bool:
        """Parameter descriptors are the operands' own."""
        return False

    @property
    def a_written(self) -> bool:
        """Whether A is loaded through descriptors written on the device."""
        return not self.masked

    @property
    def b_written(self) -> bool:
        """The same for B."""
        return not self.masked

    @property
    def block(self) -> int:
        """Tokens that share a scale."""
        return 16 if self.nv else 32

    @property
    def blocks(self) -> int:
        """Scales of a row in one k tile."""
        return self.tile_k // self.block

    @property
    def packed(self) -> int:
        """Tokens in a byte."""
        return 8 // FORMATS[self.a_format]

    @property
    def vector(self) -> int:
        """Bytes that TMA aligns rows to; operands are loaded as bytes."""
        return 16

    @property
    def stage_bytes(self) -> int:
        """Loaded bytes of A and B in one stage: what the full barrier's transaction count expects."""
        return (self.tile_m + self.b_rows) * self.loaded_k

    @property
    def converted_bytes(self) -> int:
        """Bytes of B as bf16 in one stage of the ready ring."""
        return self.tile_n * self.tile_k * BYTES[self.dtype]

    @property
    def sent_bytes(self) -> int:
        """Bytes of them that one converting warp writes here and sends to the other CTA."""
        return self.converted_bytes // self.cluster_m // CONVERTING_WARPS

    @property
    def factor_bytes(self) -> int:
        """Bytes of both operands' factors in one stage."""
        return (self.tile_m + self.b_rows) * self.blocks * FACTOR_BYTES

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory: both rings, epilogue buffers, offsets, atoms before each expert, barriers."""
        table = -(-(MAX_EXPERTS + 1) * 4 // 128) * 128
        loaded = self.stages * (self.stage_bytes + self.factor_bytes)
        ready = self.ready_stages * self.converted_bytes
        return loaded + ready + self.epilogue_bytes + 2 * table + 2 * (self.stages + self.ready_stages) * 8

    @property
    def registers(self) -> int:
        """Registers a CTA holds once the roles have traded theirs."""
        return WARPGROUP * (LOADER_REGISTERS + CONVERTER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS)

    @property
    def full_arrivals(self) -> int:
        """Arrivals that fill a loaded stage: the loading warp's, with its bytes, and the decoding warps'."""
        return 1 + DECODING_WARPS

    @property
    def empty_arrivals(self) -> int:
        """Arrivals that free a loaded stage: one a converting and one a multiplying warp."""
        return CONVERTING_WARPS + CONSUMERS * WARPGROUP // 32

    @property
    def ready_arrivals(self) -> int:
        """Arrivals that fill a ready stage: one a converting warp, with the bytes that its like elsewhere sends."""
        return CONVERTING_WARPS

    @property
    def used_arrivals(self) -> int:
        """Arrivals that free a ready stage: one a multiplying warp of every CTA that this one sends to, itself too."""
        return self.cluster_size * CONSUMERS * WARPGROUP // 32
