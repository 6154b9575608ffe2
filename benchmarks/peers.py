"""Other projects' implementations of the same cases, used when they are installed, named when they are not."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from benchmarks.case import Call, Inputs, Outputs, Peer

if TYPE_CHECKING:
    from collections.abc import Callable


def torch_grouped_mm(inputs: Inputs) -> Call:
    """`torch.nn.functional.grouped_mm` with two 2-D operands."""
    a, b, offs = inputs["mat_a"], inputs["mat_b"], inputs["offs"]
    grouped_mm: Callable[..., torch.Tensor] = F.grouped_mm
    return lambda: {"dw": grouped_mm(a, b, offs=offs)}


def quack_wgrad(dynamic: bool) -> Peer:
    """QuACK's variable-length-K GEMM, with its static or its dynamic tile scheduler."""
    if importlib.util.find_spec("quack") is None:
        return Peer(None, "quack is not installed")

    def prepare(inputs: Inputs) -> Call:
        gemm: Any = importlib.import_module("quack.gemm_interface").gemm
        a, b = inputs["mat_a"], inputs["mat_b"]
        starts = F.pad(inputs["offs"], (1, 0))
        return lambda: {"dw": gemm(a, b, cu_seqlens_k=starts, dynamic_scheduler=dynamic, tuned=False)}

    return Peer(prepare)


def fla_kda(safe_gate: bool) -> Peer:
    """The backward of flash-linear-attention's chunk_kda, on gates computed beforehand.

    With `safe_gate` its faster kernels for gates bounded by -5 run, without the gate's and the l2 norm's own backward.
    Its first call tunes every kernel for minutes, unless FLA_CACHE_MODE and FLA_CONFIG_DIR name tuned configurations.
    Autograd runs a backward on its forward's stream, which no graph captures.
    """
    if importlib.util.find_spec("fla") is None:
        return Peer(None, "fla is not installed")

    def prepare(inputs: Inputs) -> Call:
        chunk_kda: Any = importlib.import_module("fla.ops.kda").chunk_kda
        names = ("q", "k", "v", "g", "beta", "initial_state")
        leaves = {name: inputs[name].detach().requires_grad_() for name in names}
        cu_seqlens = inputs.get("cu_seqlens")
        o, state = chunk_kda(
            **leaves,
            output_final_state=True,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
            safe_gate=safe_gate,
            lower_bound=-5.0 if safe_gate else None,
        )

        def backward() -> Outputs:
            wanted = tuple(leaves.values())
            gradients = torch.autograd.grad((o, state), wanted, (inputs["do"], inputs["dht"]), retain_graph=True)
            return {f"d{name}": gradient for name, gradient in zip(names, gradients)}

        return backward

    return Peer(prepare, captured=False)
