"""What opcheck misses: version counters, storage, a gradient that is really there, and fakes under odd strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.ops import cases

OPS = torch.ops.culax


def functional_calls() -> dict[str, tuple[Callable, tuple[Any, ...]]]:
    """Each functional op with its inputs, by name."""
    case = cases.kda(tokens=66, dtype=torch.bfloat16, gate_dtype=torch.float32, sizes=(1, 2, 4, 3))
    packed = cases.kda(tokens=66, dtype=torch.float32, lengths=(0, 1, 60), sizes=(1, 2, 4, 3))
    empty = cases.kda(tokens=0)
    o, final_state, Aqk, Akk = case.forward()
    *tensors, initial_state, cu_seqlens, scale = case.arguments
    mat_a, mat_b, offs = cases.wgrad()
    double = (None, *case.differentiable[1:], o, None)
    return {
        "kda_fwd": (OPS.kda_fwd, (*case.arguments, True)),
        "kda_fwd_no_tokens": (OPS.kda_fwd, (*empty.arguments, True)),
        "kda_bwd_no_tokens": (
            OPS.kda_bwd,
            (None, empty.initial_state, *empty.arguments[:5], None, None, *empty.arguments[5:]),
        ),
        "kda_fwd_no_state": (OPS.kda_fwd, (*packed.arguments, False)),
        "kda_bwd": (OPS.kda_bwd, (o, final_state, *tensors, Aqk, Akk, initial_state, cu_seqlens, scale)),
        "kda_bwd_no_gradients": (OPS.kda_bwd, (None, None, *tensors, None, None, None, None, scale)),
        "kda_bwd_bwd": (OPS._kda_bwd_bwd, (*double, *case.arguments)),
        "grouped_mm": (OPS.grouped_mm, (mat_b, cases.normal(9, 4, 5, 3), offs)),
        "grouped_wgrad": (OPS.grouped_wgrad, (mat_a, mat_b, offs)),
        "grouped_wgrad_bf16": (
            OPS.grouped_wgrad,
            (mat_a, mat_b, offs, None, None, None, None, "padded", "2d", torch.bfloat16),
        ),
    }


CALLS = functional_calls()


def outputs_of(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def padded(tensor: Tensor) -> Tensor:
    """The same values inside a larger buffer."""
    buffer = tensor.new_zeros([size + 3 for size in tensor.shape])
    view = buffer[tuple(slice(1, size + 1) for size in tensor.shape)]
    return view.copy_(tensor)


def swapped(tensor: Tensor) -> Tensor:
    """The same values with the first and the last dimension swapped in memory."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def expanded(tensor: Tensor) -> Tensor:
    """The first row for all rows, with stride 0."""
    return tensor[:1].expand(tensor.shape)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {"sliced": padded, "transposed": swapped, "expanded": expanded}


