"""Grouped products in plain PyTorch: the weight gradient dW[e] = A[:, e's tokens] @ B[e's tokens, :] and its forward.

Two ways to the same sums. By expert: one matrix product an expert, for offsets on the CPU, where reading them is free.
By chunk: for any device, without ever waiting for it. NC = ceil(T / 64) + E chunks are known from shapes alone, each
chunk's expert and rows come from the offsets by arithmetic on the device, both operands of a partial chunk are zeroed
(0 * NaN is NaN), and the chunks' products are added per expert in token order, so that a repeat gives the same bits.
Its cost is (T + 64 E) / T of the ideal.

Sums run in fp32 (fp64 for fp64 operands) and are rounded once, to the output's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from culax.reference.block_scaled import Scales, dequantize, ragged_to_2d
from culax.reference.expert_chunks import CHUNK, Chunks, Experts, chunk_table, expert_ranges, token_owners

# Bytes of gathered operands and partial products alive at once on the way by chunk.
SLICE_BYTES = 256 << 20


def grouped_wgrad(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor,
    scales: Scales | None,
    operand_layout: str,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """dW [E, M, N], contiguous, from mat_a (M, T), mat_b (T, N) in any strides and end offsets [E] on their device.

    mat_a, mat_b: bf16, fp16, fp32 or fp64; or block-scaled with `scales` (formats in block_scaled; fp4 operands are
    (M, T/2) and (T/2, N)). operand_layout: "2d", or "ragged": the buffers of mat_a and mat_b.t() hold expert e as a
    contiguous token-last block at element M * start_e and N * start_e. out_dtype None: mat_a's, bf16 if block-scaled.
    Offsets are clamped to [previous, T]; tokens past the last are not read into a result; empty experts are zero.
    """
    if out_dtype is None:
        out_dtype = torch.bfloat16 if scales is not None else mat_a.dtype
    a, b, experts = _plain_operands(mat_a, mat_b, offs, scales, operand_layout)
    if not reads_offsets(offs):
        return wgrad_by_chunk(a, b, experts, scales).to(out_dtype)
    out = a.new_empty((offs.numel(), a.shape[0], b.shape[0]), dtype=out_dtype)
    for e, product in enumerate(wgrad_by_expert(a, b, experts, scales)):
        out[e].copy_(product)
    return out


def grouped_wgrad_out(
    outs: Tensor | list[Tensor],
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor,
    scales: Scales | None,
    operand_layout: str,
    accumulate: bool,
) -> None:
    """grouped_wgrad into outs: one [E, M, N] tensor or E tensors [M, N], any strides, not overlapping the inputs.

    accumulate adds the unrounded fp32 (fp64) sums to what outs hold, which then are fp32 or fp64.
    """
    a, b, experts = _plain_operands(mat_a, mat_b, offs, scales, operand_layout)
    if reads_offsets(offs):
        for e, product in enumerate(wgrad_by_expert(a, b, experts, scales)):
            _write(outs[e], product, accumulate)
        return
    products = wgrad_by_chunk(a, b, experts, scales)
    if isinstance(outs, Tensor):
        _write(outs, products, accumulate)
    else:
        for out, product in zip(outs, products):
            _write(out, product, accumulate)


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """x (T, K) times its expert's weight of [E, K, N]: (T, N) in x's dtype, contiguous, any input strides.

    Rows past the last offset are exactly zero whatever x holds there; sums run in fp32 (fp64 for fp64).
    """
    by = mm_by_expert if reads_offsets(offs) else mm_by_chunk
    return by(x, weight, expert_ranges(offs, x.shape[0]))


def reads_offsets(offs: Tensor) -> bool:
    """Whether the host may read the offsets' values: on the CPU only, elsewhere it would wait for the device."""
    return offs.device.type == "cpu"


def wgrad_by_expert(a: Tensor, b: Tensor, experts: Experts, scales: Scales | None) -> Iterator[Tensor]:
    """Yields each expert's sum (M, N) in fp32 or fp64, from a (M, T), b (N, T). Reads the offsets: for the CPU."""
    dtype = _accumulator(a)
    for e, (start, end) in enumerate(_host_ranges(experts)):
        product = a[:, start:end].to(dtype) @ b[:, start:end].to(dtype).t()
        if scales is not None and scales.global_a is not None and scales.global_b is not None and end > start:
            product = product * scales.global_a[e] * scales.global_b[e]
        yield product


