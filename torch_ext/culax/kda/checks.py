"""Checks of the KDA ops' arguments; the only place that builds a KdaProblem."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .. import checks
from .problem import CHUNK, KdaProblem

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of states and of their gradients for inputs of ``dtype``: fp64 for fp64, else fp32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def sequence_count(q: Tensor, cu_seqlens: Tensor | None) -> int:
    """N, the number of sequences: the batch, or one less than the entries of cu_seqlens."""
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def validate_common(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> None:
    """Check the metadata of the inputs that all KDA ops share (shapes, dtypes, devices; no values)."""
    checks.expect_rank(op, "q", q, "B, T, H, K")
    checks.expect_rank(op, "v", v, "B, T, HV, V")
    checks.expect_dtype(op, "q", q, FLOATS)
    batch, tokens, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    checks.expect_positive(op, "q", q, 2, "H")
    checks.expect_positive(op, "q", q, 3, "K")
    checks.expect_positive(op, "v", v, 2, "HV")
    checks.expect_positive(op, "v", v, 3, "V")
    checks.expect_shape(op, "k", k, "B, T, H, K", q.shape)
    checks.expect_shape(op, "v", v, "B, T, HV, V", (batch, tokens, value_heads, value_dim))
    if isinstance(heads, int) and isinstance(value_heads, int) and value_heads % heads:
        raise checks.bad(op, "v", f"HV a multiple of H = {heads}", f"HV = {value_heads}")
    checks.expect_shape(op, "g", g, "B, T, HV, K", (batch, tokens, value_heads, key_dim))
    checks.expect_shape(op, "beta", beta, "B, T, HV", (batch, tokens, value_heads))
    for name, tensor in (("k", k), ("v", v)):
        checks.expect_dtype(op, name, tensor, (q.dtype,))
    for name, tensor in (("g", g), ("beta", beta)):
        checks.expect_dtype(op, name, tensor, (q.dtype, torch.float32))
    for name, tensor in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        checks.expect_device(op, name, tensor, q.device, "q")
    if cu_seqlens is not None:
        checks.expect_rank(op, "cu_seqlens", cu_seqlens, "N+1")
        checks.expect_positive(op, "cu_seqlens", cu_seqlens, 0, "N+1")
        checks.expect_dtype(op, "cu_seqlens", cu_seqlens, checks.OFFSET_DTYPES)
        checks.expect_device(op, "cu_seqlens", cu_seqlens, q.device, "q")
        if checks.differ(batch, 1):
            raise checks.bad(op, "q", "B = 1 with cu_seqlens", f"B = {batch}")
    if initial_state is not None:
        expect_state(op, "initial_state", initial_state, q, v, cu_seqlens)
    if isinstance(scale, float) and not math.isfinite(scale):
        raise checks.bad(op, "scale", "a finite number", scale)


def expect_state(op: str, argument: str, state: Tensor, q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> None:
    """Check a state or a state's gradient: (N, HV, K, V) in the states' dtype on q's device."""
    shape = (sequence_count(q, cu_seqlens), v.shape[2], q.shape[3], v.shape[3])
    checks.expect_shape(op, argument, state, "N, HV, K, V", shape)
    checks.expect_dtype(op, argument, state, (state_dtype(q.dtype),))
    checks.expect_device(op, argument, state, q.device, "q")


def expect_like(op: str, argument: str, tensor: Tensor, names: str, like: Tensor) -> None:
    """Check a tensor that has the shape, dtype and device of ``like``."""
    checks.expect_shape(op, argument, tensor, names, like.shape)
    checks.expect_dtype(op, argument, tensor, (like.dtype,))
    checks.expect_device(op, argument, tensor, like.device, "q")


def validate_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    output_final_state: bool,
) -> None:
    """Check kda_fwd's metadata."""
    validate_common("kda_fwd", q, k, v, g, beta, initial_state, cu_seqlens, scale)


