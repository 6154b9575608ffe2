"""Grouped calls of a known signature (culax/calls.py): what is left to look at are addresses and the current device.

Each function here looks once at tensors of a signature and returns what runs its calls. What it returns launches
nothing, and says so, where the kernel cannot read or write such tensors in place, an address is not aligned to 16
bytes, an output overlaps anything, or another device is current.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import torch
from torch import Tensor

from .. import calls, checks
from . import launch
from .plan import Plan


def functional(plan: Plan, mat_a: Tensor, mat_b: Tensor, offs: Tensor) -> Callable[..., Tensor | None]:
    """Calls (mat_a, mat_b, offs) that return a new output (E, M, N); None where they did not run."""
    if not _reads_in_place(plan, offs):
        return calls.never
    problem, run, new = plan.problem, _launcher(plan, mat_a.device), calls.allocator(mat_a.device)
    index, dtype = mat_a.device.index, problem.out_dtype
    shape, strides = (problem.experts, problem.m, problem.n), (problem.m * problem.n, problem.n, 1)

    def call(mat_a: Tensor, mat_b: Tensor, offs: Tensor) -> Tensor | None:
        if (mat_a.data_ptr() | mat_b.data_ptr()) & 15 or not calls.may_run(index):
            return None
        out = new(shape, strides, dtype)
        run(mat_a, mat_b, offs, out)
        return out

    return call


def dense(plan: Plan, out: Tensor, *operands: Tensor) -> Callable[..., bool | None]:
    """Calls (out, mat_a, mat_b, offs) that write into out (E, M, N); whether they ran."""
    mat_a, _, offs = operands
    if not _reads_in_place(plan, offs) or not launch.dense(out):
        return calls.never
    run, may_write = _launcher(plan, mat_a.device), _writing(_bytes(out), operands)

    def call(out: Tensor, mat_a: Tensor, mat_b: Tensor, offs: Tensor) -> bool:
        if not may_write([out.data_ptr()], mat_a, mat_b, offs):
            return False
        run(mat_a, mat_b, offs, out)
        return True

    return call


def listed(plan: Plan, outs: list[Tensor], *operands: Tensor) -> Callable[..., bool | None]:
    """Calls (outs, mat_a, mat_b, offs) that write into one (M, N) tensor an expert, all of one signature; whether they
    ran."""
    mat_a, _, offs = operands
    if not _reads_in_place(plan, offs) or not launch.dense(outs[0]):
        return calls.never
    run, may_write = _launcher(plan, mat_a.device), _writing(_bytes(outs[0]), operands)
    shape, strides, dtype, device = outs[0].shape, outs[0].stride(), outs[0].dtype, mat_a.device

    def call(outs: list[Tensor], mat_a: Tensor, mat_b: Tensor, offs: Tensor) -> bool:
        addresses = []
        for out in outs:
            if out.shape != shape or out.stride() != strides or out.dtype is not dtype or out.device != device:
                return False
            addresses.append(out.data_ptr())
        if not may_write(addresses, mat_a, mat_b, offs):
            return False
        run(mat_a, mat_b, offs, launch.host_vector(addresses))
        return True

    return call


def _reads_in_place(plan: Plan, offs: Tensor) -> bool:
    """Whether there is something to compute, from offsets and operands the kernel reads as they are."""
    problem = plan.problem
    filled = problem.experts > 0 and problem.m > 0 and problem.n > 0 and problem.tokens > 1
    return filled and offs.dtype is torch.int32 and offs.is_contiguous()


def _launcher(plan: Plan, device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """The kernel as a function of mat_a, mat_b, offs and its target."""
    kernel, sms, shape = launch.kernel(plan), launch.multiprocessors(device.index), plan.workspace_shape
    new = calls.allocator(device)
    strides = None if shape is None else (shape[1] * shape[2], shape[2], 1)

    def run(mat_a: Tensor, mat_b: Tensor, offs: Tensor, target: Tensor) -> None:
        workspace = None if shape is None or strides is None else new(shape, strides, torch.int64)
        kernel.call(mat_a, mat_b, offs, target, workspace, sms)

    return run


def _bytes(tensor: Tensor) -> int:
    start, end = checks.byte_range(tensor)
    return end - start


def _writing(size: int, operands: tuple[Tensor, ...]) -> Callable[..., bool]:
    """Whether a kernel that reads (mat_a, mat_b, offs) of these sizes may write `size` bytes at every address."""
    size_a, size_b, size_offs = map(_bytes, operands)
    index = operands[0].device.index

    def may_write(addresses: list[int], mat_a: Tensor, mat_b: Tensor, offs: Tensor) -> bool:
        a, b = mat_a.data_ptr(), mat_b.data_ptr()
        if (a | b) & 15 or not calls.may_run(index):
            return False
        ordered, free = sorted(addresses), 0
        for address in ordered:
            if address < free or address & 15:
                return False
            free = address + size
        for start, length in ((a, size_a), (b, size_b), (offs.data_ptr(), size_offs)):
            place = bisect_right(ordered, start - size)  # the first output that ends behind `start`
            if place < len(ordered) and ordered[place] < start + length:
                return False
        return True

    return may_write
