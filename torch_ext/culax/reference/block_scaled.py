"""Block-scaled operands (MXFP8, NVFP4) and ragged operands as plain (rows, tokens) matrices.

Formats (OCP Microscaling 1.0; NVFP4 as in torch's scaled_grouped_mm). Blocks run along an expert's own tokens, the
last block of an expert may be partial:

=======  ===============================  ==========  ==============  ================================================
format   elements                         tokens, sf  scale of block  beside it
=======  ===============================  ==========  ==============  ================================================
MXFP8    float8_e4m3fn or float8_e5m2     32          float8_e8m0fnu  nothing
NVFP4    float4_e2m1fn_x2, low half       16          float8_e4m3fn   one fp32 scale per expert and operand, applied
         byte = even token                                            to the product, not here
=======  ===============================  ==========  ==============  ================================================

Scale bytes lie in atoms of 128 rows x 4 blocks, 512 bytes each (SWIZZLE_32_4_4). With r the row, c the block's index
within its expert, k_e the expert's tokens, R = rup(rows, 128) and C_e = rup(ceil(k_e / sf), 4), the byte address is

    base_e + ((r // 128) * (C_e / 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4

where base_e depends on the scale layout:

    "padded"         base_e = R * sum over j < e of C_j                (tensor (R, sum of C_e, or more))
    "concatenated"   base_e = R * start_e / sf                         (tensor (R, rup(ceil(T / sf), 4)))

so the rows of the scale tensor are not rows of the scale matrix. The two agree iff every k_e but the last non-empty
one is a multiple of 4 * sf; otherwise experts overlap in "concatenated" and only "padded" is legal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from culax.reference.expert_chunks import Experts, Tokens, expert_ranges, token_owners

SCALE_BLOCK = {torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}
ATOM_ROWS, ATOM_BLOCKS, ATOM_BYTES = 128, 4, 512

# Elements of an index matrix alive at once: int64 addresses of whole operands would take 8 bytes an element.
_SLICE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Scales:
    """Scale factors of both operands.

    a, b: block scales of mat_a (rows M) and mat_b (rows N), float8_e8m0fnu or float8_e4m3fn, in `layout`.
    global_a, global_b: fp32 [E] for NVFP4, None for MXFP8.
    layout: "padded" or "concatenated".
    """

    a: Tensor
    b: Tensor
    global_a: Tensor | None
    global_b: Tensor | None
    layout: str


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def expert_scale_columns(count: Tensor, block: int) -> Tensor:
    """C_e = rup(ceil(k_e / sf), 4), the columns of an expert's scale matrix; int64 like count."""
    atoms = (count + (ATOM_BLOCKS * block - 1)) // (ATOM_BLOCKS * block)
    return atoms * ATOM_BLOCKS


