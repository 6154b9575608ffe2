"""Calls of a known signature: what they may skip, and what sends them back to the general path."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from culax import calls, dispatch
from culax.grouped_wgrad import api, launch, plan
from tests.grouped_wgrad.standin import ENDS, M, N, Recorder, expected, operands, shifted

OPS = torch.ops.culax
FORMS = ("new", "dense", "list")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Every call is planned for the kernel, which a recorder plays; CPU tensors stand for a GPU's."""
    recorder = Recorder(accumulate=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(calls, "current_device", lambda: None)
    monkeypatch.setattr(launch, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(launch, "kernel", lambda _: recorder)
    monkeypatch.setattr(
        dispatch, "choose", lambda problem, _: dispatch.Choice("cutedsl", "", plan.plan(problem, "sm_90a"), "built")
    )
    monkeypatch.setattr(dispatch, "_prepared", {})
    monkeypatch.setattr(api, "_ready", {})
    return recorder


def call(form: str, a: Tensor, b: Tensor, offs: Tensor, outs: list[Tensor] | None = None) -> Tensor:
    """One call of an op; its result as one tensor. `outs` are slices of one dense (E, M, N) tensor for "dense"."""
    if form == "new":
        return OPS.grouped_wgrad(a.t(), b, offs, out_dtype=torch.float32)
    outs = list(torch.full((len(ENDS), M, N), 7.0)) if outs is None else outs
    if form == "list":
        OPS.grouped_wgrad_out_list(outs, a.t(), b, offs)
        return torch.stack(outs)
    whole = outs[0].as_strided((len(ENDS), M, N), (M * N, N, 1))
    before = whole._version
    OPS.grouped_wgrad_out(whole, a.t(), b, offs)
    assert whole._version > before
    return whole


@pytest.mark.parametrize("form", FORMS)
def test_a_known_signature_skips_the_general_path(form: str, kernel: Recorder, general: list[str]) -> None:
    for seed in range(3):
        a, b, offs = operands()
        a, b = a + seed, b - seed
        torch.testing.assert_close(call(form, a, b, offs), expected(a, b))
        mat_a, mat_b, seen, *_ = kernel.arguments
        assert (mat_a.data_ptr(), mat_b.data_ptr(), seen.data_ptr()) == (a.data_ptr(), b.data_ptr(), offs.data_ptr())
    assert len(general) == 1


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda x: torch.cat((x, x)),
    "stride": lambda x: x.t().contiguous().t(),
    "dtype": lambda x: x.half(),
    "address": shifted,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", CHANGES)
def test_other_operands_take_the_general_path(form: str, change: str, kernel: Recorder, general: list[str]) -> None:
    a, b, offs = operands()
    call(form, a, b, offs)
    a, b = CHANGES[change](a), CHANGES[change](b)
    torch.testing.assert_close(call(form, a, b, offs), expected(a, b))
    assert len(general) == 2
    assert all(matrix.data_ptr() % 16 == 0 for matrix in kernel.arguments[:2])


def strided(offs: Tensor) -> Tensor:
    return torch.stack((offs, torch.full_like(offs, -1)), 1)[:, 0]


def dense(out: Tensor, a: Tensor, b: Tensor, offs: Tensor, **options: Any) -> Tensor:
    OPS.grouped_wgrad_out(out, a.t(), b, offs, **options)
    return out


def zeros(columns: int = N, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(len(ENDS), M, columns, dtype=dtype)


OTHER_CALLS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "offs_strides": (partial(call, "new"), lambda a, b, offs: call("new", a, b, strided(offs))),
    "offs_dtype": (partial(call, "new"), lambda a, b, offs: call("new", a, b, offs.long())),
    "out_dtype": (partial(call, "new"), lambda a, b, offs: OPS.grouped_wgrad(a.t(), b, offs)),
    "dense_dtype": (lambda *x: dense(zeros(), *x), lambda *x: dense(zeros(dtype=torch.bfloat16), *x)),
    "dense_strides": (lambda *x: dense(zeros(), *x), lambda *x: dense(zeros(N + 8)[..., :N], *x)),
    "accumulate": (lambda *x: dense(zeros(), *x), lambda *x: dense(zeros(), *x, accumulate=True)),
    "list_strides": (partial(call, "list"), lambda *x: call("list", *x, list(zeros(N + 8)[..., :N]))),
}


NEVER_READY = ("offs_strides", "offs_dtype", "dense_strides", "list_strides")
"""What kernels do not take in place goes through a copy, every time."""


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_every_difference_in_a_call_takes_the_general_path(name: str, kernel: Recorder, general: list[str]) -> None:
    (a, b, offs), (first, other) = operands(), OTHER_CALLS[name]
    first(a, b, offs)
    assert len(general) == 1
    for calls_before in (1, 2):
        found = other(a, b, offs)
        assert len(general) == (1 + calls_before if name in NEVER_READY else 2)
        torch.testing.assert_close(found, expected(a, b).to(found.dtype))
        assert kernel.arguments[2].is_contiguous() and kernel.arguments[2].dtype is torch.int32
        assert kernel.arguments[3].is_contiguous()


def test_another_operand_layout_takes_the_general_path(kernel: Recorder, general: list[str]) -> None:
    """The same tensors may be either layout's."""
    (a, b, offs), layouts = operands(), ("2d", "ragged")
    for layout in layouts:
        OPS.grouped_wgrad(a.t().contiguous(), b.t().contiguous().t(), offs, operand_layout=layout)
    assert len(general) == len(layouts)


@pytest.mark.parametrize("form", FORMS)
def test_another_current_device_takes_the_general_path(form, kernel, general: list[str], monkeypatch) -> None:
    arguments = operands()
    call(form, *arguments)
    monkeypatch.setattr(calls, "current_device", lambda: 1)
    torch.testing.assert_close(call(form, *arguments), expected(*arguments[:2]))
    assert len(general) == 2


@pytest.mark.parametrize("form", FORMS)
def test_memory_that_deterministic_torch_fills_comes_from_the_general_path(form, kernel, general, poisoned_memory):
    for _ in range(2):
        call(form, *operands())
    assert len(general) == 2


@pytest.mark.parametrize("form", FORMS)
def test_bad_arguments_of_a_known_signature_still_raise(form: str, kernel: Recorder) -> None:
    a, b, offs = operands()
    call(form, a, b, offs)
    with pytest.raises(ValueError, match="`offs`: expected dtype"):
        call(form, a, b, offs.float())
    with pytest.raises(ValueError, match="`scale_a`: expected None"):
        OPS.grouped_wgrad(a.t(), b, offs, scale_a=torch.ones(1), out_dtype=torch.float32)


@pytest.mark.parametrize("form", ["dense", "list"])
@pytest.mark.parametrize("operand", ["mat_a", "mat_b", "offs"])
def test_operands_inside_an_output_are_copied(form: str, operand: str, kernel: Recorder, general: list[str]) -> None:
    a, b, offs = operands()
    call(form, a, b, offs)
    wanted = expected(a, b)
    outs = list(torch.zeros(len(ENDS), M, N))
    tensors = {"mat_a": a, "mat_b": b, "offs": offs}
    given = tensors[operand]
    inside = outs[1].view(-1).view(given.dtype)[8 : 8 + given.numel()].view(given.shape)
    tensors[operand] = inside.copy_(given)
    torch.testing.assert_close(call(form, *tensors.values(), outs=outs), wanted)
    assert len(general) == 2


def test_lists_that_overlap_or_differ(kernel: Recorder, general: list[str]) -> None:
    arguments = operands()
    call("list", *arguments)
    buffer = torch.zeros(len(ENDS) * M * N + 8)
    outs = [buffer[start : start + M * N].view(M, N) for start in (0, M * N, 2 * M * N - 4)]
    with pytest.raises(ValueError, match=r"`outs\[2\]`: expected memory apart from that of outs\[1\]"):
        call("list", *arguments, outs=outs)
    outs[2] = torch.zeros(N, M).t()
    torch.testing.assert_close(call("list", *arguments, outs=outs), expected(*arguments[:2]))
    outs[2] = buffer[2 * M * N + 2 :][: M * N].view(M, N)  # aligned to 8 bytes, not to 16
    torch.testing.assert_close(call("list", *arguments, outs=outs), expected(*arguments[:2]))
    outs[2] = torch.zeros(M, N)
    torch.testing.assert_close(call("list", *arguments, outs=outs[::-1]), expected(*arguments[:2]))
    assert len(general) == 4
