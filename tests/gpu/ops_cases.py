"""Calls that the GPU op tests share: inputs that take the kernels and inputs that take the torch path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.ops import cases

OPS = torch.ops.culax
BF16 = torch.bfloat16


def kernel_kda(tokens: int = 200, lengths: tuple[int, ...] | None = None, batch: int = 1, heads: int = 2) -> cases.Kda:
    """bf16, K = V = 64, fp32 gates: what the SM90 kernels take."""
    sizes = (2, heads, 64, 64)
    return cases.kda(batch, tokens, BF16, torch.float32, lengths, True, sizes, "cuda")


def torch_kda(tokens: int = 70, lengths: tuple[int, ...] | None = None) -> cases.Kda:
    """fp32 and odd sizes: the torch path."""
    return cases.kda(1, tokens, torch.float32, None, lengths, True, (1, 2, 8, 4), "cuda")


def kernel_wgrad(
    sizes: tuple[int, ...] = (65, 0, 130, 1), tail: int = 4, m: int = 64, n: int = 72
) -> tuple[Tensor, ...]:
    """bf16, M and N multiples of 8."""
    return cases.wgrad(sizes, m, n, tail, BF16, "cuda")


def calls() -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Every op, on both paths, as a function without arguments over inputs that stay where they are."""
    found: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    kdas = {
        "kernel": kernel_kda(),
        "kernel_grouped": kernel_kda(heads=4),
        "kernel_packed": kernel_kda(lengths=(1, 0, 64, 130)),
        "torch": torch_kda(),
        "torch_packed": torch_kda(lengths=(1, 0, 60)),
    }
    for name, case in kdas.items():
        found[f"kda_fwd_{name}"] = case.forward
        found[f"kda_bwd_{name}"] = lambda case=case: case.backward(case.v, case.initial_state)
    double = kdas["torch"]
    found["kda_bwd_bwd"] = lambda: OPS._kda_bwd_bwd(*double.differentiable, double.v, None, *double.arguments)
    for name, (mat_a, mat_b, offs) in {"kernel": kernel_wgrad(), "torch": cases.wgrad(device="cuda")}.items():
        weight = cases.normal(9, 4, mat_b.shape[1], 64, dtype=mat_b.dtype, device="cuda")
        out = torch.zeros(4, mat_a.shape[0], mat_b.shape[1], device="cuda")
        outs = list(torch.zeros_like(out))
        found[f"grouped_mm_{name}"] = lambda b=mat_b, w=weight, offs=offs: (OPS.grouped_mm(b, w, offs),)
        found[f"grouped_wgrad_{name}"] = lambda a=mat_a, b=mat_b, offs=offs: (OPS.grouped_wgrad(a, b, offs),)

        def dense(a: Tensor = mat_a, b: Tensor = mat_b, offs: Tensor = offs, out: Tensor = out) -> tuple[Tensor, ...]:
            OPS.grouped_wgrad_out(out.fill_(1), a, b, offs, accumulate=True)
            return (out.clone(),)

        def discrete(a: Tensor = mat_a, b: Tensor = mat_b, offs: Tensor = offs, outs: Any = outs) -> tuple[Tensor, ...]:
            OPS.grouped_wgrad_out_list(outs, a, b, offs)
            return tuple(out.clone() for out in outs)

        found[f"grouped_wgrad_out_{name}"], found[f"grouped_wgrad_out_list_{name}"] = dense, discrete
    for kind in ("e4m3", "nvfp4"):
        scaled = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in cases.scaled_wgrad(kind).items()}
        found[f"grouped_wgrad_{kind}"] = lambda scaled=scaled: (OPS.grouped_wgrad(**scaled),)
    return found


def double(case: cases.Kda) -> cases.Kda:
    """The same values in fp64: the truth for a case of a lower precision."""
    changed = {
        name: tensor.detach().double() for name in cases.KDA_INPUTS if (tensor := getattr(case, name)) is not None
    }
    return replace(case, **changed)


def relative(ours: Tensor, true: Tensor) -> float:
    """Relative Frobenius error of the whole tensor; the kernels' own tests bound it by head and chunk."""
    if true.numel() == 0:
        return 0.0
    return ((ours.double() - true.double()).norm() / true.double().norm().clamp(min=1e-30)).item()


def kda_loss(case: cases.Kda) -> Tensor:
    """A scalar that uses o and the final state."""
    o, final_state, _, _ = case.forward()
    return o.float().sin().sum() + final_state.sin().sum()