def wgrad_by_chunk(a: Tensor, b: Tensor, experts: Experts, scales: Scales | None) -> Tensor:
    """All experts' sums [E, M, N] in fp32 or fp64, from a (M, T), b (N, T), without reading a value on the host."""
    (m, tokens), n, number = a.shape, b.shape[0], experts.end.numel()
    total = a.new_zeros((number, m, n), dtype=_accumulator(a))
    if tokens == 0 or total.numel() == 0:
        return total
    for chunks in _chunk_slices(experts, tokens, total.element_size() * (m * n + CHUNK * (m + n))):
        partial = _gather_tokens(a, chunks).transpose(1, 2) @ _gather_tokens(b, chunks)
        # One chunk at a time: duplicates in one index_add_ would be added in any order.
        for expert, product in zip(chunks.expert.split(1), partial.split(1)):
            total.index_add_(0, expert, product)
    if scales is not None and scales.global_a is not None and scales.global_b is not None:
        # The scale of an empty expert may be anything; its product stays zero.
        for factor in (scales.global_a, scales.global_b):
            total = total * factor.masked_fill(experts.count == 0, 1.0)[:, None, None]
    return total


def mm_by_expert(x: Tensor, weight: Tensor, experts: Experts) -> Tensor:
    """grouped_mm with one product an expert. Reads the offsets: for the CPU."""
    dtype = _accumulator(x)
    out = x.new_zeros((x.shape[0], weight.shape[2]))
    for e, (start, end) in enumerate(_host_ranges(experts)):
        if end > start:
            out[start:end].copy_(x[start:end].to(dtype) @ weight[e].to(dtype))
    return out


def mm_by_chunk(x: Tensor, weight: Tensor, experts: Experts) -> Tensor:
    """grouped_mm without reading a value on the host: chunks of 64 rows against gathered weights."""
    (tokens, k), n, dtype = x.shape, weight.shape[2], _accumulator(x)
    # One row more than the result, where the surplus rows of partial chunks go.
    out = x.new_zeros((tokens + 1, n))
    if tokens == 0 or weight.numel() == 0:
        return out[:tokens]
    size = torch.finfo(dtype).bits // 8
    for chunks in _chunk_slices(experts, tokens, size * (k * n + CHUNK * (k + n))):
        rows = _gather_tokens(x.t(), chunks) @ weight.index_select(0, chunks.expert).to(dtype)
        token, live = _chunk_tokens(chunks)
        target = token.masked_fill(~live, tokens).reshape(-1)
        out.index_copy_(0, target, rows.reshape(-1, n).to(x.dtype))
    return out[:tokens]


def _plain_operands(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor, scales: Scales | None, operand_layout: str
) -> tuple[Tensor, Tensor, Experts]:
    """Both operands rows first, (M, T) and (N, T), 2-D and dequantised, and the experts' token ranges."""
    a, b = mat_a, mat_b.t()
    if scales is not None and offs.numel():
        a = dequantize(a, scales.a, offs, scales.layout, operand_layout)
        b = dequantize(b, scales.b, offs, scales.layout, operand_layout)
    experts = expert_ranges(offs, a.shape[1])
    if scales is None and offs.numel() and operand_layout == "ragged":
        owners = token_owners(experts, a.shape[1])
        a, b = ragged_to_2d(a, owners), ragged_to_2d(b, owners)
    return a, b, experts


def _accumulator(operand: Tensor) -> torch.dtype:
    return torch.float64 if operand.dtype is torch.float64 else torch.float32


def _write(out: Tensor, product: Tensor, accumulate: bool) -> None:
    if accumulate:
        out.add_(product)
    else:
        out.copy_(product)


def _host_ranges(experts: Experts) -> list[tuple[int, int]]:
    return list(zip(experts.start.tolist(), experts.end.tolist()))


def _chunk_slices(experts: Experts, tokens: int, chunk_bytes: int) -> Iterator[Chunks]:
    """The chunk table in runs of as many chunks as SLICE_BYTES hold, at least one."""
    table = chunk_table(experts, tokens)
    step = max(1, SLICE_BYTES // chunk_bytes)
    for expert, first, length in zip(table.expert.split(step), table.first.split(step), table.length.split(step)):
        yield Chunks(expert, first, length)


def _chunk_tokens(chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Token index and whether it belongs to the chunk, both [chunks, 64]."""
    lane = torch.arange(CHUNK, device=chunks.first.device)
    return chunks.first[:, None] + lane, lane < chunks.length[:, None]


def _gather_tokens(values: Tensor, chunks: Chunks) -> Tensor:
    """Columns of values (rows, T) by chunk, [chunks, 64, rows] in the accumulator's dtype; surplus ones are zero."""
    token, live = _chunk_tokens(chunks)
    index = token.masked_fill(~live, 0).reshape(-1)
    gathered = values.t().index_select(0, index).to(_accumulator(values))
    return gathered.masked_fill(~live.reshape(-1, 1), 0).view(*token.shape, values.shape[0])
