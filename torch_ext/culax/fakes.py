"""Fake implementations: shapes, dtypes, strides and devices of outputs, for symbolic and for concrete sizes.

Outputs are contiguous whatever the inputs' strides. Nothing here compares a symbolic size with a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .grouped_wgrad import checks as grouped_checks
from .kda import checks as kda_checks
from .kda.problem import CHUNK


def kda_fwd(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o, final_state, Aqk, Akk)."""
    kda_checks.validate_forward(*arguments)
    q, _, v, _, _, initial_state, cu_seqlens, _, output_final_state = arguments
    batch, tokens, value_heads, value_dim = v.shape
    if not output_final_state:
        sequences = 0
    elif initial_state is None:
        sequences = kda_checks.sequence_count(q, cu_seqlens)
    else:
        # torch compares the size of cu_seqlens less one with 1, which would bar one sequence from an exported program.
        sequences = initial_state.shape[0]
    state = q.new_empty((sequences, value_heads, q.shape[3], value_dim), dtype=kda_checks.state_dtype(q.dtype))
    scores = [q.new_empty((batch, tokens, value_heads, CHUNK)) for _ in range(2)]
    return q.new_empty(v.shape), state, scores[0], scores[1]


def _state_gradient(q: Tensor, v: Tensor, initial_state: Tensor | None) -> Tensor:
    sequences = 0 if initial_state is None else initial_state.shape[0]
    return q.new_empty((sequences, v.shape[2], q.shape[3], v.shape[3]), dtype=kda_checks.state_dtype(q.dtype))


def kda_bwd(*arguments: Any) -> tuple[Tensor, ...]:
    """(dq, dk, dv, dg, dbeta, dinitial_state)."""
    kda_checks.validate_backward(*arguments)
    inputs = arguments[2:7]
    gradients = tuple(tensor.new_empty(tensor.shape) for tensor in inputs)
    return *gradients, _state_gradient(inputs[0], inputs[2], arguments[9])


def kda_bwd_bwd(*arguments: Any) -> tuple[Tensor, ...]:
    """(gdo, gdht, gq, gk, gv, gg, gbeta, ginitial_state); empty for inputs that are None."""
    kda_checks.validate_double_backward(*arguments)
    q = arguments[8]
    return tuple(q.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in arguments[6:14])


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """(T, N)."""
    grouped_checks.validate_mm(x, weight, offs)
    return x.new_empty((x.shape[0], weight.shape[2]))


def grouped_wgrad(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    global_scale_a: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    scale_layout: str = "padded",
    operand_layout: str = "2d",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """(E, M, N)."""
    scales = (scale_a, scale_b, global_scale_a, global_scale_b)
    grouped_checks.validate_wgrad(mat_a, mat_b, offs, *scales, scale_layout, operand_layout, out_dtype)
    dtype = out_dtype or grouped_checks.default_output_dtype(mat_a.dtype)
    return mat_a.new_empty((offs.shape[0], mat_a.shape[0], mat_b.shape[1]), dtype=dtype)


def grouped_wgrad_out(out: Tensor, *arguments: Any, **others: Any) -> None:
    """Nothing is returned."""
    grouped_checks.validate_wgrad_out(out, *arguments, **others)


def grouped_wgrad_out_list(outs: Sequence[Tensor], *arguments: Any, **others: Any) -> None:
    """Nothing is returned."""
    grouped_checks.validate_wgrad_out_list(outs, *arguments, **others)


FAKES: dict[str, Callable[..., Any]] = {
    "kda_fwd": kda_fwd,
    "kda_bwd": kda_bwd,
    "_kda_bwd_bwd": kda_bwd_bwd,
    "grouped_mm": grouped_mm,
    "grouped_wgrad": grouped_wgrad,
    "grouped_wgrad_out": grouped_wgrad_out,
    "grouped_wgrad_out_list": grouped_wgrad_out_list,
}
