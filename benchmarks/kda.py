"""KDA cases: backward alone (saved Aqk and Akk given), or forward and backward through autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks import peers
from benchmarks.case import Call, Cost, Gate, Inputs, Outputs, Peer, Prepare
from benchmarks.verify import worst

CHUNK = 64
DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "initial_state")
# Worst relative error of one 64-token chunk of one head, of any gradient.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class KdaCase:
    """One shape of KDA. `sequences` > 1 packs that many sequences of seeded lengths into one row (B = 1)."""

    name: str
    batch: int
    tokens: int
    heads: int
    key_dim: int = 128
    value_dim: int = 128
    sequences: int = 1
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    forward_too: bool = False

    @property
    def op(self) -> str:
        """The op that the figures are about."""
        return "kda_fwd+kda_bwd" if self.forward_too else "kda_bwd"

    @property
    def scale(self) -> float:
        """The usual attention scale."""
        return self.key_dim**-0.5

    @property
    def states(self) -> int:
        """Number of recurrent states per head: one a sequence."""
        return self.sequences if self.sequences > 1 else self.batch

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of states: fp32, or fp64 for fp64 inputs."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def shape(self) -> dict[str, int | str]:
        """B, T, H, K, V, and the number of packed sequences."""
        return {
            "B": self.batch,
            "T": self.tokens,
            "H": self.heads,
            "K": self.key_dim,
            "V": self.value_dim,
            "sequences": self.sequences,
        }

    def cost(self) -> Cost:
        """Products of the chunked algorithm, and inputs, outputs and tapes each read and written once.

        Backward, per chunk and head: eight K x V x C products (scan 2, reverse scan 3, state terms of dq, dk, dW 3),
        twelve C x C x K or V products (W, U, E, dv_loc, dX, dY, two for M, four intra-chunk) and two C x C x C.
        The tapes h, dh (K x V) and v_new, dvn (C x V) are written and read. The forward adds Aqk, L, W, U, the scan's
        two products, the output's two, and the triangular inverse.
        """
        c, k, v = CHUNK, self.key_dim, self.value_dim
        chunks = self.batch * -(-self.tokens // c) * self.heads
        rows = self.batch * self.tokens * self.heads
        item, gate = self.dtype.itemsize, self.state_dtype.itemsize
        # W, dX, M, four intra-chunk products have K columns; U, E, dv_loc, dY, M have V.
        flops = 2.0 * chunks * (8 * c * k * v + 7 * c * c * k + 5 * c * c * v + 2 * c * c * c)
        inputs = rows * (item * (2 * k + 2 * v + 2 * c + 1) + gate * k)
        outputs = rows * (item * (2 * k + v + 1) + gate * k)
        tapes = 2 * item * (2 * chunks * k * v + 2 * rows * v)
        states = 3 * self.states * self.heads * k * v * self.state_dtype.itemsize
        total = inputs + outputs + tapes + states
        if self.forward_too:
            flops += 2.0 * chunks * (3 * c * k * v + 3 * c * c * k + 2 * c * c * v + c * c * c / 3)
            total += rows * (item * (2 * k + 2 * v + 2 * c + 1) + gate * k) + states
        return Cost(flops, float(total))

    def make_inputs(self, seed: int) -> Inputs:
        """Unit q and k, gates logsigmoid(randn) not below -5, beta in (0.5, 0.73), states and both output gradients."""
        gen = torch.Generator(device=self.device).manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=gen, device=self.device)

        b, t, h, k, v = self.batch, self.tokens, self.heads, self.key_dim, self.value_dim
        inputs = {
            "q": F.normalize(randn(b, t, h, k), dim=-1).to(self.dtype),
            "k": F.normalize(randn(b, t, h, k), dim=-1).to(self.dtype),
            "v": randn(b, t, h, v).to(self.dtype),
            "g": F.logsigmoid(randn(b, t, h, k)).clamp(min=-5).to(self.state_dtype),
            "beta": torch.rand(b, t, h, generator=gen, device=self.device).sigmoid().to(self.dtype),
            "initial_state": randn(self.states, h, k, v).to(self.state_dtype),
            "do": randn(b, t, h, v).to(self.dtype),
            "dht": randn(self.states, h, k, v).to(self.state_dtype),
        }
        if self.sequences > 1:
            generator = torch.Generator().manual_seed(seed)
            cuts = torch.randint(0, t + 1, (self.sequences - 1,), generator=generator).sort().values
            ends = torch.cat([torch.zeros(1), cuts, torch.full((1,), t)])
            inputs["cu_seqlens"] = ends.to(torch.int32).to(self.device)
        return inputs

    def truth(self, inputs: Inputs) -> Outputs:
        """Float64: autograd of the token recurrence on the CPU; the chunked path in float64 on CUDA.

        The recurrence's autograd keeps a state per token, which no GPU holds at these lengths; the chunked path in
        float64 is itself held against the recurrence by the tests.
        """
        if self.device == "cpu":
            return self.recurrence_gradients(inputs)
        return self.ours(_wide(inputs))()

    def recurrence_gradients(self, inputs: Inputs) -> Outputs:
        """Float64, by autograd of the token recurrence: a state per token is kept."""
        return self._recurrence(_wide(inputs))()

    def implementations(self) -> Mapping[str, Prepare | Peer]:
        """Ours; for forward and backward on the CPU the recurrence, for the backward on CUDA both of FLA's."""
        if self.device == "cpu" and self.forward_too:
            return {"culax": self.ours, "recurrence": self._recurrence}
        if self.device == "cpu" or self.forward_too:
            return {"culax": self.ours}
        return {"culax": self.ours, "fla": peers.fla_kda(False), "fla_safe_gate": peers.fla_kda(True)}

    def gate(self, outputs: Outputs, truth: Outputs) -> Gate:
        """Every gradient, per head and 64-token chunk (states: per sequence and head).

        A token's dbeta is a sum of V + K signed terms, those of V as large as dv's (v has unit variance): where they
        cancel, the error of bf16 factors that every implementation is given stays. It is taken relative to the terms.
        """
        groups = {name: (0, 1) if name == "dinitial_state" else (0, 1, 2) for name in truth}
        terms = torch.linalg.vector_norm(truth["dv"], dim=-1).maximum(truth["dbeta"].abs())
        scales = chunked({"dbeta": terms})
        return worst(chunked(outputs), chunked(truth), groups, BOUNDS[self.dtype], scales)

    def ours(self, inputs: Inputs) -> Call:
        """The op, its forward done; or both."""
        ops = torch.ops.culax
        x, cu_seqlens = dict(inputs), inputs.get("cu_seqlens")
        if self.forward_too:
            leaves = [x[name].detach().requires_grad_() for name in DIFFERENTIABLE]

            def both() -> Outputs:
                o, state, _, _ = ops.kda_fwd(*leaves, cu_seqlens, self.scale, True)
                return _named(torch.autograd.grad((o, state), leaves, (x["do"], x["dht"])))

            return both
        arguments = [x[name] for name in DIFFERENTIABLE]
        _, _, aqk, akk = ops.kda_fwd(*arguments, cu_seqlens, self.scale, False)
        *tensors, state = arguments

        def backward() -> Outputs:
            return _named(ops.kda_bwd(x["do"], x["dht"], *tensors, aqk, akk, state, cu_seqlens, self.scale))

        return backward

    def _recurrence(self, inputs: Inputs) -> Call:
        from culax.reference.kda_recurrence import kda_recurrence

        leaves = {name: inputs[name].detach().requires_grad_() for name in DIFFERENTIABLE}

        def both() -> Outputs:
            out = kda_recurrence(**leaves, cu_seqlens=inputs.get("cu_seqlens"), scale=self.scale)
            return _named(torch.autograd.grad(out, tuple(leaves.values()), (inputs["do"], inputs["dht"])))

        return both


def _wide(inputs: Inputs) -> Inputs:
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def _named(gradients: tuple[torch.Tensor, ...]) -> Outputs:
    return {f"d{name}": gradient for name, gradient in zip(DIFFERENTIABLE, gradients)}


def chunked(outputs: Outputs) -> Outputs:
    """Token-major outputs as [B, chunk, head, token of the chunk, ...]; the last chunk padded with zeros."""
    chunked = {}
    for name, x in outputs.items():
        if name != "dinitial_state":
            tail = -x.shape[1] % CHUNK
            x = torch.cat([x, x.new_zeros(x.shape[0], tail, *x.shape[2:])], dim=1)
            x = x.unflatten(1, (-1, CHUNK)).transpose(2, 3)
        chunked[name] = x
    return chunked
