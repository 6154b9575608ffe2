"""Grouped weight gradient cases, with the token counts all implementations share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from benchmarks import peers
from benchmarks.case import Call, Cost, Gate, Inputs, Outputs, Peer, Prepare
from benchmarks.verify import worst

# Relative Frobenius error of one expert's gradient, rounding of the output included.
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def token_counts(experts: int, average: int, multiple: int = 16) -> list[int]:
    """Tokens of each expert: uniform in 0.3 to 1.7 of the average, multiples of `multiple`, seeded by the number of
    experts."""
    uniform = torch.rand(experts, generator=torch.Generator().manual_seed(experts))
    counts = (int((x * 1.4 + 0.3) * average) // multiple * multiple for x in uniform.tolist())
    return [max(multiple, count) for count in counts]


@dataclass(frozen=True)
class WgradCase:
    """dW[e] (M, N) = A[:, tokens of e] @ B[tokens of e, :].

    k_major: both operands have their tokens next to each other in memory, instead of those of one token.
    multiple: token counts are multiples of it.
    """

    name: str
    experts: int
    m: int
    n: int
    average_tokens: int
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    k_major: bool = False
    multiple: int = 16

    @property
    def op(self) -> str:
        """The op that the figures are about."""
        return "grouped_wgrad"

    def shape(self) -> dict[str, int | str]:
        """E, M, N, and the tokens of all experts."""
        tokens = sum(self.counts)
        return {"E": self.experts, "M": self.m, "N": self.n, "T": tokens, "average k": self.average_tokens}

    @property
    def counts(self) -> list[int]:
        """Tokens of each expert."""
        return token_counts(self.experts, self.average_tokens, self.multiple)

    def cost(self) -> Cost:
        """2 M N T operations; both operands read once, every expert's gradient written once."""
        tokens = sum(self.counts)
        flops = 2.0 * self.m * self.n * tokens
        moved = (self.m + self.n) * tokens + self.experts * self.m * self.n
        return Cost(flops, float(self.dtype.itemsize * moved))

    def make_inputs(self, seed: int) -> Inputs:
        """Standard normal operands. Rows of K-major ones are filled up with unused tokens to multiples of 16 bytes."""
        ends = torch.tensor(self.counts).cumsum(0).to(torch.int32)
        tokens = int(ends[-1])
        tokens += -tokens % 8 if self.k_major else 0
        gen = torch.Generator(device=self.device).manual_seed(seed)
        a = torch.randn(tokens, self.m, generator=gen, device=self.device).to(self.dtype)
        b = torch.randn(tokens, self.n, generator=gen, device=self.device).to(self.dtype)
        if self.k_major:
            a, b = (x.t().contiguous().t() for x in (a, b))
        return {"mat_a": a.t(), "mat_b": b, "offs": ends.to(self.device)}

    def truth(self, inputs: Inputs) -> Outputs:
        """One float64 product an expert."""
        products, start = [], 0
        for end in inputs["offs"].tolist():
            products.append(inputs["mat_a"][:, start:end].double() @ inputs["mat_b"][start:end].double())
            start = end
        return {"dw": torch.stack(products)}

    def implementations(self) -> Mapping[str, Prepare | Peer]:
        """Ours, torch's grouped_mm, and QuACK with either scheduler; ours alone where K-major groups are unaligned."""
        if self.k_major and self.multiple % 8:
            refused = Peer(None, "takes K-major groups of whole 16 bytes only: a device assertion, or a fault")
            return {"culax": self._ours, "torch": refused, "quack": refused}
        return {
            "culax": self._ours,
            "torch": peers.torch_grouped_mm,
            "quack": peers.quack_wgrad(False),
            "quack_dynamic": peers.quack_wgrad(True),
        }

    def gate(self, outputs: Outputs, truth: Outputs) -> Gate:
        """Per expert."""
        return worst(outputs, truth, {"dw": (0,)}, BOUNDS[self.dtype])

    def _ours(self, inputs: Inputs) -> Call:
        a, b, offs = inputs["mat_a"], inputs["mat_b"], inputs["offs"]
        return lambda: {"dw": torch.ops.culax.grouped_wgrad(a, b, offs)}
