"""Sizes that kernels, their configurations and host code agree on. Plain numbers; imports no kernel compiler."""

CHUNK = 64
"""Tokens of a chunk."""
BLOCK = 16
"""Rows of a block within a chunk: the rows of one warp's tensor-core product."""
PAD = 8
"""Elements of 2 bytes added to every row of a shared-memory tile."""
VECTOR = 8
"""Elements of 2 bytes in one 16-byte access."""


def tile_elements(rows: int, columns: int) -> int:
    """Elements that a padded tile [rows, columns] of a 2-byte type takes up."""
    return rows * (columns + PAD)


def barrier_bytes(count: int) -> int:
    """Bytes that `count` barriers take up before the next 16-byte boundary."""
    return -(-8 * count // 16) * 16
