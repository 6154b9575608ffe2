"""Bitwise repeats, NaN-filled scratch memory, NaN around inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import cases

OPS = torch.ops.culax
NAN = float("nan")


def kda_calls() -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    fixed = cases.kda(tokens=130, dtype=torch.bfloat16, gate_dtype=torch.float32)
    packed = cases.kda(tokens=130, dtype=torch.float32, lengths=(1, 0, 64, 50))
    mat_a, mat_b, offs = cases.wgrad(dtype=torch.bfloat16)
    scaled = cases.scaled_wgrad("nvfp4")
    return {
        "kda_fwd": fixed.forward,
        "kda_fwd_packed": packed.forward,
        "kda_bwd": lambda: fixed.backward(fixed.v, fixed.initial_state),
        "kda_bwd_packed": lambda: packed.backward(packed.v, None),
        "kda_bwd_bwd": lambda: OPS._kda_bwd_bwd(*fixed.differentiable, fixed.v, None, *fixed.arguments),
        "grouped_mm": lambda: (OPS.grouped_mm(mat_b, cases.normal(9, 4, 5, 3, dtype=torch.bfloat16), offs),),
        "grouped_wgrad": lambda: (OPS.grouped_wgrad(mat_a, mat_b, offs, out_dtype=torch.float32),),
        "grouped_wgrad_nvfp4": lambda: (OPS.grouped_wgrad(**scaled),),
    }


CALLS = kda_calls()


@pytest.mark.parametrize("name", CALLS)
def test_repeats_are_bitwise_equal(name: str) -> None:
    first = CALLS[name]()
    for _ in range(19):
        assert all(map(torch.equal, CALLS[name](), first))


@pytest.mark.parametrize("name", CALLS)
def test_scratch_memory_is_written_before_it_is_read(name: str, poisoned_memory: None) -> None:
    outputs = CALLS[name]()
    assert all(output.isfinite().all() for output in outputs)


def surrounded(tensor: Tensor) -> Tensor:
    """The same values as a view inside a buffer of NaN (of the largest value, for integers)."""
    fill = NAN if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    buffer = torch.full([size + 2 for size in tensor.shape], fill, dtype=tensor.dtype)
    view = buffer[tuple(slice(1, size + 1) for size in tensor.shape)]
    return view.copy_(tensor)


def restrided(arguments: tuple[Any, ...]) -> list[Any]:
    return [surrounded(argument) if isinstance(argument, Tensor) else argument for argument in arguments]


@pytest.mark.parametrize("lengths", [None, (1, 0, 64, 5)], ids=["fixed", "packed"])
def test_kda_reads_only_its_inputs(lengths: tuple[int, ...] | None) -> None:
    case = cases.kda(tokens=70, dtype=torch.float32, lengths=lengths)
    for outputs, plain in (
        (OPS.kda_fwd(*restrided(case.arguments), True), case.forward()),
        (cases.Kda(*restrided(case.arguments)).backward(surrounded(case.v), None), case.backward(case.v, None)),
    ):
        for output, wanted in zip(outputs, plain):
            torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-6)


def test_kda_tokens_outside_the_sequences() -> None:
    """NaN in rows past cu_seqlens reaches nothing; those rows of every output are zero."""
    case = cases.kda(tokens=70, dtype=torch.float32, lengths=(3, 60))
    clean = [*case.forward(), *case.backward(case.v, case.initial_state)]
    for tensor in (case.q, case.k, case.v, case.g, case.beta):
        tensor[:, 63:] = NAN
    dirty = [*case.forward(), *case.backward(case.v, case.initial_state)]
    for output, wanted in zip(dirty, clean):
        if output.shape[:2] == (1, 70):
            assert not output[:, 63:].any() and not wanted[:, 63:].any()
            output, wanted = output[:, :63], wanted[:, :63]
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_rows_past_the_last_expert(dtype: torch.dtype) -> None:
    mat_a, mat_b, offs = cases.wgrad(dtype=dtype)
    weight = cases.normal(9, 4, 5, 3, dtype=dtype)
    gradient, product = OPS.grouped_wgrad(mat_a, mat_b, offs), OPS.grouped_mm(mat_b, weight, offs)
    mat_a[:, offs[-1] :] = NAN
    mat_b[offs[-1] :] = NAN
    assert torch.equal(OPS.grouped_wgrad(mat_a, mat_b, offs), gradient)
    assert torch.equal(OPS.grouped_mm(mat_b, weight, offs), product)
    assert not product[offs[-1] :].any() and not gradient[1].any()
    assert torch.equal(OPS.grouped_wgrad(surrounded(mat_a), surrounded(mat_b), surrounded(offs)), gradient)


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
def test_canaries_around_outputs(accumulate: bool) -> None:
    mat_a, mat_b, offs = cases.wgrad()
    out = surrounded(torch.zeros(4, 6, 5))
    OPS.grouped_wgrad_out(out, mat_a, mat_b, offs, accumulate=accumulate)
    torch.testing.assert_close(out, OPS.grouped_wgrad(mat_a, mat_b, offs), rtol=1e-6, atol=1e-6)
    buffer = out._base
    assert buffer is not None and buffer.isnan().sum() == buffer.numel() - out.numel()