def restride(arguments: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    return tuple(
        change(argument) if isinstance(argument, Tensor) and argument.dim() > 1 and argument.numel() else argument
        for argument in arguments
    )


def assert_like(fake: tuple[Tensor, ...], real: tuple[Tensor, ...]) -> None:
    assert len(fake) == len(real)
    for predicted, output in zip(fake, real):
        assert tuple(map(int, predicted.shape)) == tuple(output.shape)
        assert tuple(map(int, predicted.stride())) == output.stride()
        assert (predicted.dtype, predicted.device) == (output.dtype, output.device)
        assert output.is_contiguous()


@pytest.mark.parametrize("strides", ["plain", *STRIDES])
@pytest.mark.parametrize("name", CALLS)
def test_fake_against_real(name: str, strides: str) -> None:
    op, arguments = CALLS[name]
    arguments = restride(arguments, STRIDES.get(strides, lambda tensor: tensor))
    real = outputs_of(op(*arguments))
    for shape_env in (None, ShapeEnv()):  # without one, sizes are concrete; with one, symbolic
        with FakeTensorMode(shape_env=shape_env) as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
            predicted = outputs_of(op(*fakes))
            assert shape_env is None or not shape_env.guards, "a fake compared a symbolic size"
            assert_like(predicted, real)


@pytest.mark.parametrize("name", CALLS)
def test_meta_against_real(name: str) -> None:
    op, arguments = CALLS[name]
    metas = [argument.to("meta") if isinstance(argument, Tensor) else argument for argument in arguments]
    for predicted, output in zip(outputs_of(op(*metas)), outputs_of(op(*arguments))):
        assert (predicted.shape, predicted.stride()) == (output.shape, output.stride())
        assert (predicted.dtype, predicted.device.type) == (output.dtype, "meta")


@pytest.mark.parametrize("strides", ["sliced", "transposed"])
@pytest.mark.parametrize("name", CALLS)
def test_strides_change_nothing(name: str, strides: str) -> None:
    op, arguments = CALLS[name]
    for plain, odd in zip(outputs_of(op(*arguments)), outputs_of(op(*restride(arguments, STRIDES[strides])))):
        bound = 1e-5 if plain.dtype is torch.float32 else 2e-2
        torch.testing.assert_close(odd, plain, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", CALLS)
def test_storage_is_disjoint(name: str) -> None:
    op, arguments = CALLS[name]
    versions = [argument._version for argument in arguments if isinstance(argument, Tensor)]
    storages = [a.untyped_storage().data_ptr() for a in arguments if isinstance(a, Tensor) and a.numel()]
    storages += [output.untyped_storage().data_ptr() for output in outputs_of(op(*arguments)) if output.numel()]
    inputs = {id(argument) for argument in arguments if isinstance(argument, Tensor) and argument.numel()}
    assert len(set(storages)) == len(storages) - (sum(map(is_tensor, arguments)) - len(inputs))
    assert versions == [argument._version for argument in arguments if isinstance(argument, Tensor)]


def is_tensor(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.numel() > 0


@pytest.mark.parametrize("name", ["kda_fwd", "kda_bwd", "grouped_mm", "grouped_wgrad"])
def test_gradients_are_there(name: str) -> None:
    """Every floating input gets a gradient that is not zero: dropping one formula line would show here."""
    op, arguments = CALLS[name]
    op_arguments = list(arguments)
    if name == "kda_bwd":
        op_arguments[7] = op_arguments[8] = None  # Aqk and Akk are functions of q, k, g, beta: no gradient of their own
    leaves = []
    for position, argument in enumerate(op_arguments):
        if is_tensor(argument) and argument.is_floating_point():
            op_arguments[position] = argument.detach().clone().requires_grad_()
            leaves.append(op_arguments[position])
    outputs = [output for output in outputs_of(op(*op_arguments)) if output.requires_grad]
    loss = sum((output.double() * cases.normal(20 + i, *output.shape)).sum() for i, output in enumerate(outputs))
    for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves)):
        assert gradient.shape == leaf.shape and gradient.dtype == leaf.dtype
        assert gradient.abs().max() > 0


def test_non_differentiable_outputs() -> None:
    case = cases.kda(tokens=5).requiring()
    assert [output.requires_grad for output in case.forward(True)] == [True, True, False, False]
    assert [output.requires_grad for output in case.forward(False)] == [True, False, False, False]
    stateless = cases.kda(tokens=5, state=False).requiring()
    gradients = stateless.backward(torch.ones_like(stateless.v), None)
    assert [gradient.requires_grad for gradient in gradients] == [True] * 5 + [False]
    scaled = cases.scaled_wgrad("nvfp4")
    scaled["global_scale_a"].requires_grad_()
    assert not OPS.grouped_wgrad(**scaled).requires_grad


def test_mutating_ops_bump_versions() -> None:
    mat_a, mat_b, offs = cases.wgrad((0, 0), tail=0)  # nothing to compute: only the op itself can bump
    for tensor in (torch.zeros(2, 6, 5), torch.zeros(2, 6, 0)):
        before = tensor._version
        OPS.grouped_wgrad_out(tensor, mat_a, mat_b[:, : tensor.shape[2]], offs)
        assert tensor._version > before
    outs = [torch.zeros(6, 5) for _ in range(2)]
    before = [out._version for out in outs]
    OPS.grouped_wgrad_out_list(outs, mat_a, mat_b, offs)
    assert all(out._version > version for out, version in zip(outs, before))


def test_stale_saved_tensor_raises() -> None:
    mat_a, mat_b, offs = cases.wgrad()
    out = torch.ones(4, 6, 5)
    factor = torch.ones(4, 6, 5, requires_grad=True)
    loss = (factor * out).sum()
    OPS.grouped_wgrad_out(out, mat_a, mat_b, offs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
