"""Runs a plan: turns torch tensors into kernel arguments and launches on torch's current stream."""

from __future__ import annotations

import functools
from array import array

import torch
from torch import Tensor

from culax.grouped_wgrad import scaled
from culax.grouped_wgrad.plan import Plan
from culax.reference.block_scaled import Scales
from culax.runtime import load

POINTERS = 64
"""The kernel reads output addresses in chunks of this many (stages.gemm.descriptors.POINTERS)."""


@functools.lru_cache(maxsize=4096)
def kernel(plan: Plan) -> load.Kernel:
    """The plan's kernel, loaded at its first use."""
    return load.get(plan.variant)


@functools.cache
def multiprocessors(index: int) -> int:
    """Number of multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def run(
    plan: Plan, outs: Tensor | list[Tensor], mat_a: Tensor, mat_b: Tensor, offs: Tensor, scales: Scales | None = None
) -> None:
    """Fill outs (E, M, N), or E tensors (M, N), as plan.problem says. No host synchronisation; legal in a capture.

    Outputs that are not dense matrices at 16-byte aligned addresses go through a copy.
    """
    problem = plan.problem
    if problem.experts == 0 or problem.m == 0 or problem.n == 0:
        return
    if problem.tokens == 0:
        if not problem.accumulate:
            for out in outs:
                out.zero_()
        return
    if mat_a.device.index == torch.cuda.current_device():
        _run(plan, outs, mat_a, mat_b, offs, scales)
    else:
        with torch.cuda.device(mat_a.device):
            _run(plan, outs, mat_a, mat_b, offs, scales)


def _run(
    plan: Plan, outs: Tensor | list[Tensor], mat_a: Tensor, mat_b: Tensor, offs: Tensor, scales: Scales | None
) -> None:
    problem = plan.problem
    more: tuple = ()
    if scales is not None:
        mat_a = scaled.aligned(mat_a, plan.config.ragged)
        mat_b = scaled.aligned(mat_b.t(), plan.config.ragged).t()
        more = scaled.arguments(scales)
    elif (mat_a.data_ptr() | mat_b.data_ptr()) % 16 or problem.tokens == 1:
        mat_a, mat_b = _operand(mat_a, plan.config.a_major), _operand(mat_b.t(), plan.config.b_major).t()
    if offs.dtype is not torch.int32:
        offs = offs.clamp(0, problem.tokens).to(torch.int32)
    elif not offs.is_contiguous():
        offs = offs.contiguous()
    workspace = None
    if plan.workspace_shape is not None:
        workspace = torch.empty(plan.workspace_shape, dtype=torch.int64, device=mat_a.device)
    sms = multiprocessors(mat_a.device.index)
    if isinstance(outs, Tensor):
        target = outs if _addressable(outs) else outs.clone(memory_format=torch.contiguous_format)
        kernel(plan)(mat_a, mat_b, offs, target, workspace, sms, *more)
        if target is not outs:
            outs.copy_(target)
        return
    targets = [out if _addressable(out) else out.clone(memory_format=torch.contiguous_format) for out in outs]
    addresses = host_vector([target.data_ptr() for target in targets])
    kernel(plan)(mat_a, mat_b, offs, addresses, workspace, sms, *more)
    for out, target in zip(outs, targets):
        if target is not out:
            out.copy_(target)


def _operand(matrix: Tensor, major: str) -> Tensor:
    """An operand seen as (X, T) at a 16-byte aligned address, with a pitch TMA can take where T is 1.

    An expert-major operand is one dense buffer, so its copy must be: its pitch is never used.
    """
    if matrix.data_ptr() % 16:
        rows, columns = matrix.shape if major == "k" else matrix.shape[::-1]
        pitch = columns if matrix.is_contiguous() else -(-columns // 8) * 8
        copy = matrix.new_empty((rows, pitch))[:, :columns]
        matrix = (copy if major == "k" else copy.t()).copy_(matrix)
    if matrix.shape[1] == 1 and major == "mn":
        matrix = matrix.as_strided(matrix.shape, (1, matrix.shape[0]))
    return matrix


def dense(out: Tensor) -> bool:
    """Whether an output's strides are those of dense (M, N) matrices, 16 bytes apart if there is one an expert."""
    strides = out.stride()
    return strides[-1] == 1 and strides[-2] == out.shape[-1] and (len(strides) == 2 or strides[0] % 8 == 0)


def _addressable(out: Tensor) -> bool:
    """Whether the kernel can write into an output: dense matrices at 16-byte aligned addresses."""
    return dense(out) and out.data_ptr() % 16 == 0


def host_vector(addresses: list[int]) -> Tensor:
    """Addresses in host memory, padded to whole chunks of kernel parameters."""
    padded = array("q", addresses + [0] * (-len(addresses) % POINTERS))
    return torch.frombuffer(padded, dtype=torch.int64)


def warm(plan: Plan, device: torch.device) -> None:
    """Load the plan's kernel onto the devices by one call on tensors of its own, outside a capture."""
    config, problem = plan.config, plan.problem
    with torch.cuda.device(device):
        a, b = (scaled.zeros(16, dtype, device) for dtype in (problem.a_dtype, problem.b_dtype))
        out = torch.zeros((1, 16, 16), dtype=problem.out_dtype, device=device)
        offs = torch.zeros(1, dtype=torch.int32, device=device)
        slots = config.slots
        workspace = torch.empty((1, slots, 16), dtype=torch.int64, device=device) if slots else None
        target = host_vector([out.data_ptr()]) if config.discrete else out
        sms = multiprocessors(a.device.index)
        mat_a, mat_b = a if config.a_major == "k" else a.t(), b if config.b_major == "mn" else b.t()
        more = scaled.arguments(scaled.no_scales(problem, device)) if problem.block else ()
        kernel(plan)(mat_a, mat_b, offs, target, workspace, sms, *more)
