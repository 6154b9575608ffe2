"""What the chunk table kernels are compiled for, and their threads as plain numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkTableConfig:
    """The dtype of cu_seqlens ("int64" or "int32"), or "" for sequences of equal length without it."""

    offsets: str

    @property
    def scan_threads(self) -> int:
        """Threads of the one CTA that sums up the sequences' chunks; each takes one sequence a trip."""
        return 1024

    @property
    def fill_threads(self) -> int:
        """Threads of a CTA that writes table rows; each writes one."""
        return 256
