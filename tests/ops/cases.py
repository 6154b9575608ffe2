"""Inputs that the op tests share: small, deterministic, on any device."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

import culax  # noqa: F401 (registers the ops)
from tests import quantize

OPS = torch.ops.culax
KDA_INPUTS = ("q", "k", "v", "g", "beta", "initial_state")


@dataclass(frozen=True)
class Kda:
    """The inputs of kda_fwd."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    scale: float = 0.5

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All inputs in schema order, without output_final_state."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def differentiable(self) -> list[Tensor]:
        """The inputs that have gradients."""
        return [tensor for name in KDA_INPUTS if (tensor := getattr(self, name)) is not None]

    def forward(self, output_final_state: bool = True) -> tuple[Tensor, ...]:
        """kda_fwd."""
        return OPS.kda_fwd(*self.arguments, output_final_state)

    def backward(self, do: Tensor | None, dht: Tensor | None, scores: tuple[Tensor, Tensor] | None = None) -> tuple:
        """kda_bwd, with Aqk and Akk recomputed unless ``scores`` gives them."""
        *tensors, initial_state, cu_seqlens, scale = self.arguments
        return OPS.kda_bwd(do, dht, *tensors, *(scores or (None, None)), initial_state, cu_seqlens, scale)

    def requiring(self, *names: str) -> Kda:
        """The same values as new leaves; those called ``names`` (all, if none) require grad."""
        wanted = names or KDA_INPUTS
        changed = {
            name: tensor.detach().clone().requires_grad_(name in wanted)
            for name in KDA_INPUTS
            if (tensor := getattr(self, name)) is not None
        }
        return replace(self, **changed)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Standard normal values, the same for one seed whatever the dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)


def kda(
    batch: int = 1,
    tokens: int = 70,
    dtype: torch.dtype = torch.float64,
    gate_dtype: torch.dtype | None = None,
    lengths: tuple[int, ...] | None = None,
    state: bool = True,
    sizes: tuple[int, int, int, int] = (1, 2, 8, 4),
    device: str = "cpu",
) -> Kda:
    """KDA inputs; ``sizes`` is (H, HV, K, V); ``lengths`` packs sequences, a total below ``tokens`` leaves a tail."""
    heads, value_heads, key_dim, value_dim = sizes
    unit = torch.nn.functional.normalize
    q, k = (unit(normal(seed, batch, tokens, heads, key_dim, dtype=torch.float64), dim=-1) for seed in (1, 2))
    v = normal(3, batch, tokens, value_heads, value_dim, dtype=torch.float64)
    g = torch.nn.functional.logsigmoid(normal(4, batch, tokens, value_heads, key_dim, dtype=torch.float64))
    beta = normal(5, batch, tokens, value_heads, dtype=torch.float64).sigmoid()
    ends = None if lengths is None else torch.tensor((0, *lengths)).cumsum(0).to(device, torch.int32)
    sequences = batch if lengths is None else len(lengths)
    state_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    gate = gate_dtype or dtype
    initial = normal(6, sequences, value_heads, key_dim, value_dim, dtype=state_dtype, device=device) if state else None
    q, k, v = (tensor.to(device, dtype) for tensor in (q, k, v))
    return Kda(q, k, v, g.to(device, gate), beta.to(device, gate), initial, ends)


def wgrad(
    sizes: tuple[int, ...] = (3, 0, 66, 1),
    m: int = 6,
    n: int = 5,
    tail: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """(mat_a, mat_b, offs) of token-major operands; ``tail`` rows lie past the last expert."""
    tokens = sum(sizes) + tail
    a, b = normal(7, tokens, m, dtype=dtype, device=device), normal(8, tokens, n, dtype=dtype, device=device)
    offs = torch.tensor(sizes, dtype=torch.int32).cumsum(0).to(device, torch.int32)
    return a.t(), b, offs


def scaled_wgrad(
    kind: str, scale_layout: str = "padded", operand_layout: str = "2d", sizes: tuple[int, ...] = (128, 0, 256, 128)
) -> dict[str, Any]:
    """Keyword arguments of grouped_wgrad with block-scaled operands; ``kind``: e4m3, e5m2 or nvfp4."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    quantized = []
    for seed, rows in ((7, 6), (8, 5)):
        x = normal(seed, rows, ends[-1], dtype=torch.float64)
        if kind == "nvfp4":
            quantized.append(quantize.quantize_nv(x, ends, scale_layout, operand_layout))
        else:
            dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
            quantized.append(quantize.quantize_mx(x, ends, dtype, scale_layout, operand_layout))
    a, b = quantized
    offs = torch.tensor(ends, dtype=torch.int32)
    arguments: dict[str, Any] = {"mat_a": a.values, "mat_b": b.values.t(), "offs": offs}
    arguments |= {"scale_a": a.scale, "scale_b": b.scale}
    arguments |= {"scale_layout": scale_layout, "operand_layout": operand_layout}
    if kind == "nvfp4":
        arguments |= {"global_scale_a": a.global_scale, "global_scale_b": b.global_scale}
    return arguments
