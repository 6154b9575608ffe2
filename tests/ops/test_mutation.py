"""The mutating ops: views of one buffer, empty lists, one tensor twice, operands that are outputs, accumulate."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from culax.grouped_wgrad import api
from tests.ops import cases

OPS = torch.ops.culax


def expected(mat_a: Tensor, mat_b: Tensor, offs: Tensor) -> Tensor:
    ends = [0, *offs.tolist()]
    a, b = mat_a.double(), mat_b.double()
    return torch.stack([a[:, start:end] @ b[start:end] for start, end in zip(ends, ends[1:])])


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("form", ["dense", "list", "views", "columns", "transposed"])
def test_forms_of_outputs(form: str, accumulate: bool) -> None:
    mat_a, mat_b, offs = cases.wgrad()
    wanted = expected(mat_a, mat_b, offs) + (3 if accumulate else 0)
    start = 3.0 if accumulate else float("nan")
    call = partial(OPS.grouped_wgrad_out_list, mat_a=mat_a, mat_b=mat_b, offs=offs, accumulate=accumulate)
    guard = None
    if form == "dense":
        out = torch.full((4, 6, 5), start)
        OPS.grouped_wgrad_out(out, mat_a, mat_b, offs, accumulate=accumulate)
    elif form == "list":
        outs = [torch.full((6, 5), start) for _ in range(4)]
        call(outs)
        out = torch.stack(outs)
    elif form == "views":
        buffer = torch.full((5 * 30,), start)
        outs = [buffer[30 * e : 30 * e + 30].view(6, 5) for e in range(4)]
        guard = buffer[120:]
        call(outs)
        out = torch.stack(outs)
    elif form == "columns":  # side by side in one matrix: their address ranges overlap, their elements do not
        buffer = torch.full((6, 25), start)
        outs = [buffer[:, 5 * e : 5 * e + 5] for e in range(4)]
        guard = buffer[:, 20:]
        call(outs)
        out = torch.stack(outs)
    else:
        out = torch.full((5, 6, 4), start).permute(2, 1, 0)
        OPS.grouped_wgrad_out(out, mat_a, mat_b, offs, accumulate=accumulate)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    if guard is not None:
        assert torch.equal(guard, torch.full_like(guard, start)) or (guard.isnan().all() and not accumulate)


def test_the_ops_themselves_count_a_mutation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write past torch; without the count a backward would use overwritten tensors without a word."""
    mat_a, mat_b, offs = cases.wgrad()
    monkeypatch.setattr(api.reference, "grouped_wgrad_out", lambda *_: None)
    out, outs = torch.zeros(4, 6, 5), [torch.zeros(6, 5) for _ in range(4)]
    OPS.grouped_wgrad_out(out, mat_a, mat_b, offs)
    OPS.grouped_wgrad_out_list(outs, mat_a, mat_b, offs)
    assert all(tensor._version > 0 for tensor in (out, *outs))


def test_empty_list() -> None:
    mat_a, mat_b, _ = cases.wgrad((), tail=3)
    OPS.grouped_wgrad_out_list([], mat_a, mat_b, torch.zeros(0, dtype=torch.int32))


@pytest.mark.parametrize("form", ["same", "shifted", "inside", "around"])
def test_overlapping_outputs_raise(form: str) -> None:
    mat_a, mat_b, offs = cases.wgrad((3, 4))
    buffer = torch.zeros(7, 16)
    first = buffer[:6, :5]
    seconds = {
        "same": first,
        "shifted": buffer[:6, 4:9],
        "inside": buffer.view(-1)[40:70].view(6, 5),
        "around": buffer.as_strided((6, 5), (16, 1), 12),  # the last column is the next row's first one
    }
    second = seconds[form]
    with pytest.raises(ValueError, match=r"grouped_wgrad_out_list: argument `outs\[1\]`: expected memory apart"):
        OPS.grouped_wgrad_out_list([first, second], mat_a, mat_b, offs)
    assert not buffer.any()


