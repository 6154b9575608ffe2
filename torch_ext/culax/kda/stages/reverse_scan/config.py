"""What the reverse scan kernel is compiled for, and its shared memory as plain numbers."""

from dataclasses import dataclass

from culax.device.sizes import CHUNK
from culax.device.walks import Walk


@dataclass(frozen=True)
class ReverseScanConfig(Walk):
    """See Walk."""

    stages: int = 3
    results: int = 1

    @property
    def stage_bytes(self) -> int:
        """qg, -W and kg [64, K], do and Aqk [64, 64] in bf16, the decay [K] in fp32."""
        return 3 * self.key_bytes + self.value_bytes + 2 * CHUNK * CHUNK + 4 * self.key_dim
