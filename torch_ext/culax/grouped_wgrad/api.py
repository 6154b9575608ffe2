"""Implementations of the grouped ops: check, choose a backend, run it. Arguments mirror the schemas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import calls, dispatch
from .. import checks as shared_checks
from ..reference import grouped_wgrad as reference
from ..reference.block_scaled import Scales
from . import checks, launch, ready
from .problem import WgradProblem

_ready: calls.Ready = {}

Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""mat_a, mat_b, offs and the four scales."""


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """grouped_mm on real tensors: (T, K) rows times their expert's (K, N) weight; rows past offs[-1] are zero."""
    arguments = (x, weight, offs)
    _, choice = dispatch.prepare("grouped_mm", checks.signature(arguments), checks.build_mm, arguments, x.device)
    checks.expect_offs("grouped_mm", offs, x.shape[0])
    if choice.backend == "torch" and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0:
        return _torch_grouped_mm(x, weight, offs)
    return reference.grouped_mm(x, weight, offs)


def _torch_grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """torch's product without its faults: it trusts the offsets, leaves the rows past the last one unwritten, and pads
    rows that are no multiple of 16 bytes."""
    end = offs.clamp(0, x.shape[0]).to(torch.int32).cummax(0).values
    product = torch.nn.functional.grouped_mm(x, weight, offs=end)
    tail = torch.arange(x.shape[0], device=x.device) >= end[-1:]
    product = product.masked_fill_(tail[:, None], 0)
    dense = product.stride() == (product.shape[1], 1)
    return product if dense else product.clone(memory_format=torch.contiguous_format)


