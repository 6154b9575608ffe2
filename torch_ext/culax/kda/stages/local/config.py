"""What the local kernel is compiled for, and its shared memory, threads and cluster as plain numbers."""

from dataclasses import dataclass

from culax.device.sizes import CHUNK, barrier_bytes

KEYS = 64
"""Key columns of a CTA."""
EIGHT = 8
"""Rows of a diagonal block, whose decays are taken row by row."""
GROUP = 128
"""Threads of a warpgroup."""
THREADS = 2 * GROUP
"""Threads of a CTA: one for 8 rows of two key columns."""
P_UNIT, V_UNIT = 10, 12
"""Units of P, and the first one of v: the gates' sums of the first and of the second warpgroup wait there."""
BARRIERS = 3
"""Transaction barriers: for the loads, and for what the cluster's other CTA sends."""
SM_BYTES, RESERVED_BYTES = 233_472, 1024
"""Shared memory of an SM, and what of it each CTA takes besides its own."""
UNIT = CHUNK * KEYS
"""Elements of a unit of shared memory: a [64, 64] tile of bf16."""


@dataclass(frozen=True)
class LocalConfig:
    """Key and value dimension (64 or 128), and whether dq and dk leave in fp32.

    With ``partial`` they are one value head's share, summed over the heads of a group afterwards; else they are final,
    in bf16.
    """

    key_dim: int
    value_dim: int
    partial: bool

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return THREADS

    @property
    def splits(self) -> int:
        """CTAs of a cluster, which share a chunk and value head: each has 64 key columns."""
        return self.key_dim // KEYS

    @property
    def value_columns(self) -> int:
        """Value columns of a CTA in dv and dvn v^T, a multiple of 64; ranks behind the last column have none."""
        return max(self.value_dim // self.splits, KEYS)

    @property
    def units(self) -> int:
        """Units that the tiles take up: do, v_new, dvn, h, dh two each, P, k, v."""
        return V_UNIT + self.value_columns // KEYS

    @property
    def scratch_floats(self) -> int:
        """fp32 scratch: diagonal blocks of E and dL [64, 8], decays and sums of k dks [8, 64], sums of h dh, beta and
        sums by row [64]."""
        return 2 * CHUNK * EIGHT + 2 * CHUNK // EIGHT * KEYS + KEYS + 2 * CHUNK

    @property
    def ctas(self) -> int:
        """CTAs that an SM holds: two, unless the tiles of 128 value columns are in the way."""
        return 2 if self.smem_bytes <= SM_BYTES // 2 - RESERVED_BYTES else 1

    @property
    def smem_bytes(self) -> int:
        """Units, scratch, the chunk's row of the table, barriers."""
        return 2 * UNIT * self.units + 4 * self.scratch_floats + 16 + barrier_bytes(BARRIERS)
