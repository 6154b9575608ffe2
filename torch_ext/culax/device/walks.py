"""A walk over a sequence's chunks with a state [K, V] in registers: its numbers. Imports no kernel compiler."""

from dataclasses import dataclass

from culax.device.sizes import CHUNK, barrier_bytes

SLICE = 64
"""Value columns of one CTA: the rows of one wgmma, which multiplies the transposed state."""
WARPGROUP = 128
SMEM_LIMIT = 232_448
"""Shared memory a CTA may have on SM90, bytes."""
FAULTS = ("", "weak_release")


@dataclass(frozen=True)
class Walk:
    """What both scans are compiled for.

    key_dim, value_dim: 64 or 128 each. stages: chunks in shared memory at a time, those on their way included.
    results: buffers of what goes out, the state [K, 64] and rows [64, 64] each.
    fault: "weak_release" frees a stage while the last group of products that reads it may be in flight. poison: a stage
    is filled with NaN when it is taken again, before its loads start. Only tests build these.
    """

    key_dim: int
    value_dim: int
    stages: int
    results: int
    fault: str = ""
    poison: bool = False

    def __post_init__(self) -> None:
        """Reject what cannot be built; these are our own invariants, never user input."""
        assert self.fault in FAULTS
        assert self.smem_bytes <= SMEM_LIMIT, self.smem_bytes

    @property
    def threads(self) -> int:
        """The consumer warpgroup, which multiplies, then the producer warp, which loads."""
        return WARPGROUP + 32

    @property
    def slices(self) -> int:
        """CTAs that share a state."""
        return self.value_dim // SLICE

    @property
    def key_bytes(self) -> int:
        """A bf16 tile [64, K]."""
        return 2 * CHUNK * self.key_dim

    @property
    def value_bytes(self) -> int:
        """A bf16 tile [64, 64]: the CTA's columns of U or do."""
        return 2 * CHUNK * SLICE

    @property
    def stage_bytes(self) -> int:
        """What one stage holds, and its barrier expects."""
        raise NotImplementedError

    @property
    def result_bytes(self) -> int:
        """States [K, 64] and rows [64, 64] on their way out, in bf16."""
        return 2 * self.results * (self.key_dim + CHUNK) * SLICE

    @property
    def smem_bytes(self) -> int:
        """Stages, results and barriers; every image is a multiple of its alignment."""
        return self.stages * self.stage_bytes + self.result_bytes + barrier_bytes(2 * self.stages)
