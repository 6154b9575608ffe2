"""Kimi Delta Attention token by token: the truth that every other path is tested against."""

import torch
from torch import Tensor


def kda_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run ``S <- diag(exp g_t) S;  S <- S + beta_t k_t (v_t - k_t^T S)^T;  o_t = scale S^T q_t`` over the tokens.

    Differentiable by autograd, in every argument but ``cu_seqlens`` and ``scale``. fp64 inputs are computed in fp64,
    all others in fp32. With ``cu_seqlens`` the offsets are read on the host: this is a yardstick for tests, not a path
    that an op takes.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H; value head h reads key head h // (HV // H).
        g: [B, T, HV, K], natural-log decay of each token (<= 0, not cumulated). beta: [B, T, HV].
        initial_state: [N, HV, K, V], or None for zeros.
        cu_seqlens: [N + 1] offsets of N sequences packed along T with B = 1; None for N = B sequences of T tokens.
        scale: factor on the output.

    Returns:
        o: [B, T, HV, V] in q's dtype, zero in rows outside ``cu_seqlens``.
        final_state: [N, HV, K, V] in fp32 (fp64 for fp64 inputs).
    """
    if cu_seqlens is None:
        return _one_length(q, k, v, g, beta, initial_state, scale)
    bounds = cu_seqlens.tolist()
    outputs = [v.new_zeros(1, bounds[0], *v.shape[2:], dtype=q.dtype)]
    states = []
    for n, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        state = None if initial_state is None else initial_state[n : n + 1]
        tokens = slice(start, end)
        o, state = _one_length(q[:, tokens], k[:, tokens], v[:, tokens], g[:, tokens], beta[:, tokens], state, scale)
        outputs.append(o)
        states.append(state)
    outputs.append(v.new_zeros(1, v.shape[1] - bounds[-1], *v.shape[2:], dtype=q.dtype))
    no_state = v.new_zeros(0, v.shape[2], k.shape[3], v.shape[3], dtype=_compute_dtype(q))
    return torch.cat(outputs, 1), torch.cat([no_state, *states])


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _one_length(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    dtype, group = _compute_dtype(q), v.shape[2] // q.shape[2]
    out_dtype = q.dtype
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    state = state.to(dtype)
    outputs = []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, :, None].exp()
        k_row, q_row = k[:, t, :, None, :], q[:, t, :, None, :]
        error = v[:, t, :, None, :] - k_row @ state
        state = state + k_row.mT @ (beta[:, t, :, None, None] * error)
        outputs.append((q_row @ state)[:, :, 0] * scale)
    o = torch.stack(outputs, 1) if outputs else v.clone()
    return o.to(out_dtype), state
