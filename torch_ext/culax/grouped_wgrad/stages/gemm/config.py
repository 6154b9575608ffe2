"""Every host fact of one compiled variant, in pure Python: what is built, and the arithmetic it rests on."""

from __future__ import annotations

from dataclasses import dataclass

WARPGROUP = 128
CONSUMERS = 2
"""Consumer warpgroups a CTA."""
THREADS = WARPGROUP * (1 + CONSUMERS)
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
REGISTER_FILE = 65536
SMEM_LIMIT = 232_448
"""Dynamic shared memory a block may have on SM90, bytes."""
MAX_EXPERTS = 512
MAX_TOKENS = 2**30
"""The wrap-around descriptor of layouts.wrapped counts tokens below 2**30."""
DESCRIPTOR_BYTES = 128
STORE_ROWS = 64
"""Rows of one TMA store box: one WGMMA's M."""
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Config:
    """One variant.

    dtype: operands ("bfloat16" or "float16"); out_dtype: also "float32".
    a_major, b_major: "mn" (token-major tensors) or "k". ragged: expert-major operands, always "k".
    discrete: one output tensor an expert, reached through descriptors written on the device.
    accumulate: fp32 reduce-add into the output instead of a store.
    stages: operand pipeline depth. epi_n, epi_stages: columns of one epilogue chunk, chunks in flight a warpgroup.
    band: clusters along M that share a rasterisation band, a power of two.
    fault, poison: planted faults, and NaN put into stages before they are loaded. Only tests build these.
    """

    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    a_major: str = "mn"
    b_major: str = "mn"
    ragged: bool = False
    discrete: bool = False
    accumulate: bool = False
    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    cluster_m: int = 2
    cluster_n: int = 1
    stages: int = 6
    epi_n: int = 32
    epi_stages: int = 4
    band: int = 8
    fault: str = ""
    poison: bool = False

    def __post_init__(self) -> None:
        """Reject what the kernel cannot build; these are our own invariants, never user input."""
        assert self.dtype in ("bfloat16", "float16") and self.out_dtype in BYTES
        assert not self.ragged or (self.a_major, self.b_major) == ("k", "k")
        assert not self.accumulate or self.out_dtype == "float32"
        assert self.tile_m % STORE_ROWS == 0 and self.tile_n % self.epi_n == 0
        assert self.chunks % self.epi_stages == 0, "a chunk's buffer must be known when compiling"
        assert self.rows * self.tile_n <= 192 * 128, "at most 192 accumulator registers a thread"
        assert self.band & (self.band - 1) == 0
        assert not self.poison or not self.multicasts, "a peer's multicast may arrive before the poison"
        assert self.smem_bytes <= SMEM_LIMIT, self.smem_bytes
        assert self.registers <= REGISTER_FILE, self.registers

    @property
    def cluster_size(self) -> int:
        """CTAs a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def multicasts(self) -> bool:
        """Whether TMA loads go to several CTAs."""
        return self.cluster_size > 1

    @property
    def rows(self) -> int:
        """Rows of a tile that one consumer multiplies and stores."""
        return self.tile_m

    @property
    def producers(self) -> int:
        """Warpgroups before the consumers."""
        return 1

    @property
    def turns(self) -> bool:
        """Whether the consumers share a ring and so take turns."""
        return True

    @property
    def wrapped(self) -> bool:
        """Whether parameter descriptors are those of layouts.wrapped, which end where a group ends."""
        return True

    @property
    def packed(self) -> int:
        """Tokens an element of the loaded operands holds."""
        return 1

    @property
    def loaded_k(self) -> int:
        """Elements of a loaded operand in a row of one k tile."""
        return self.tile_k // self.packed

    @property
    def vector(self) -> int:
        """Elements of an operand in 16 bytes: what TMA aligns rows of a K-major operand to."""
        return 16 // BYTES[self.dtype]

    @property
    def chunks(self) -> int:
        """Epilogue chunks (64 rows, epi_n columns) of what one consumer stores."""
        return self.rows // STORE_ROWS * (self.tile_n // self.epi_n)

    @property
    def stage_bytes(self) -> int:
        """Bytes of A and B in one stage: what the full barrier's transaction count expects."""
        return (self.tile_m + self.tile_n) * self.tile_k * BYTES[self.dtype]

    @property
    def epilogue_bytes(self) -> int:
        """Bytes of all epilogue buffers."""
        return CONSUMERS * self.epi_stages * STORE_ROWS * self.epi_n * BYTES[self.out_dtype]

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory: operand stages, epilogue buffers, offsets, barriers."""
        offsets = -(-(MAX_EXPERTS + 1) * 4 // 128) * 128
        return self.stages * self.stage_bytes + self.epilogue_bytes + offsets + 2 * self.stages * 8

    @property
    def registers(self) -> int:
        """Registers a CTA holds once the roles have traded theirs."""
        return WARPGROUP * (PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS)

    @property
    def empty_arrivals(self) -> int:
        """Arrivals that free a stage: one a reading warp, from each CTA that shares a multicast with this one."""
        return WARPGROUP // 32 * (self.cluster_m + self.cluster_n - 1)

    @property
    def whole_producer(self) -> bool:
        """True where groups may need loads without TMA, which take the whole producer warpgroup."""
        return self.a_written or self.b_written

    @property
    def a_written(self) -> bool:
        """True where A is loaded through descriptors written on the device, one an expert."""
        return self.a_major == "k"

    @property
    def b_written(self) -> bool:
        """The same for B."""
        return self.b_major == "k"

    @property
    def slots(self) -> int:
        """Device-written descriptors an expert (order: A, B, C)."""
        return int(self.a_written) + int(self.b_written) + int(self.discrete)

    @property
    def slot_b(self) -> int:
        """Slot of B's descriptor."""
        return int(self.a_written)

    @property
    def slot_c(self) -> int:
        """Slot of C's descriptor."""
        return int(self.a_written) + int(self.b_written)
