"""What the reverse scan kernel is compiled for, and its shared memory and threads as plain numbers."""

from dataclasses import dataclass

from culax.device.sizes import BLOCK, CHUNK, tile_elements


@dataclass(frozen=True)
class ReverseScanConfig:
    """Key and value dimension (64 or 128), value columns of one CTA, and chunks in flight."""

    key_dim: int
    value_dim: int
    columns: int = 32
    stages: int = 3

    @property
    def threads(self) -> int:
        """Four warps: warp w owns K / 4 rows of the state's gradient and 16 rows of dvn."""
        return CHUNK // BLOCK * 32

    @property
    def stage_bytes(self) -> int:
        """qg, -W and kg [64, K], Aqk [64, 64], do [64, columns] in bf16, the decay [K] in fp32."""
        keys, square, values = (tile_elements(CHUNK, n) for n in (self.key_dim, CHUNK, self.columns))
        return 2 * (3 * keys + square + values) + 4 * self.key_dim

    @property
    def smem_bytes(self) -> int:
        """The stages, the state's gradient [K, columns] and dvn [64, columns] as operands."""
        operands = tile_elements(self.key_dim, self.columns) + tile_elements(CHUNK, self.columns)
        return self.stages * self.stage_bytes + 2 * operands
