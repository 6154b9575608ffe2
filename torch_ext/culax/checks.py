"""Argument checks shared by all ops: metadata everywhere, offset values where they are on the CPU.

Every failure is a ``ValueError`` that names the op, the argument, what was expected and what was got. Symbolic sizes
(of fake tensors under ``torch.compile`` or ``torch.export``) are never compared, so that no size becomes a constant of
a graph: the real op checks them when it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

OFFSET_DTYPES = (torch.int32, torch.int64)


def bad(op: str, argument: str, expected: str, got: object) -> ValueError:
    """The error of a bad argument; the caller raises it."""
    return ValueError(f"{op}: argument `{argument}`: expected {expected}, got {got}")


def differ(size: int | torch.SymInt, wanted: int | torch.SymInt) -> bool:
    """Whether two sizes are known to differ (symbolic ones never are)."""
    return isinstance(size, int) and isinstance(wanted, int) and size != wanted


def symbolic(tensor: Tensor) -> bool:
    """Whether a size or stride of the tensor is symbolic."""
    return not all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride()))


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """``bfloat16 or float32``, for messages."""
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))


def expect_rank(op: str, argument: str, tensor: Tensor, names: str) -> None:
    """The tensor has as many dimensions as ``names`` (``"B, T, H, K"``) has entries."""
    rank = names.count(",") + 1
    if tensor.dim() != rank:
        raise bad(op, argument, f"{rank} dimension{'s' if rank > 1 else ''} ({names})", f"shape {tuple(tensor.shape)}")


def expect_shape(op: str, argument: str, tensor: Tensor, names: str, shape: Sequence[int | torch.SymInt]) -> None:
    """The tensor's shape is ``shape``, whose sizes are called ``names`` in the message."""
    got = tensor.shape
    if len(got) != len(shape) or any(map(differ, got, shape)):
        raise bad(op, argument, f"shape ({names}) = {tuple(shape)}", tuple(got))


def expect_positive(op: str, argument: str, tensor: Tensor, dim: int, name: str) -> None:
    """Dimension ``dim`` (called ``name``) is not empty."""
    if not differ(tensor.shape[dim], 0) and isinstance(tensor.shape[dim], int):
        raise bad(op, argument, f"{name} of at least 1", f"shape {tuple(tensor.shape)}")


def expect_dtype(op: str, argument: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """The tensor's dtype is one of ``dtypes``."""
    if tensor.dtype not in dtypes:
        raise bad(op, argument, f"dtype {dtype_names(dtypes)}", str(tensor.dtype).removeprefix("torch."))


def expect_device(op: str, argument: str, tensor: Tensor, device: torch.device, first: str) -> None:
    """The tensor is on ``device``, that of the argument called ``first``."""
    if tensor.device != device:
        raise bad(op, argument, f"device {device} (that of `{first}`)", tensor.device)


def expect_offsets(op: str, argument: str, offsets: list[int], start: int | None, limit: int) -> None:
    """Offsets read on the CPU never descend, start at ``start`` (None: anywhere) and end at ``limit`` or before."""
    if start is not None and offsets[0] != start:
        raise bad(op, argument, f"a first offset of {start}", offsets[0])
    previous = 0
    for position, offset in enumerate(offsets):
        if offset < previous:
            raise bad(op, argument, f"offsets that never descend, from {previous} at position {position}", offset)
        previous = offset
    if previous > limit:
        raise bad(op, argument, f"offsets of at most T = {limit}", previous)


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """The first byte of the tensor's elements and the byte past its last one; equal for an empty tensor.

    Meaningless (0, 0) for tensors without memory (meta, fake).
    """
    if tensor.is_meta or tensor.numel() == 0:
        return 0, 0
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may share one address (expanded or otherwise overlapping strides); False if symbolic."""
    if symbolic(tensor):
        return False
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return False
        if size > 1 and stride < reach:
            return True
        reach += (size - 1) * stride
    return False


def _interleaved(low: Tensor, high: Tensor, gap: int) -> bool:
    """Whether two matrices of one row pitch, ``gap`` bytes apart, keep to different columns of it."""
    if low.dim() != 2 or low.stride() != high.stride() or low.dtype != high.dtype or low.stride(1) != 1:
        return False
    if not low.stride(0):  # of one row, which may have any stride
        return False
    column = gap // low.element_size() % low.stride(0)
    return column >= low.shape[1] and column + high.shape[1] <= low.stride(0)


def overlapping(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors may share memory (True is sure to be said when they do)."""
    (start, end), (other, other_end) = byte_range(first), byte_range(second)
    if max(start, other) >= min(end, other_end):
        return False
    low, high = (first, second) if start <= other else (second, first)
    return not _interleaved(low, high, abs(start - other))


def first_overlap(tensors: Sequence[Tensor], ranges: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The positions of two tensors that share memory, or None; ``ranges`` are their byte ranges.

    O(n log n) where the ranges are apart.
    """
    reaching: list[int] = []
    for position in sorted(range(len(tensors)), key=ranges.__getitem__):
        start, end = ranges[position]
        if start == end:
            continue
        reaching = [other for other in reaching if ranges[other][1] > start]
        for other in reaching:
            if overlapping(tensors[other], tensors[position]):
                return min(other, position), max(other, position)
        reaching.append(position)
    return None
