"""`culax.chunk_kda`: Kimi Delta Attention with the names and meaning of `fla.ops.kda.chunk_kda`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from culax import checks
from culax.kda import gates

_NAME = "chunk_kda"

# Names of fla.ops.kda.chunk_kda that only steer how it computes: taken and not used.
_WITHOUT_EFFECT = frozenset({"cu_seqlens_cpu", "disable_recompute", "chunk_size", "use_graph", "max_num_seqs"})
# Names whose result isn't offered here: an "off" value is taken, any other raises.
_NOT_OFFERED = {
    "cp_context": "context parallelism isn't part of this release",
    "return_intermediate_states": "the states between chunks aren't returned",
}


def _check_others(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name in _NOT_OFFERED:
            if value is not None and value is not False:
                raise NotImplementedError(f"chunk_kda: argument `{name}`: {_NOT_OFFERED[name]}")
        elif name not in _WITHOUT_EFFECT:
            hint = "; it is named `state_v_first` here" if name == "transpose_state_layout" else ""
            raise TypeError(f"chunk_kda: unknown argument `{name}`{hint}")
    if others.get("chunk_size", 64) not in (32, 64):
        raise checks.bad(_NAME, "chunk_size", "32 or 64", others["chunk_size"])


def _without_ones(sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if size != 1]


def _check_numbers(**numbers: float | None) -> None:
    """A tensor in a number's place would be read on the host, and its gradient lost."""
    for name, number in numbers.items():
        if isinstance(number, Tensor):
            raise checks.bad(_NAME, name, "a number", f"a tensor of shape {tuple(number.shape)}")


def _check_gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, safe_gate: bool, lower_bound: float | None
) -> None:
    checks.expect_rank(_NAME, "g", g, "B, T, HV, K")
    value_heads, key_dim = g.shape[2], g.shape[3]
    if lower_bound is None:
        if safe_gate:
            raise checks.bad(_NAME, "lower_bound", "a number with safe_gate=True", None)
        if A_log is None:
            raise checks.bad(_NAME, "A_log", "a tensor [HV] for the softplus gate", None)
    elif not -math.inf < lower_bound < 0:
        raise checks.bad(_NAME, "lower_bound", "a negative number", lower_bound)
    elif safe_gate and lower_bound < -5:
        raise checks.bad(_NAME, "lower_bound", "-5 <= lower_bound < 0 with safe_gate=True", lower_bound)
    for name, value, sizes, names in (
        ("A_log", A_log, (value_heads,), f"HV = {value_heads}"),
        ("dt_bias", dt_bias, (value_heads, key_dim), f"HV*K = {value_heads}*{key_dim}"),
    ):
        if value is None:
            continue
        # As a vector or with a dimension a size, in their order; dimensions of size 1 anywhere.
        given = _without_ones(value.shape)
        if given != _without_ones(sizes) and given != _without_ones((math.prod(sizes),)):
            raise checks.bad(_NAME, name, f"{names} elements", f"shape {tuple(value.shape)}")
        if not value.is_floating_point():
            raise checks.bad(_NAME, name, "a floating dtype", value.dtype)
        checks.expect_device(_NAME, name, value, g.device, "g")


