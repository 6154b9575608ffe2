"""A stand-in for the grouped kernel, and operands for it, on the CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

M, N, T = 16, 24, 8
ENDS = (3, 3, 8)


class Recorder:
    """Computes the product as the kernel would, in plain torch, and remembers its arguments.

    Outputs given by their addresses are fp32.
    """

    def __init__(self, accumulate: bool) -> None:
        self.accumulate = accumulate
        self.arguments: tuple = ()
        self.call = self

    def __call__(self, mat_a: Tensor, mat_b: Tensor, offs: Tensor, target: Tensor, workspace: Any, sms: int) -> None:
        self.arguments = (mat_a, mat_b, offs, target, workspace, sms)
        outs = target if target.dim() == 3 else [_matrix(address) for address in target[: len(offs)].tolist()]
        begin = 0
        for expert, end in enumerate(offs.tolist()):
            product = mat_a[:, begin:end].float() @ mat_b[begin:end].float()
            outs[expert].copy_(product + outs[expert] if self.accumulate else product)
            begin = end


def _matrix(address: int) -> Tensor:
    return torch.frombuffer((ctypes.c_float * (M * N)).from_address(address), dtype=torch.float32).view(M, N)


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(T, x, generator=generator).bfloat16() for x in (M, N))
    return a, b, torch.tensor(ENDS, dtype=torch.int32)


def shifted(tensor: Tensor) -> Tensor:
    """The same values at an address 8 bytes past one that is aligned to 16."""
    past = 8 // tensor.element_size()
    flat = torch.empty(tensor.numel() + past, dtype=tensor.dtype)
    flat[past:] = tensor.reshape(-1)
    return flat[past:].view(tensor.shape)


def expected(a: Tensor, b: Tensor) -> Tensor:
    starts = (0, *ENDS[:-1])
    return torch.stack([a[s:e].float().t() @ b[s:e].float() for s, e in zip(starts, ENDS)])
