"""What the launch of a whole backward call is compiled for, and its workspace as plain numbers."""

from dataclasses import dataclass

from culax.device.sizes import CHUNK
from culax.kda.stages.group_sum.config import GroupSumConfig
from culax.kda.stages.join.config import JoinConfig
from culax.kda.stages.local.config import LocalConfig
from culax.kda.stages.prep.config import PrepConfig
from culax.kda.stages.scans.config import ScansConfig

ALIGNMENT = 16
"""Every part of the workspace starts at a multiple of this many bytes."""


@dataclass(frozen=True)
class BackwardConfig:
    """The stages' configurations and beta's dtype, "float32" or "bfloat16".

    summary and join run where sequences have several segments; group_sum is None where every query head has one value
    head.
    """

    prep: PrepConfig
    scans: ScansConfig
    summary: ScansConfig
    join: JoinConfig
    local: LocalConfig
    group_sum: GroupSumConfig | None
    beta: str = "float32"

    @property
    def tapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the tapes in bf16, in the order of the workspace."""
        key, value = self.prep.key_dim, self.prep.value_dim
        keys, values, states = (CHUNK, key), (CHUNK, value), (key, value)
        tapes = {"minus_w": keys, "u": values, "qg": keys, "kg": keys}
        return tapes | {"h": states, "v_new": values, "dh": states, "dvn": values}

    def tape_bytes(self, name: str) -> int:
        """Bytes of a tape for one chunk and value head; "decay" is fp32."""
        if name == "decay":
            return 4 * self.prep.key_dim
        rows, columns = self.tapes[name]
        return 2 * rows * columns

    def workspace_bytes(self, chunks: int, sequences: int, rows: int, value_heads: int, segments: int = 1) -> int:
        """Bytes of a call's workspace; rows: batch times tokens.

        In order: the tapes, decay, the shares of dq and dk where there is a group sum, the chunk table with a row more
        before and behind, the sequences' offsets and first chunks, and, where sequences have several segments, the
        states next to these and their transitions, two of each.
        """
        tapes = sum(map(self.tape_bytes, (*self.tapes, "decay"))) * chunks * value_heads
        shares = 0 if self.group_sum is None else 2 * 4 * rows * value_heads * self.prep.key_dim
        size = tapes + shares + ALIGNMENT * (chunks + 2) + 2 * vector_bytes(sequences)
        return size + (segments > 1) * 2 * segments * sequences * value_heads * self.segment_bytes

    @property
    def segment_bytes(self) -> int:
        """Bytes of a state and a transition of one segment and value head, fp32."""
        return 4 * self.prep.key_dim * (self.prep.value_dim + self.prep.key_dim)


def vector_bytes(sequences: int) -> int:
    """Bytes of N + 1 int32 numbers, filled up to a whole number of alignments."""
    return (4 * (sequences + 1) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