def _check_state_v_first(initial_state: Tensor, q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> None:
    checks.expect_rank(_NAME, "v", v, "B, T, HV, V")
    sequences = q.shape[0]
    if cu_seqlens is not None:
        checks.expect_rank(_NAME, "cu_seqlens", cu_seqlens, "N+1")
        sequences = cu_seqlens.shape[0] - 1
    shape = (sequences, v.shape[2], v.shape[3], q.shape[3])
    checks.expect_shape(_NAME, "initial_state", initial_state, "N, HV, V, K", shape)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over whole sequences, differentiable in every floating tensor.

    Per sequence and value head, with S a K x V state: S <- diag(exp gamma_t) S;
    S <- S + beta_t k_t (v_t - S^T k_t)^T; o_t = scale S^T q_t.

    Args:
        q, k: [B, T, H, K], one dtype with v (bf16, fp16, fp32, fp64).
        v: [B, T, HV, V]; HV a multiple of H (value head h reads key head h // (HV / H)).
        g: [B, T, HV, K], in q's dtype or fp32: the natural-log decay gamma per token (at most 0, finite, not
            cumulated; -128 erases the state, -inf gives NaN), or the gate's raw input with use_gate_in_kernel.
        beta: [B, T, HV], in q's dtype or fp32: the step, or its logit with use_beta_sigmoid_in_kernel.
        scale: factor of the output; K**-0.5 by default.
        initial_state: [N, HV, K, V] fp32 (fp64 for fp64 inputs); zero by default. N = B, or the number of sequences.
        output_final_state: return the state after the last token.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum of squares + 1e-6) over K first.
        use_gate_in_kernel: gamma is computed from z = g + dt_bias: -exp(A_log) softplus(z), or with lower_bound the
            bounded form lower_bound sigmoid(exp(A_log) z). Softplus gates stronger than -128 count as -128, and in the
            bounded form exp(A_log) as at most 6.9e12 (5.6e102 for fp64), so that gradients stay finite.
        use_beta_sigmoid_in_kernel: beta is sigmoid(beta).
        allow_neg_eigval: beta is 2 sigmoid(beta); needs use_beta_sigmoid_in_kernel.
        safe_gate: asks for the bounded form: lower_bound must then be given, in [-5, 0).
        lower_bound: the gate's lower bound in log space per token; negative.
        state_v_first: states are [N, HV, V, K] on input and output.
        cu_seqlens: [N+1] int32 or int64, start offsets of N sequences packed in one row (B = 1) and their end.
        A_log: [HV], log of the gate's rate; optional with lower_bound (exp(A_log) is then 1).
        dt_bias: [HV*K] or [HV, K], added to g; optional. Both may have dimensions of size 1 besides.
        **others: cu_seqlens_cpu, disable_recompute, chunk_size, use_graph and max_num_seqs are taken and change
            nothing.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state in the states' dtype and layout, or None where it wasn't asked
        for.

    Raises:
        ValueError: a tensor, size or combination of options that has no meaning; the message names argument, expected
            and got.
        NotImplementedError: cp_context or return_intermediate_states is set.
        TypeError: an unknown argument name.

    The gate, the norm and the sigmoid are computed in fp32 (fp64 for fp64), whatever the inputs' dtype. Recurrence and
    gate are those of Kimi Linear (arXiv:2510.26692); argument names are those of flash-linear-attention.
    """
    _check_others(others)
    _check_numbers(scale=scale, lower_bound=lower_bound)
    checks.expect_rank(_NAME, "q", q, "B, T, H, K")
    checks.expect_positive(_NAME, "q", q, 3, "K")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise checks.bad(_NAME, "allow_neg_eigval", "use_beta_sigmoid_in_kernel=True with it", False)
    for name, value, used in (("g", g, use_gate_in_kernel), ("beta", beta, use_beta_sigmoid_in_kernel)):
        if used and not value.is_floating_point():
            raise checks.bad(_NAME, name, "a floating dtype", value.dtype)
    if use_gate_in_kernel:
        _check_gate(g, A_log, dt_bias, safe_gate, lower_bound)
        g = gates.decay_gate(g, A_log, dt_bias, lower_bound)
    if use_qk_l2norm_in_kernel:
        q, k = gates.l2norm(q), gates.l2norm(k)
    if use_beta_sigmoid_in_kernel:
        beta = gates.beta_gate(beta, allow_neg_eigval)
    if state_v_first and initial_state is not None:
        _check_state_v_first(initial_state, q, v, cu_seqlens)
        initial_state = initial_state.transpose(-1, -2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, final_state, _, _ = torch.ops.culax.kda_fwd(
        q, k, v, g, beta, initial_state, cu_seqlens, scale, output_final_state
    )
    if not output_final_state:
        return o, None
    return o, final_state.transpose(-1, -2).contiguous() if state_v_first else final_state
