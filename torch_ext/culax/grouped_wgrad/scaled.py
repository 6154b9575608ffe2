"""Block-scaled operands as the SM90 kernel takes them: copies where they are not aligned, and the scales."""

from __future__ import annotations

import torch
from torch import Tensor

from culax.grouped_wgrad.problem import WgradProblem
from culax.reference.block_scaled import Scales

Arguments = tuple[Tensor, Tensor, Tensor | None, Tensor | None, int]
"""scale_a, scale_b, global_scale_a, global_scale_b, and 1 for the concatenated scale layout."""


def aligned(matrix: Tensor, ragged: bool) -> Tensor:
    """An operand (X, T / packed) with contiguous tokens on 16 bytes, its rows 16 bytes apart if 2-D."""
    if matrix.data_ptr() % 16 == 0:
        return matrix
    codes = matrix.view(torch.uint8)
    if ragged:
        return codes.clone().view(matrix.dtype)
    rows, columns = codes.shape
    copy = codes.new_empty((rows, -(-columns // 16) * 16))[:, :columns]
    return copy.copy_(codes).view(matrix.dtype)


def arguments(scales: Scales) -> Arguments:
    """The kernel's last arguments. A scale tensor without bytes becomes an atom of NaN: what it lacks is NaN."""
    a, b = (_block_scales(scale) for scale in (scales.a, scales.b))
    factors = [None if scale is None else scale.contiguous() for scale in (scales.global_a, scales.global_b)]
    return a, b, factors[0], factors[1], int(scales.layout == "concatenated")


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A square matrix of zeros of any operand dtype; narrow dtypes lack the kernel that fills them."""
    if dtype.itemsize > 1:
        return torch.zeros((size, size), dtype=dtype, device=device)
    return torch.zeros((size, size), dtype=torch.uint8, device=device).view(dtype)


def no_scales(problem: WgradProblem, device: torch.device) -> Scales:
    """Scales of the dtypes that a problem's kernel takes, for one expert without tokens."""
    nv = problem.block == 16
    kind = torch.float8_e4m3fn if nv else torch.float8_e8m0fnu
    block = zeros(128, kind, device)
    factor = torch.ones(1, dtype=torch.float32, device=device) if nv else None
    return Scales(block, block, factor, factor, problem.scale_layout)


def _block_scales(scale: Tensor) -> Tensor:
    if scale.numel() == 0:
        return torch.full((128, 4), 0xFF, dtype=torch.uint8, device=scale.device).view(scale.dtype)
    return scale if scale.data_ptr() % 16 == 0 else scale.view(torch.uint8).clone().view(scale.dtype)
