"""What the local kernel is compiled for, and its shared memory and threads as plain numbers."""

from dataclasses import dataclass

from culax.device.sizes import BLOCK, CHUNK, barrier_bytes, tile_elements

KEYS = 32
"""Key columns of a warp: one a lane when it works on columns."""


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
    def groups(self) -> int:
        """Warps that share a block of 16 rows; each has 32 key columns."""
        return self.key_dim // KEYS

    @property
    def threads(self) -> int:
        """One thread a block of 16 rows and key column."""
        return CHUNK // BLOCK * self.key_dim

    @property
    def state_bytes(self) -> int:
        """A slot that holds h or dh [K, V] in bf16 first and a [64, K] tile of fp32 later."""
        return max(2 * tile_elements(self.key_dim, self.value_dim), 4 * tile_elements(CHUNK, self.key_dim))

    @property
    def row_elements(self) -> int:
        """Elements of a slot that holds a [64, V] tile first and a [64, K] tile later."""
        return tile_elements(CHUNK, max(self.key_dim, self.value_dim))

    @property
    def vector_floats(self) -> int:
        """fp32 scratch: E's and dL's diagonal blocks [64, 16], sums over blocks [4, K] twice, h dh [K], beta and two
        sums by row."""
        return 2 * CHUNK * BLOCK + (2 * CHUNK // BLOCK + 1) * self.key_dim + CHUNK * (1 + 2 * self.groups)

    @property
    def smem_bytes(self) -> int:
        """q, k; v, v_new, dvn, do; two state slots; P, E and two squares; scratch; a barrier."""
        rows = 2 * tile_elements(CHUNK, self.key_dim) + 4 * self.row_elements
        return (
            2 * (rows + 4 * tile_elements(CHUNK, CHUNK))
            + 2 * self.state_bytes
            + 4 * self.vector_floats
            + barrier_bytes(1)
        )
