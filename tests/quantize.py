"""Quantisers for tests: MXFP8 and NVFP4 operands with swizzled scales, written apart from the package's formulas.

Scales are swizzled atom by atom with views and permutes, expert by expert; the package computes byte addresses.
Each operand comes with `exact`, what its elements and block scales mean, in fp64 through torch's own narrow dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MX_BLOCK, NV_BLOCK = 32, 16
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])

# Elements (rows, k) to block codes: element codes (rows, k) uint8, scale codes (rows, blocks) uint8, exact values fp64.
Blocks = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Quantized:
    """One operand, rows first: values (rows, T) or (rows, T/2), its scales, global scales [E] or None.

    exact: fp64 (rows, T) without the global scale, zero past the last expert, in ordinary 2-D order.
    """

    values: Tensor
    scale: Tensor
    global_scale: Tensor | None
    exact: Tensor


def round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def swizzle(codes: Tensor, pad: int) -> Tensor:
    """A scale matrix (rows, blocks) uint8 as bytes in 128x4 atoms; pad fills the rest of the atoms."""
    rows, blocks = codes.shape
    full = torch.full((round_up(rows, 128), round_up(blocks, 4)), pad, dtype=torch.uint8)
    full[:rows, :blocks] = codes
    atoms = full.view(full.shape[0] // 128, 4, 32, full.shape[1] // 4, 4)  # atom row, r // 32, r % 32, atom column, c
    return atoms.permute(0, 3, 2, 1, 4).reshape(-1)


def block_amax(x: Tensor, block: int) -> Tensor:
    rows, k = x.shape
    padded = torch.nn.functional.pad(x.abs(), (0, round_up(k, block) - k))
    return padded.view(rows, -1, block).amax(-1)


def spread(per_block: Tensor, block: int, k: int) -> Tensor:
    return per_block.repeat_interleave(block, dim=1)[:, :k]


def mx_blocks(x: Tensor, dtype: torch.dtype) -> Blocks:
    """OCP MX: scale 2^(floor(log2(amax)) - emax) of a block, elements rounded to nearest even and saturated."""
    amax = block_amax(x, MX_BLOCK)
    exponent = torch.frexp(amax).exponent - 1 - (8 if dtype is torch.float8_e4m3fn else 15)
    code = torch.where(amax > 0, exponent, 0).clamp(-127, 127) + 127
    scale = code.to(torch.uint8).view(torch.float8_e8m0fnu).to(torch.float64)
    peak = torch.finfo(dtype).max
    factor = spread(scale, MX_BLOCK, x.shape[1])
    elements = (x / factor).clamp(-peak, peak).to(torch.float32).to(dtype)
    return elements.view(torch.uint8), code.to(torch.uint8), elements.to(torch.float64) * factor


def fp4_codes(x: Tensor) -> Tensor:
    """Nearest e2m1 code, ties to the even mantissa, saturated."""
    magnitude = x.abs().clamp(max=6.0)
    code = torch.zeros(x.shape, dtype=torch.uint8)
    for lower in range(7):
        middle = float(E2M1[lower] + E2M1[lower + 1]) / 2
        code += (magnitude > middle) | ((magnitude == middle) & (lower % 2 == 1))
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def nv_blocks(x: Tensor) -> Blocks:
    """NVFP4 of values already divided by their expert's global scale: e4m3 scale amax / 6, e2m1 elements."""
    scale = (block_amax(x, NV_BLOCK) / 6.0).clamp(max=448.0).to(torch.float32).to(torch.float8_e4m3fn)
    factor = spread(scale.to(torch.float64), NV_BLOCK, x.shape[1])
    codes = fp4_codes(torch.where(factor > 0, x / factor, 0.0))
    return codes, scale.view(torch.uint8), E2M1.to(torch.float64)[codes.long()] * factor


def pack_fp4(codes: Tensor) -> Tensor:
    """Codes (..., T) to float4_e2m1fn_x2 (..., T/2): even token in the low half byte."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).contiguous().view(torch.float4_e2m1fn_x2)


def quantize_mx(
    x: Tensor, ends: Sequence[int], dtype: torch.dtype, scale_layout: str, operand_layout: str, pad: int = 0xFF
) -> Quantized:
    """x (rows, T) to MXFP8 with elements of dtype. Unused scale bytes hold pad; elements past the end hold NaN."""

    def quantizer(expert: int, part: Tensor) -> Blocks:
        return mx_blocks(part, dtype)

    codes, scale, exact = _assemble(x, ends, MX_BLOCK, scale_layout, operand_layout, quantizer, pad)
    return Quantized(codes.view(dtype), scale.view(torch.float8_e8m0fnu), None, exact)


def quantize_nv(x: Tensor, ends: Sequence[int], scale_layout: str, operand_layout: str, pad: int = 0xFF) -> Quantized:
    """x (rows, T) to NVFP4; ends are multiples of 16. Global scales are amax / (448 * 6), NaN for empty experts."""
    starts = [0, *ends[:-1]]
    peaks = [x[:, s:e].abs().amax().item() if e > s and len(x) else float("nan") for s, e in zip(starts, ends)]
    global_scale = torch.tensor([peak / (448.0 * 6.0) if peak else 1.0 for peak in peaks], dtype=torch.float32)

    def quantizer(expert: int, part: Tensor) -> Blocks:
        return nv_blocks(part / global_scale[expert].to(torch.float64))

    codes, scale, exact = _assemble(x, ends, NV_BLOCK, scale_layout, operand_layout, quantizer, pad)
    return Quantized(pack_fp4(codes & 15), scale.view(torch.float8_e4m3fn), global_scale, exact)


def _assemble(
    x: Tensor,
    ends: Sequence[int],
    block: int,
    scale_layout: str,
    operand_layout: str,
    quantizer: Callable[[int, Tensor], Blocks],
    pad: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Element codes (rows, T), scale bytes (rup(rows, 128), columns) and exact values of all experts."""
    rows, tokens = x.shape
    codes = torch.full((rows, tokens), 0xFF, dtype=torch.uint8)
    exact = torch.zeros(rows, tokens, dtype=torch.float64)
    scale_rows, start, parts = round_up(rows, 128), 0, []
    concatenated = torch.full((scale_rows * round_up(-(-tokens // block), 4),), pad, dtype=torch.uint8)
    for expert, end in enumerate(ends):
        elements, scales, exact[:, start:end] = quantizer(expert, x[:, start:end].to(torch.float64))
        if operand_layout == "ragged":
            codes.view(-1)[rows * start : rows * end] = elements.reshape(-1)
        else:
            codes[:, start:end] = elements
        parts.append(swizzle(scales, pad))
        if scale_layout == "concatenated":
            base = scale_rows * start // block
            concatenated[base : base + len(parts[-1])] = parts[-1]
        start = end
    # A capacity buffer: one column of atoms more than the experts fill.
    padded = torch.cat([*parts, torch.full((scale_rows * 4,), pad, dtype=torch.uint8)])
    scale = concatenated if scale_layout == "concatenated" else padded
    return codes, scale.view(scale_rows, -1) if scale_rows else scale.view(0, 4), exact
