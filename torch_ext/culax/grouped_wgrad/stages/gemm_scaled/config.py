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
CONVERTING_WARPS = WARPGROUP // 32 // CONSUMERS
"""Warps of a lane that convert B."""
FORMATS = {"e4m3": 8, "e5m2": 8, "e2m1": 4}
"""Bits of an element."""
FACTOR_BYTES = 4
"""A scale as the conversion wants it: the same bf16 number twice."""
ATOM = 128
"""Rows of a scale atom, and of a tile of either operand."""


@dataclass(frozen=True)
class Config(plain.Config):
    """One variant; dtype is what is multiplied (bf16), a_format and b_format what is loaded.

    Both operands have contiguous tokens. A stage holds the loaded bytes of A and B, the scales of both as factors, and
    B converted to bf16; A is converted into registers by the warpgroup that multiplies it. A CTA works on two tiles at
    once, in two lanes: each has half of the stages, a loading warp, a decoding warp, two converting warps and a
    multiplying warpgroup of its own.
    """

    a_major: str = "k"
    b_major: str = "k"
    stages: int = 6
    epi_stages: int = 2
    a_format: str = "e4m3"
    b_format: str = "e4m3"

    def __post_init__(self) -> None:
        """Reject what the kernel cannot build."""
        super().__post_init__()
        assert self.stages % CONSUMERS == 0
        assert self.dtype == "bfloat16" and (self.a_major, self.b_major) == ("k", "k")
        assert self.tile_m == self.tile_n == ATOM and self.tile_k == 64
        assert {self.a_format, self.b_format} <= {"e4m3", "e5m2"} or self.a_format == self.b_format == "e2m1"

    @property
    def producers(self) -> int:
        """Warpgroups before the consumers."""
        return PRODUCERS

    @property
    def turns(self) -> bool:
        """Each consumer has a ring of its own."""
        return False

    @property
    def depth(self) -> int:
        """Stages of a lane."""
        return self.stages // CONSUMERS

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
        return (self.tile_m + self.tile_n) * self.loaded_k

    @property
    def converted_bytes(self) -> int:
        """Bytes of B as bf16 in one stage."""
        return self.tile_n * self.tile_k * BYTES[self.dtype]

    @property
    def factor_bytes(self) -> int:
        """Bytes of both operands' factors in one stage."""
        return (self.tile_m + self.tile_n) * self.blocks * FACTOR_BYTES

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory: stages, epilogue buffers, offsets, atoms before each expert, barriers of two rings."""
        table = -(-(MAX_EXPERTS + 1) * 4 // 128) * 128
        stage = self.stage_bytes + self.converted_bytes + self.factor_bytes
        return self.stages * stage + self.epilogue_bytes + 2 * table + 4 * self.stages * 8

    @property
    def registers(self) -> int:
        """Registers a CTA holds once the roles have traded theirs."""
        return WARPGROUP * (LOADER_REGISTERS + CONVERTER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS)

    @property
    def full_arrivals(self) -> int:
        """Arrivals that fill a stage: the loading warp's, with its bytes, and the decoding warp's."""
        return 2

    @property
    def empty_arrivals(self) -> int:
        """Arrivals that free a stage: one a converting and one a multiplying warp, of every CTA sharing a multicast."""
        return (CONVERTING_WARPS + WARPGROUP // 32) * (self.cluster_m + self.cluster_n - 1)
