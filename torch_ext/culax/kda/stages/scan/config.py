"""What the scan kernel is compiled for, and its shared memory and threads as plain numbers."""

from dataclasses import dataclass

from culax.device.sizes import BLOCK, CHUNK, tile_elements


@dataclass(frozen=True)
class ScanConfig:
    """Key and value dimension (64 or 128), value columns of one CTA, and chunks in flight."""

    key_dim: int
    value_dim: int
    columns: int = 32
    stages: int = 3

    @property
    def threads(self) -> int:
        """Four warps: warp w owns K / 4 rows of the state and 16 rows of v_new."""
        return CHUNK // BLOCK * 32

    @property
    def stage_bytes(self) -> int:
        """-W and kg [64, K], U [64, columns] in bf16, the decay [K] in fp32."""
        tiles = 2 * tile_elements(CHUNK, self.key_dim) + tile_elements(CHUNK, self.columns)
        return 2 * tiles + 4 * self.key_dim

    @property
    def smem_bytes(self) -> int:
        """The stages, the state [K, columns] and v_new [64, columns] as operands."""
        operands = tile_elements(self.key_dim, self.columns) + tile_elements(CHUNK, self.columns)
        return self.stages * self.stage_bytes + 2 * operands
