"""What the prep kernel is compiled for, and its shared memory and threads as plain numbers."""

from dataclasses import dataclass

from culax.device.sizes import BLOCK, CHUNK, tile_elements


@dataclass(frozen=True)
class PrepConfig:
    """Key and value dimension, 64 or 128 each."""

    key_dim: int
    value_dim: int

    @property
    def threads(self) -> int:
        """One thread a block of 16 rows and pair of key columns."""
        return CHUNK // BLOCK * self.key_dim // 2

    @property
    def smem_bytes(self) -> int:
        """q, k, the operands of W and U as images, P, the gate sums of the blocks, beta."""
        images = CHUNK * (self.value_dim + 3 * self.key_dim)
        return 2 * (images + tile_elements(CHUNK, CHUNK)) + 4 * (CHUNK // BLOCK * self.key_dim + CHUNK)