def expert_scale_base(experts: Experts, rows: int, block: int, layout: str) -> Tensor:
    """base_e, the first scale byte of each expert, int64 [E] (formulas in the module's docstring)."""
    padded_rows = round_up(rows, ATOM_ROWS)
    if layout == "padded":
        columns = expert_scale_columns(experts.count, block)
        return padded_rows * (columns.cumsum(0) - columns)
    if layout == "concatenated":
        return padded_rows * (experts.start // block)
    raise ValueError(f'scale_layout: expected "padded" or "concatenated", got {layout!r}')


def scale_address(base: Tensor, columns: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Byte address of the scale of block `column` (within its expert) in row `row`; all int64, broadcast.

    base and columns are base_e and C_e of the block's expert.
    """
    atom = torch.div(row, ATOM_ROWS, rounding_mode="floor") * (columns // ATOM_BLOCKS) + column // ATOM_BLOCKS
    return base + atom * ATOM_BYTES + (row % 32) * 16 + (row % ATOM_ROWS) // 32 * 4 + column % ATOM_BLOCKS


def decode_scale(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale bytes (uint8) to fp32, exactly.

    e8m0: 2^(code - 127), code 255 is NaN; code 0 is the fp32 subnormal 2^-127. e4m3: as float8_e4m3fn, NaN included.
    """
    if dtype is not torch.float8_e8m0fnu:
        return codes.view(dtype).to(torch.float32)
    code = codes.to(torch.int32)
    bits = (code << 23).masked_fill(code == 0, 0x00400000).masked_fill(code == 255, 0x7FC00000)
    return bits.view(torch.float32)


def unpack_fp4(packed: Tensor) -> Tensor:
    """float4_e2m1fn_x2 (rows, T/2) to one 4-bit code a byte, uint8 (rows, T); the low half is the even token."""
    pairs = packed.view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def decode_fp4(codes: Tensor) -> Tensor:
    """e2m1 codes (uint8: sign, 2 exponent bits, 1 mantissa bit) to fp32: +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    twice = torch.where(exponent == 0, mantissa, (mantissa + 2) << (exponent - 1).clamp(0, 2))
    sign = 1 - 2 * (codes >> 3).to(torch.float32)
    return sign * (0.5 * twice.to(torch.float32))


def ragged_to_2d(values: Tensor, owners: Tokens) -> Tensor:
    """Expert-major (rows, T) to an ordinary (rows, T) matrix; columns past the last expert are zero.

    The flattened input holds, for expert e at element rows * start_e, a contiguous (rows, k_e) block.
    """
    rows, tokens = values.shape
    flat = values.reshape(-1)
    if flat.numel() == 0:
        return values
    token = torch.arange(tokens, device=values.device)
    # In bounds for tokens past the last expert too: (rows - 1) * end + token < rows * T.
    first = rows * owners.start + token - owners.start
    parts = [flat[first + row[:, None] * owners.count] for row in _row_slices(rows, tokens, values.device)]
    return torch.cat(parts).masked_fill(~owners.live, 0)


def dequantize(values: Tensor, scale: Tensor, offs: Tensor, scale_layout: str, operand_layout: str) -> Tensor:
    """A block-scaled operand as an fp32 matrix (rows, T), exactly; columns past offs[-1] are zero.

    values: (rows, T) float8_e4m3fn / float8_e5m2, or (rows, T/2) float4_e2m1fn_x2; mat_b is given transposed.
    scale: its block scales; the dtype tells the format. offs: end offsets [E], E >= 1, clamped to [previous, T].
    operand_layout: "2d", or "ragged" (expert e a contiguous (rows, k_e) block at element rows * start_e).

    Every finite product fits fp32 without rounding, down to subnormals (e5m2 with scale 2^-127 needs 2^-143); beyond
    fp32's range it is infinite. NaN elements and NaN scales give NaN, and so do blocks that a too short scale tensor
    doesn't hold; pad bytes of the scale tensor are never used.
    """
    packed = values.dtype is torch.float4_e2m1fn_x2
    codes = unpack_fp4(values) if packed else values.view(torch.uint8)
    rows, tokens = codes.shape
    experts = expert_ranges(offs, tokens)
    owners = token_owners(experts, tokens)
    if operand_layout == "ragged":
        codes = ragged_to_2d(codes, owners)
    if codes.numel() == 0:
        return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)

    block = SCALE_BLOCK[scale.dtype]
    # A NaN byte in both formats behind the last: what a too short scale tensor lacks is NaN, not something plausible.
    scale_bytes = torch.nn.functional.pad(scale.view(torch.uint8).reshape(-1), (0, 1), value=0xFF)
    base = expert_scale_base(experts, rows, block, scale_layout)[owners.expert]
    columns = expert_scale_columns(owners.count, block)
    column = (torch.arange(tokens, device=codes.device) - owners.start) // block

    parts = []
    for row, part in zip(_row_slices(rows, tokens, codes.device), codes.split(_row_step(tokens))):
        address = scale_address(base, columns, row[:, None], column).clamp(0, scale_bytes.numel() - 1)
        factor = decode_scale(scale_bytes[address], scale.dtype)
        element = decode_fp4(part) if packed else part.contiguous().view(values.dtype).to(torch.float32)
        parts.append((element * factor).masked_fill(~owners.live, 0))
    return torch.cat(parts)


def _row_step(tokens: int) -> int:
    return max(1, _SLICE_ELEMENTS // max(1, tokens))


def _row_slices(rows: int, tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    """Row indices 0 .. rows - 1 in runs short enough that run x tokens stays bounded."""
    return torch.arange(rows, device=device).split(_row_step(tokens))