@pytest.mark.parametrize("pitch", [0, 2, 5, 100])
def test_overlapping_rows_of_any_pitch_raise(pitch: int) -> None:
    """The stride of a dimension of size 1 says nothing."""
    mat_a, mat_b, offs = cases.wgrad((3, 4), m=1)
    buffer = torch.zeros(16)
    outs = [buffer.as_strided((1, 5), (pitch, 1), start) for start in (0, 3)]
    with pytest.raises(ValueError, match=r"argument `outs\[1\]`: expected memory apart"):
        OPS.grouped_wgrad_out_list(outs, mat_a, mat_b, offs)
    apart = [buffer.as_strided((1, 5), (pitch, 1), start) for start in (0, 5)]
    OPS.grouped_wgrad_out_list(apart, mat_a, mat_b, offs)
    torch.testing.assert_close(torch.stack(apart).double(), expected(mat_a, mat_b, offs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("operand", ["mat_a", "mat_b", "both"])
def test_operand_is_output(operand: str, accumulate: bool) -> None:
    """pytorch issue 198031: a compiler may merge a clone with its source, so an op reads and writes one buffer."""
    tokens = 12
    buffer = cases.normal(1, 2 * tokens * tokens)
    out = buffer.view(2, tokens, tokens)
    view = buffer[tokens * tokens - 7 :][: tokens * tokens].view(tokens, tokens)
    other = cases.normal(2, tokens, tokens)
    mat_a, mat_b = {"mat_a": (view.t(), other), "mat_b": (other.t(), view), "both": (view.t(), view)}[operand]
    offs = torch.tensor([5, 11], dtype=torch.int32)
    wanted = expected(mat_a, mat_b, offs) + (out.double() if accumulate else 0)
    OPS.grouped_wgrad_out(out, mat_a, mat_b, offs, accumulate=accumulate)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_clone_then_mutate_compiled(backend: str) -> None:
    mat_b = cases.normal(2, 12, 12)
    offs = torch.tensor([5, 11], dtype=torch.int32)

    def step(x: Tensor) -> Tensor:
        y = x.clone()
        OPS.grouped_wgrad_out(y, x[1], mat_b, offs, accumulate=True)
        return y

    x = cases.normal(1, 2, 12, 12)
    kept = x.clone()
    compiled = torch.compile(step, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(compiled, step(x), rtol=1e-6, atol=1e-6)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("discrete", [False, True], ids=["dense", "list"])
def test_mutation_compiled(discrete: bool) -> None:
    mat_a, mat_b, offs = cases.wgrad()

    def step(out: Tensor, a: Tensor) -> Tensor:
        if discrete:
            OPS.grouped_wgrad_out_list(list(out.unbind()), a, mat_b, offs, accumulate=True)
        else:
            OPS.grouped_wgrad_out(out, a, mat_b, offs, accumulate=True)
        return out * 2

    out, eager = torch.ones(4, 6, 5), torch.ones(4, 6, 5)
    compiled = torch.compile(step, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(out, mat_a), step(eager, mat_a), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, eager, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("argument", ["out", "mat_a", "mat_b"])
def test_requires_grad_raises(argument: str) -> None:
    mat_a, mat_b, offs = cases.wgrad()
    tensors = {"out": torch.zeros(4, 6, 5), "mat_a": mat_a, "mat_b": mat_b, "offs": offs}
    tensors[argument] = tensors[argument].detach().requires_grad_()
    with pytest.raises(ValueError, match=f"grouped_wgrad_out: argument `{argument}`: expected no requires_grad"):
        OPS.grouped_wgrad_out(**tensors)
    with torch.no_grad():
        OPS.grouped_wgrad_out(**tensors)
    with torch.inference_mode():
        OPS.grouped_wgrad_out(**tensors)
    outs = list(torch.zeros(4, 6, 5))
    outs[2].requires_grad_()
    with pytest.raises(ValueError, match="grouped_wgrad_out_list: argument `outs`: expected no requires_grad"):
        OPS.grouped_wgrad_out_list(outs, mat_a, mat_b, offs)
