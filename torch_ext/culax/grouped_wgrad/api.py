"""Implementations of the grouped ops: check, choose a backend, run it. Arguments mirror the schemas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import checks as shared_checks
from .. import dispatch
from ..reference import grouped_wgrad as reference
from ..reference.block_scaled import Scales
from ..reference.expert_chunks import expert_ranges
from . import checks, launch
from .problem import WgradProblem


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """grouped_mm on real tensors: (T, K) rows times their expert's (K, N) weight; rows past offs[-1] are zero."""
    arguments = (x, weight, offs)
    _, choice = dispatch.prepare("grouped_mm", checks.signature(arguments), checks.build_mm, arguments, x.device)
    checks.expect_offs("grouped_mm", offs, x.shape[0])
    if choice.backend == "torch" and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0:
        return _torch_grouped_mm(x, weight, offs)
    return reference.grouped_mm(x, weight, offs)


def _torch_grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """torch's product without its faults: it trusts the offsets, and leaves the rows past the last one unwritten."""
    end = expert_ranges(offs, x.shape[0]).end
    product = torch.nn.functional.grouped_mm(x, weight, offs=end.to(torch.int32))
    tail = torch.arange(x.shape[0], device=x.device) >= end[-1:]
    return product.masked_fill_(tail[:, None], 0)


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
    arguments = (mat_a, mat_b, offs, *scales, scale_layout, operand_layout, out_dtype)
    problem, choice = dispatch.prepare(op, checks.signature(arguments), checks.build_wgrad, arguments, mat_a.device)
    checks.expect_offs(op, offs, problem.tokens)
    bundle = _bundle(op, offs, scales, problem)
    if choice.backend == "cutedsl":
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
    operands: tuple[Tensor | None, ...],
    scale_layout: str,
    operand_layout: str,
    accumulate: bool,
) -> None:
    arguments = (outs, *operands, scale_layout, operand_layout, accumulate)
    device = operands[0].device  # type: ignore[union-attr]
    problem, choice = dispatch.prepare(op, checks.signature(arguments), checks.build_wgrad, arguments, device)
    written = [outs] if isinstance(outs, Tensor) else outs
    mat_a, mat_b, offs, *scales = _apart(operands, _expect_disjoint(op, written))
    assert mat_a is not None and mat_b is not None and offs is not None
    checks.expect_offs(op, offs, problem.tokens)
    bundle = _bundle(op, offs, tuple(scales), problem)
    if not written:
        return
    if choice.backend == "cutedsl":
        launch.run(choice.plan, outs, mat_a, mat_b, offs, bundle)
    else:
        reference.grouped_wgrad_out(outs, mat_a, mat_b, offs, bundle, operand_layout, accumulate)


def _expect_disjoint(op: str, written: list[Tensor]) -> tuple[int, int]:
    """Refuse outputs that share memory; the bytes from the first to the last output."""
    ranges = [shared_checks.byte_range(out) for out in written]
    pair = shared_checks.first_overlap(written, ranges) if len(written) > 1 else None
    if pair is not None:
        first, second = pair
        raise shared_checks.bad(op, f"outs[{second}]", f"memory apart from that of outs[{first}]", "an overlap")
    filled = [bounds for bounds in ranges if bounds[0] < bounds[1]]
    return (min(start for start, _ in filled), max(end for _, end in filled)) if filled else (0, 0)


def _apart(operands: tuple[Tensor | None, ...], hull: tuple[int, int]) -> list[Tensor | None]:
    """Operands with a copy in place of each that may share memory with an output.

    A compiler may drop a clone and pass one buffer as operand and output (pytorch issue 198031), so this is no error.
    """
    apart = list(operands)
    for position, operand in enumerate(operands):
        if operand is not None:
            start, end = shared_checks.byte_range(operand)
            if max(start, hull[0]) < min(end, hull[1]):
                apart[position] = _copy(operand)
    return apart


def _copy(operand: Tensor) -> Tensor:
    if operand.element_size() > 1:
        return operand.clone()
    return operand.view(torch.uint8).clone().view(operand.dtype)  # 4-bit and e8m0 types lack most kernels on the CPU


def _bundle(op: str, offs: Tensor, scales: tuple[Tensor | None, ...], problem: WgradProblem) -> Scales | None:
    if not problem.block:
        return None
    scale_a, scale_b, global_a, global_b = scales
    assert scale_a is not None and scale_b is not None
    checks.expect_scaled_offs(op, offs, scale_a, scale_b, problem)
    return Scales(scale_a, scale_b, global_a, global_b, problem.scale_layout)
