"""What chunk_kda does to its inputs before the op: the decay gate, the l2 norm of q and k, the sigmoid of beta.

Gate, with z = g + dt_bias (A = A_log per value head):

- softplus form: gamma = -e^A softplus(z); dz = -e^A sigmoid(z) dgamma; dA = sum dgamma gamma.
- bounded form:  gamma = lower_bound sigmoid(e^A z); dz = lower_bound s (1 - s) e^A dgamma; dA = sum dz z.

Everything is computed in fp32 (fp64 for fp64 inputs); a gradient is rounded to its input's dtype once, after the sums.
e^A overflows fp32 at A = 89, and the products above then read inf * 0. So the softplus form works with A + log
softplus(z), and the bounded form limits e^A.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

L2NORM_EPS = 1e-6

# exp(-128) is below the smallest fp32 number and 1e-40 of fp64's precision: the state is erased either way, and a
# finite gate keeps the cumulated sums exact for the tokens after it.
_STRONGEST_GATE = 128.0
_LOG_STRONGEST_GATE = math.log(_STRONGEST_GATE)
# Below it softplus(z) = e^z (1 - e^z / 2 + ...) and its logarithm is z - e^z / 2 to fp64's precision.
_SMALL_Z = -18.0


def compute_dtype(x: Tensor) -> torch.dtype:
    """fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _log_softplus(z: Tensor) -> Tensor:
    small = z - 0.5 * z.clamp(max=0.0).exp()
    return torch.where(z < _SMALL_Z, small, F.softplus(z.clamp(min=_SMALL_Z), threshold=40.0).log())


def _rate_limit(dtype: torch.dtype) -> float:
    """Largest A used. (e^A)^3 is finite: room for the sum over tokens and the norm of a gradient at z = 0."""
    return math.log(torch.finfo(dtype).max) / 3


def _bias_sum(g: Tensor, dt_bias: Tensor | None) -> Tensor:
    z = g.to(compute_dtype(g))
    if dt_bias is not None:
        z = z + dt_bias.to(z.dtype).view(g.shape[-2:])
    return z


def _gate_values(z: Tensor, A_log: Tensor | None, lower_bound: float | None) -> Tensor:
    if lower_bound is None:
        assert A_log is not None
        log_rate = A_log.to(z.dtype).view(-1, 1) + _log_softplus(z)
        return -log_rate.clamp(max=_LOG_STRONGEST_GATE).exp()
    if A_log is not None:
        z = A_log.to(z.dtype).clamp(max=_rate_limit(z.dtype)).exp().view(-1, 1) * z
    return lower_bound * torch.sigmoid(z)


class _Gate(torch.autograd.Function):
    """The gate with only its inputs kept for the backward; the backward is made of differentiable torch calls."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
        return _gate_values(_bias_sum(g, dt_bias), A_log, lower_bound)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor | None, Tensor | None, float | None], output: Tensor
    ) -> None:
        g, A_log, dt_bias, ctx.lower_bound = inputs
        ctx.save_for_backward(g, A_log, dt_bias)

    @staticmethod
    def backward(ctx: Any, dgamma: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        g, A_log, dt_bias = ctx.saved_tensors
        z = _bias_sum(g, dt_bias)
        token_dims = tuple(range(g.dim() - 2))
        dA = dbias = None
        if ctx.lower_bound is None:
            log_rate = A_log.to(z.dtype).view(-1, 1) + _log_softplus(z)
            within = log_rate < _LOG_STRONGEST_GATE
            # sigmoid(z) <= softplus(z): within the limit the exponent below is within it too
            log_slope = (A_log.to(z.dtype).view(-1, 1) + F.logsigmoid(z)).clamp(max=_LOG_STRONGEST_GATE)
            dz = torch.where(within, -log_slope.exp() * dgamma, 0.0)
            if ctx.needs_input_grad[1]:
                per_token = torch.where(within, -log_rate.clamp(max=_LOG_STRONGEST_GATE).exp() * dgamma, 0.0)
        else:
            if A_log is None:
                rate = z.new_ones(())
            else:
                rate = A_log.to(z.dtype).clamp(max=_rate_limit(z.dtype)).exp().view(-1, 1)
            # sigmoid(-x) instead of 1 - sigmoid(x), which cancels where the sigmoid saturates
            dz = ctx.lower_bound * torch.sigmoid(rate * z) * torch.sigmoid(-rate * z) * rate * dgamma
            if ctx.needs_input_grad[1]:
                per_token = dz * z
        if ctx.needs_input_grad[1]:
            dA = per_token.sum((*token_dims, -1)).view(A_log.shape).to(A_log.dtype)
        if ctx.needs_input_grad[2]:
            dbias = dz.sum(token_dims).reshape(dt_bias.shape).to(dt_bias.dtype)
        return dz.to(g.dtype), dA, dbias, None


def decay_gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Natural-log decay per token from the raw gate input.

    g [..., HV, K], any floating dtype; A_log [HV] (optional in the bounded form, where e^A is then 1); dt_bias [HV*K]
    or [HV, K] or None; lower_bound None (softplus form) or a negative number (bounded form). Returns [..., HV, K], at
    most 0, in fp32 (fp64 for fp64 g). Softplus gates stronger than -128 are returned as -128: exp of either is 0 in
    fp32. The bounded form takes e^A as at most 6.9e12 (5.6e102 in fp64). Formulas: the module's docstring.
    """
    return _Gate.apply(g, A_log, dt_bias, lower_bound)


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, computed in fp32 (fp64 for fp64), returned in x's dtype."""
    wide = x.to(compute_dtype(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2NORM_EPS)).to(x.dtype)


def beta_gate(beta: Tensor, allow_neg_eigval: bool) -> Tensor:
    """sigmoid(beta), or 2 sigmoid(beta) where negative eigenvalues are allowed; fp32 (fp64 for fp64), any shape."""
    wide = torch.sigmoid(beta.to(compute_dtype(beta)))
    return 2.0 * wide if allow_neg_eigval else wide
