"""What one grouped product asks for: pure metadata, hashable, the input of dispatch and of the kernel plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class WgradProblem:
    """Sizes, dtypes and strides (in elements of the tensor as it is stored) of one grouped weight gradient.

    ``tokens`` counts elements, not packed bytes. ``block`` is the number of tokens that share a scale: 0 without, 32
    for MXFP8, 16 for NVFP4; ``scale_layout`` is empty without scales. ``discrete``: one output tensor an expert.
    """

    family: ClassVar[str] = "grouped_wgrad"

    m: int
    n: int
    tokens: int
    experts: int
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    a_strides: tuple[int, ...]
    b_strides: tuple[int, ...]
    operand_layout: str
    scale_layout: str
    block: int
    discrete: bool
    accumulate: bool
    device_type: str


@dataclass(frozen=True)
class GroupedMmProblem:
    """Sizes, dtype and strides of one grouped product of (tokens, k) rows with (experts, k, n) weights."""

    family: ClassVar[str] = "grouped_mm"

    tokens: int
    k: int
    n: int
    experts: int
    dtype: torch.dtype
    x_strides: tuple[int, ...]
    weight_strides: tuple[int, ...]
    device_type: str
