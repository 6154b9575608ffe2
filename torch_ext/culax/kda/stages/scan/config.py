"""What the scan kernel is compiled for, and its shared memory as plain numbers."""

from dataclasses import dataclass

from culax.device.walks import Walk


@dataclass(frozen=True)
class ScanConfig(Walk):
    """See Walk."""

    stages: int = 4
    results: int = 2

    @property
    def stage_bytes(self) -> int:
        """-W and kg [64, K], U [64, 64] in bf16, the decay [K] in fp32."""
        return 2 * self.key_bytes + self.value_bytes + 4 * self.key_dim