def grouped_wgrad(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    global_scale_a: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    scale_layout: str = "padded",
    operand_layout: str = "2d",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """grouped_wgrad on real tensors: the (E, M, N) weight gradients of (M, T) and (T, N) operands."""
    op = "grouped_wgrad"
    scales = (scale_a, scale_b, global_scale_a, global_scale_b)
    key = None
    if _are_none(scales):
        key = (op, _operands_key(mat_a, mat_b, offs), scale_layout, operand_layout, out_dtype)
        out = _ready.get(key, calls.never)(mat_a, mat_b, offs)
        if out is not None:
            return out
    arguments = (mat_a, mat_b, offs, *scales, scale_layout, operand_layout, out_dtype)
    problem, choice = dispatch.prepare(op, checks.signature(arguments), checks.build_wgrad, arguments, mat_a.device)
    checks.expect_offs(op, offs, problem.tokens)
    bundle = _bundle(op, offs, scales, problem)
    if choice.backend == "cutedsl":
        if key is not None:
            calls.remember(_ready, key, ready.functional, choice.plan, mat_a, mat_b, offs)
        out = mat_a.new_empty((problem.experts, problem.m, problem.n), dtype=problem.out_dtype)
        launch.run(choice.plan, out, mat_a, mat_b, offs, bundle)
        return out
    return reference.grouped_wgrad(mat_a, mat_b, offs, bundle, operand_layout, problem.out_dtype)


def grouped_wgrad_out(
    out: Tensor,
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    global_scale_a: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    scale_layout: str = "padded",
    operand_layout: str = "2d",
    accumulate: bool = False,
) -> None:
    """grouped_wgrad_out on real tensors: write or add the weight gradients into ``out`` (E, M, N)."""
    operands = (mat_a, mat_b, offs, scale_a, scale_b, global_scale_a, global_scale_b)
    _write("grouped_wgrad_out", out, operands, scale_layout, operand_layout, accumulate)
    torch.autograd.graph.increment_version(out)


def grouped_wgrad_out_list(
    outs: Sequence[Tensor],
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    global_scale_a: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    scale_layout: str = "padded",
    operand_layout: str = "2d",
    accumulate: bool = False,
) -> None:
    """grouped_wgrad_out_list on real tensors: write or add the weight gradients into one (M, N) tensor an expert."""
    operands = (mat_a, mat_b, offs, scale_a, scale_b, global_scale_a, global_scale_b)
    _write("grouped_wgrad_out_list", list(outs), operands, scale_layout, operand_layout, accumulate)
    torch.autograd.graph.increment_version(outs)


def _write(
    op: str,
    outs: Tensor | list[Tensor],
    operands: Operands,
    scale_layout: str,
    operand_layout: str,
    accumulate: bool,
) -> None:
    mat_a, mat_b, offs, *scales = operands
    written = [outs] if isinstance(outs, Tensor) else outs
    key: tuple | None = None
    if _are_none(scales) and written:
        first = written[0]
        key = (op, _operands_key(mat_a, mat_b, offs), scale_layout, operand_layout, accumulate)
        key += (len(written), first.shape, first.stride(), first.dtype, first.device)
        if _ready.get(key, calls.never)(outs, mat_a, mat_b, offs):
            return
    arguments = (outs, *operands, scale_layout, operand_layout, accumulate)
    problem, choice = dispatch.prepare(op, checks.signature(arguments), checks.build_wgrad, arguments, mat_a.device)
    if choice.backend == "cutedsl" and key is not None:
        bind = ready.dense if isinstance(outs, Tensor) else ready.listed
        calls.remember(_ready, key, bind, choice.plan, outs, mat_a, mat_b, offs)
    ranges = _expect_disjoint(op, written)
    mat_a, mat_b, offs = (_apart(operand, ranges) for operand in operands[:3])
    checks.expect_offs(op, offs, problem.tokens)
    bundle = _bundle(op, offs, tuple(None if scale is None else _apart(scale, ranges) for scale in scales), problem)
    if not written:
        return
    if choice.backend == "cutedsl":
        launch.run(choice.plan, outs, mat_a, mat_b, offs, bundle)
    else:
        reference.grouped_wgrad_out(outs, mat_a, mat_b, offs, bundle, operand_layout, accumulate)


def _are_none(scales: Sequence[Tensor | None]) -> bool:
    scale_a, scale_b, global_a, global_b = scales
    return scale_a is None and scale_b is None and global_a is None and global_b is None


def _operands_key(mat_a: Tensor, mat_b: Tensor, offs: Tensor) -> tuple:
    """All that checks and plans ask of the operands."""
    return (
        *(mat_a.shape, mat_a.stride(), mat_a.dtype, mat_a.device),
        *(mat_b.shape, mat_b.stride(), mat_b.dtype, mat_b.device),
        *(offs.shape, offs.stride(), offs.dtype, offs.device),
    )


def _expect_disjoint(op: str, written: list[Tensor]) -> list[tuple[int, int]]:
    """Refuse outputs that share memory; the byte range of each."""
    ranges = [shared_checks.byte_range(out) for out in written]
    pair = shared_checks.first_overlap(written, ranges) if len(written) > 1 else None
    if pair is not None:
        first, second = pair
        raise shared_checks.bad(op, f"outs[{second}]", f"memory apart from that of outs[{first}]", "an overlap")
    return ranges


def _apart(operand: Tensor, written: list[tuple[int, int]]) -> Tensor:
    """The operand, or a copy with its strides where it may share memory with an output.

    A compiler may drop a clone and pass one buffer as operand and output (pytorch issue 198031), so this is no error.
    """
    start, end = shared_checks.byte_range(operand)
    if not any(max(start, first) < min(end, past) for first, past in written):
        return operand
    span = operand.as_strided(((end - start) // operand.element_size(),), (1,))
    # 4-bit and e8m0 types lack most kernels on the CPU.
    copy = span.clone() if span.element_size() > 1 else span.view(torch.uint8).clone().view(operand.dtype)
    return copy.as_strided(operand.shape, operand.stride())


def _bundle(op: str, offs: Tensor, scales: tuple[Tensor | None, ...], problem: WgradProblem) -> Scales | None:
    if not problem.block:
        return None
    scale_a, scale_b, global_a, global_b = scales
    assert scale_a is not None and scale_b is not None
    checks.expect_scaled_offs(op, offs, scale_a, scale_b, problem)
    return Scales(scale_a, scale_b, global_a, global_b, problem.scale_layout)
