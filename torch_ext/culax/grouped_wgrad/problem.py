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


TORCH_GROUPS = 1024
"""torch's grouped product raises from this many groups on."""


def _aligned(strides: tuple[int, ...], sizes: tuple[int, int]) -> bool:
    """Whether a bf16 matrix is row- or column-major with a pitch of 16 bytes, as torch's kernel wants it."""
    (outer, inner), (rows, columns) = strides, sizes
    row_major = inner == 1 and outer >= columns and outer % 8 == 0
    return row_major or (outer == 1 and inner >= rows and inner % 8 == 0)


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

    def refused_by_torch(self, capability: tuple[int, int]) -> str:
        """Why torch's grouped product has no kernel of its own here (its fallback synchronises); empty where it has."""
        if self.dtype is not torch.bfloat16:
            return f"torch.nn.functional.grouped_mm has kernels for bfloat16 only, not {self.dtype}"
        if capability[0] < 9:
            return f"compute capability {capability[0]}.{capability[1]}: torch's grouped product needs 9.0"
        if not (self.tokens and self.k and self.n and self.experts):
            return "an empty operand"
        if self.experts >= TORCH_GROUPS:
            return f"{self.experts} experts: torch's kernel takes fewer than {TORCH_GROUPS} groups"
        sides = (("x", self.x_strides, (self.tokens, self.k)), ("weight", self.weight_strides[1:], (self.k, self.n)))
        for name, strides, sizes in sides:
            if not _aligned(strides, sizes) or (name == "weight" and self.weight_strides[0] % 8):
                return f"`{name}` has strides {strides}: torch's kernel needs 16-byte ones, one dimension dense"
        if self.x_strides[1] != 1:
            return (
                f"`x` has strides {self.x_strides}: torch's kernel asserts on groups off 8 rows unless rows are dense"
            )
        return ""
