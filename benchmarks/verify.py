"""The correctness gate: an implementation's outputs on the case's own inputs against float64, group by group."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.case import Case, Gate, Inputs, Outputs, Prepare

# A group whose own norm is far below its neighbours' is compared with this share of the root-mean-square group norm.
NORM_FLOOR = 0.05


def group_errors(
    got: torch.Tensor, truth: torch.Tensor, group_dims: tuple[int, ...], scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Relative Frobenius error of each group; `group_dims` index the groups, the other dimensions are reduced.

    `scale` (of truth's shape) takes truth's place as what errors are relative to, where truth is a sum that cancels.

    Returns a float64 tensor of the groups' shape; NaN and infinities in `got` come out as infinity.
    """
    if got.shape != truth.shape:
        raise ValueError(f"expected shape {tuple(truth.shape)}, got {tuple(got.shape)}")
    dims = [d for d in range(truth.dim()) if d not in group_dims]
    difference = torch.linalg.vector_norm(got.double() - truth.double(), dim=dims) if dims else (got - truth).abs()
    base = (truth if scale is None else scale).double()
    norm = torch.linalg.vector_norm(base, dim=dims) if dims else base.abs()
    floor = NORM_FLOOR * norm.square().mean().sqrt() if norm.numel() else norm.new_zeros(())
    # Exact zeros must be met exactly: 0/0 is no error, x/0 is an infinite one.
    errors = torch.where(difference == 0, torch.zeros_like(difference), difference / norm.maximum(floor))
    return torch.nan_to_num(errors, nan=torch.inf, posinf=torch.inf)


def worst(
    outputs: Outputs,
    truth: Outputs,
    groups: Mapping[str, tuple[int, ...]],
    bound: float,
    scales: Mapping[str, torch.Tensor] | None = None,
) -> Gate:
    """Gate over all outputs named in `truth`: the worst group anywhere must stay within `bound` (see group_errors)."""
    scales = scales or {}
    error, place = 0.0, "none"
    for name, expected in truth.items():
        errors = group_errors(outputs[name], expected, groups[name], scales.get(name))
        if errors.numel() and (peak := errors.max().item()) >= error:
            index = torch.unravel_index(errors.argmax(), errors.shape)
            error, place = peak, f"{name}[{', '.join(str(int(i)) for i in index)}]"
    return Gate(error <= bound, error, bound, place)


def verify(case: Case, prepare: Prepare, inputs: Inputs, truth: Outputs) -> Gate:
    """Run the implementation once on `inputs` and hold it against `truth`."""
    return case.gate(prepare(inputs)(), truth)