def validate_backward(
    do: Tensor | None,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    Aqk: Tensor | None,
    Akk: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> None:
    """Check kda_bwd's metadata."""
    op = "kda_bwd"
    validate_common(op, q, k, v, g, beta, initial_state, cu_seqlens, scale)
    _validate_output_gradients(op, do, dht, q, v, cu_seqlens)
    if (Aqk is None) != (Akk is None):
        missing, given = ("Aqk", "Akk") if Aqk is None else ("Akk", "Aqk")
        raise checks.bad(op, missing, f"a tensor, as `{given}` is given (both or neither)", None)
    for name, tensor in (("Aqk", Aqk), ("Akk", Akk)):
        if tensor is not None:
            checks.expect_shape(op, name, tensor, "B, T, HV, 64", (*v.shape[:3], CHUNK))
            checks.expect_dtype(op, name, tensor, (q.dtype,))
            checks.expect_device(op, name, tensor, q.device, "q")


def _validate_output_gradients(
    op: str, do: Tensor | None, dht: Tensor | None, q: Tensor, v: Tensor, cu_seqlens: Tensor | None
) -> None:
    if do is not None:
        expect_like(op, "do", do, "B, T, HV, V", v)
    if dht is not None:
        expect_state(op, "dht", dht, q, v, cu_seqlens)


def validate_double_backward(
    gdq: Tensor | None,
    gdk: Tensor | None,
    gdv: Tensor | None,
    gdg: Tensor | None,
    gdbeta: Tensor | None,
    gdinitial_state: Tensor | None,
    do: Tensor | None,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> None:
    """Check _kda_bwd_bwd's metadata."""
    op = "_kda_bwd_bwd"
    validate_common(op, q, k, v, g, beta, initial_state, cu_seqlens, scale)
    _validate_output_gradients(op, do, dht, q, v, cu_seqlens)
    pairs = (
        ("gdq", gdq, "B, T, H, K", q),
        ("gdk", gdk, "B, T, H, K", k),
        ("gdv", gdv, "B, T, HV, V", v),
        ("gdg", gdg, "B, T, HV, K", g),
        ("gdbeta", gdbeta, "B, T, HV", beta),
    )
    for name, tensor, names, like in pairs:
        if tensor is not None:
            expect_like(op, name, tensor, names, like)
    if gdinitial_state is not None:
        if initial_state is None:
            raise checks.bad(op, "gdinitial_state", "None, as there is no initial_state", tuple(gdinitial_state.shape))
        expect_state(op, "gdinitial_state", gdinitial_state, q, v, cu_seqlens)


VALIDATORS: dict[str, tuple[Callable[..., None], int]] = {
    "kda_fwd": (validate_forward, 0),
    "kda_bwd": (validate_backward, 2),
    "_kda_bwd_bwd": (validate_double_backward, 8),
}
"""Each op's check and the position of its argument q."""


def signature(arguments: tuple) -> tuple:
    """A key that equals another call's only if every metadata check gives the same answer and strides are equal."""
    return tuple(
        [
            (argument.shape, argument.stride(), argument.dtype, argument.device)
            if isinstance(argument, Tensor)
            else argument
            for argument in arguments
        ]
    )


def build(op: str, arguments: tuple) -> KdaProblem:
    """Check the arguments of ``op`` (in schema order) and describe the call."""
    validate, first = VALIDATORS[op]
    validate(*arguments)
    q, _, v, g, beta = arguments[first : first + 5]
    cu_seqlens = arguments[-3] if op == "kda_fwd" else arguments[-2]
    return KdaProblem(
        op=op,
        batch=q.shape[0],
        tokens=q.shape[1],
        heads=q.shape[2],
        value_heads=v.shape[2],
        key_dim=q.shape[3],
        value_dim=v.shape[3],
        sequences=sequence_count(q, cu_seqlens),
        varlen=cu_seqlens is not None,
        dtype=q.dtype,
        gate_dtype=g.dtype,
        beta_dtype=beta.dtype,
        state_dtype=state_dtype(q.dtype),
        device_type=q.device.type,
    )


def expect_cu_seqlens(op: str, q: Tensor, cu_seqlens: Tensor | None) -> None:
    """Check the values of cu_seqlens where reading them costs nothing: on the CPU."""
    if cu_seqlens is not None and cu_seqlens.is_cpu:
        checks.expect_offsets(op, "cu_seqlens", cu_seqlens.tolist(), 0, q.shape[1])
