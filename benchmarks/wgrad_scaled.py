"""Grouped weight gradients of block-scaled operands (MXFP8, NVFP4), beside bf16 and beside dequantising with torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Call, Cost, Gate, Inputs, Outputs, Peer, Prepare
from benchmarks.verify import worst
from benchmarks.wgrad import BOUNDS, token_counts

TOKENS = 32
"""Token counts are multiples of it, so that blocks of every format start on the same tokens in every expert."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class ScaledWgradCase:
    """dW[e] (M, N) of operands with contiguous tokens and padded scales; form: "mxfp8" (e4m3) or "nvfp4"."""

    name: str
    form: str
    experts: int
    m: int
    n: int
    average_tokens: int
    device: str = "cuda"

    @property
    def op(self) -> str:
        """The op that the figures are about."""
        return "grouped_wgrad"

    @property
    def dtype(self) -> torch.dtype:
        """What is multiplied, and the output's."""
        return torch.bfloat16

    @property
    def block(self) -> int:
        """Tokens that share a scale."""
        return 32 if self.form == "mxfp8" else 16

    @property
    def counts(self) -> list[int]:
        """Tokens of each expert."""
        return token_counts(self.experts, self.average_tokens, TOKENS)

    def shape(self) -> dict[str, int | str]:
        """E, M, N, and the tokens of all experts."""
        tokens = sum(self.counts)
        return {"E": self.experts, "M": self.m, "N": self.n, "T": tokens, "average k": self.average_tokens}

    def cost(self) -> Cost:
        """2 M N T operations; elements and scales of both operands read once, every expert's gradient written once."""
        tokens = sum(self.counts)
        width = (1.0 if self.form == "mxfp8" else 0.5) + 1.0 / self.block
        moved = (self.m + self.n) * tokens * width + 2.0 * self.experts * self.m * self.n
        return Cost(2.0 * self.m * self.n * tokens, moved)

    def make_inputs(self, seed: int) -> Inputs:
        """Normal values, quantised; beside them what the other implementations start from.

        values_*: what the quantised operands mean, bf16 and token-major. factors_*: their scales, bf16 (X, blocks).
        """
        ends = torch.tensor(self.counts).cumsum(0).to(torch.int32)
        gen = torch.Generator(device=self.device).manual_seed(seed)
        inputs: Inputs = {"offs": ends.to(self.device)}
        for side, rows in (("a", self.m), ("b", self.n)):
            x = torch.randn(rows, int(ends[-1]), generator=gen, device=self.device)
            codes, scales, values = (_mxfp8 if self.form == "mxfp8" else _nvfp4)(x)
            inputs[f"mat_{side}"] = codes if side == "a" else codes.t()
            inputs[f"scale_{side}"] = _padded(scales, self.counts, self.block).view(scales.dtype)
            inputs[f"factors_{side}"] = scales.to(torch.float32).to(torch.bfloat16)
            inputs[f"values_{side}"] = values.t().contiguous()
            if self.form == "nvfp4":
                inputs[f"global_scale_{side}"] = torch.ones(self.experts, device=self.device)
        return inputs

    def truth(self, inputs: Inputs) -> Outputs:
        """One float64 product an expert."""
        products, start = [], 0
        for end in inputs["offs"].tolist():
            products.append(inputs["values_a"][start:end].double().t() @ inputs["values_b"][start:end].double())
            start = end
        return {"dw": torch.stack(products)}

    def implementations(self) -> Mapping[str, Prepare | Peer]:
        """Ours, our bf16 kernel on what the operands mean, and torch's dequantisation before its product."""
        return {"culax": self._ours, "culax_bf16": self._bf16, "torch_dequantize": self._torch}

    def gate(self, outputs: Outputs, truth: Outputs) -> Gate:
        """Per expert."""
        return worst(outputs, truth, {"dw": (0,)}, BOUNDS[self.dtype])

    def _ours(self, inputs: Inputs) -> Call:
        names = ("mat_a", "mat_b", "offs", "scale_a", "scale_b", "global_scale_a", "global_scale_b")
        arguments = [inputs.get(name) for name in names]
        return lambda: {"dw": torch.ops.culax.grouped_wgrad(*arguments)}

    def _bf16(self, inputs: Inputs) -> Call:
        a, b, offs = inputs["values_a"].t(), inputs["values_b"], inputs["offs"]
        return lambda: {"dw": torch.ops.culax.grouped_wgrad(a, b, offs)}

    def _torch(self, inputs: Inputs) -> Call:
        """Scales come as a plain matrix here: undoing their layout is not counted, nor NVFP4's global scales of 1.

        Torch converts no fp4: two codes at a time are looked up in a table of 256 pairs.
        """
        fp4 = self.form == "nvfp4"
        codes = torch.arange(256, device=self.device)
        levels = torch.tensor([*E2M1, *(-level for level in E2M1)], device=self.device, dtype=torch.bfloat16)
        pairs = levels[torch.stack([codes & 15, codes >> 4], dim=1)]

        def dequantized(codes: Tensor, factors: Tensor) -> Tensor:
            elements = pairs[codes.view(torch.uint8).int()] if fp4 else codes.to(torch.bfloat16)
            return (elements.view(codes.shape[0], -1, self.block) * factors[:, :, None]).flatten(1)

        def call() -> Outputs:
            a = dequantized(inputs["mat_a"], inputs["factors_a"])
            b = dequantized(inputs["mat_b"].t(), inputs["factors_b"])
            return {"dw": F.grouped_mm(a, b.t(), offs=inputs["offs"])}

        return call


def _mxfp8(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes (X, T) e4m3, scales (X, T / 32) e8m0, values (X, T) bf16): powers of two that bring blocks below 512."""
    blocks = x.view(x.shape[0], -1, 32)
    exponent = torch.frexp(blocks.abs().amax(-1)).exponent - 9
    factor = torch.exp2(exponent.to(torch.float32))[:, :, None]
    codes = (blocks / factor).clamp(-448, 448).to(torch.float8_e4m3fn)
    values = (codes.to(torch.float32) * factor).to(torch.bfloat16).view(x.shape)
    return codes.view(x.shape), (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu), values


def _nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes (X, T / 2) e2m1 pairs, scales (X, T / 16) e4m3, values (X, T) bf16), global scales of 1."""
    blocks = x.view(x.shape[0], -1, 16)
    scales = (blocks.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
    factor = scales.to(torch.float32)[:, :, None]
    levels = torch.tensor(E2M1, device=x.device)
    index = torch.bucketize((blocks / factor).abs(), (levels[1:] + levels[:-1]) / 2)
    values = (levels[index] * blocks.sign() * factor).to(torch.bfloat16).view(x.shape)
    codes = (index + 8 * (blocks < 0)).to(torch.uint8).view(x.shape)
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.float4_e2m1fn_x2), scales, values


def _padded(scales: Tensor, counts: list[int], block: int) -> Tensor:
    """The bytes of scales (X, blocks) in atoms of 128 x 4, expert by expert: (X rounded up to 128, columns) uint8."""
    rows = -(-scales.shape[0] // 128) * 128
    parts = []
    for part in scales.view(torch.uint8).split([count // block for count in counts], dim=1):
        columns = -(-part.shape[1] // 4) * 4
        full = F.pad(part, (0, columns - part.shape[1], 0, rows - part.shape[0]))
        atoms = full.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
        parts.append(atoms.reshape(-1))
    return torch.cat(parts).view(rows, -1)
