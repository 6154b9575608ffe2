"""Tape images: tiles in the 128-byte swizzled layout of wgmma operands, in shared memory and in a tape's entries alike.

The image of a bf16 tile [R, D], R a multiple of 8 and D of 64, is D / 64 blocks of 64 columns one behind the other,
each R rows of 128 bytes whose eight 16-byte vectors change places with the row: element (r, c) is at

    (c // 64) * 64 R + 64 r + 8 ((c % 64 // 8) ^ (r % 8)) + c % 8.

So one bulk copy moves a tile, or 64 of its columns; wgmma reads it as an operand along either dimension, and ldmatrix
and stmatrix meet no bank conflicts. In shared memory an image begins at a multiple of 1024 bytes.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

_KINDS = warpgroup.SmemLayoutAtomKind


def image_layout(rows: int, columns: int, stages: int) -> cute.ComposedLayout:
    """[rows, columns, stages] to elements of shared memory."""
    atom = warpgroup.make_smem_layout_atom(_KINDS.K_SW128, cutlass.BFloat16)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def allocate_images(memory: cutlass.memory.SmemAllocator, rows: int, columns: int, stages: int = 1) -> cute.Tensor:
    """`stages` bf16 images as a tensor [rows, columns, stages]; the swizzle is the pointer's."""
    layout = image_layout(rows, columns, stages)
    return memory.allocate_tensor(cutlass.BFloat16, layout.outer, 1024, layout.inner)


def image_at(start: cute.Pointer, rows: int, columns: int) -> cute.Tensor:
    """One image over memory at hand, from a pointer of 1024-byte alignment, as a tensor [rows, columns, 1]."""
    layout = image_layout(rows, columns, 1)
    return cute.make_tensor(cute.recast_ptr(start, layout.inner, dtype=cutlass.BFloat16), layout.outer)


def transposed(images: cute.Tensor) -> cute.Tensor:
    """View of images [rows, columns, stages] as [columns, rows, stages]: the same operand along its other dimension."""
    rows, columns, stages = (cute.size(images, mode=[mode]) for mode in range(3))
    atom = warpgroup.make_smem_layout_atom(_KINDS.MN_SW128, cutlass.BFloat16)
    layout = cute.tile_to_shape(atom, (columns, rows, stages), order=(1, 0, 2))
    return cute.make_tensor(images.iterator, layout.outer)


def flat(image: cute.Tensor) -> cute.Tensor:
    """One image (or a block of its columns) as the vector of its elements in the order of memory, for bulk copies."""
    start = cute.recast_ptr(image.iterator, dtype=image.element_type)
    return cute.make_tensor(start, cute.make_layout((cute.size(image),)))
