"""What the scan kernel is compiled for, and its shared memory and threads as plain numbers."""

from dataclasses import dataclass

from culax.device.sizes import BLOCK, CHUNK, barrier_bytes, tile_elements


@dataclass(frozen=True)
class ScanConfig:
    """Key and value dimension (64 or 128), value columns of one CTA, and chunks in flight."""

    key_dim: int
    value_dim: int
    columns: int = 32
    stages: int = 3

    @property
    def warps(self) -> int:
        """Each makes a block of 16 by 16 of [64, columns]."""
        return CHUNK // BLOCK * self.columns // BLOCK

    @property
    def threads(self) -> int:
        """32 a warp."""
        return 32 * self.warps

    @property
    def widths(self) -> tuple[int, int]:
        """Value columns of a CTA, and of a warp's share of the state, which has 16 rows."""
        return self.columns, self.columns * self.key_dim // BLOCK // self.warps

    @property
    def stage_bytes(self) -> int:
        """-W and kg [64, K], U [64, columns] in bf16, the decay [K] in fp32."""
        tiles = 2 * tile_elements(CHUNK, self.key_dim) + tile_elements(CHUNK, self.columns)
        return 2 * tiles + 4 * self.key_dim

    @property
    def smem_bytes(self) -> int:
        """The stages, the state [K, columns] twice and v_new [64, columns] as operands."""
        operands = 2 * tile_elements(self.key_dim, self.columns) + tile_elements(CHUNK, self.columns)
        return self.stages * self.stage_bytes + barrier_bytes(self.stages) + 2 * operands
