"""Autocast, vmap, functional transforms that raise, and selective activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.autograd import forward_ad
from torch.utils import checkpoint

from tests.ops import cases

OPS = torch.ops.culax


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot"])
def test_autocast_kda(dtype: torch.dtype, compiled: bool) -> None:
    case = cases.kda(tokens=5, dtype=torch.float32).requiring()

    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype):
            return OPS.kda_fwd(*inputs, None, case.scale, True)

    run = torch.compile(forward, fullgraph=True, backend="aot_eager") if compiled else forward
    o, final_state, Aqk, Akk = run(*case.differentiable)
    assert [output.dtype for output in (o, final_state, Aqk, Akk)] == [dtype, torch.float32, dtype, dtype]
    half = [tensor.to(dtype) for tensor in (case.q, case.k, case.v)]
    by_hand = OPS.kda_fwd(*half, case.g, case.beta, case.initial_state, None, case.scale, True)
    assert torch.equal(o, by_hand[0]) and torch.equal(final_state, by_hand[1])
    gradients = torch.autograd.grad(o.float().sum(), case.differentiable)
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 6


def test_autocast_kda_bwd() -> None:
    """do, q, k and v are cast; the fp32 gates, states and their gradients are not."""
    case = cases.kda(tokens=5, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        gradients = case.backward(torch.ones_like(case.v), torch.ones_like(case.initial_state))
    low, high = torch.bfloat16, torch.float32
    assert [gradient.dtype for gradient in gradients] == [low, low, low, high, high, high]


def test_autocast_around_backward_only() -> None:
    """The gradient of an fp32 forward stays fp32, whatever surrounds backward()."""
    case = cases.kda(tokens=5, dtype=torch.float32).requiring()
    plain = torch.autograd.grad(case.forward()[0].sum(), case.differentiable)
    o = case.forward()[0]
    x, weight = cases.normal(1, 6, 3).requires_grad_(), cases.normal(2, 2, 3, 2).requires_grad_()
    y = OPS.grouped_mm(x, weight, torch.tensor([2, 6]))
    wanted = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(o.sum(), case.differentiable)
        products = torch.autograd.grad(y.sum(), (x, weight))
    assert all(map(torch.equal, inside, plain)) and all(map(torch.equal, products, wanted))


def test_autocast_grouped() -> None:
    mat_a, mat_b, offs = cases.wgrad()
    weight = cases.normal(9, 4, 5, 3)
    scaled = cases.scaled_wgrad("nvfp4")
    wanted = OPS.grouped_wgrad(**scaled)
    with torch.autocast("cpu", torch.bfloat16):
        assert OPS.grouped_mm(mat_b, weight, offs).dtype is torch.bfloat16
        assert OPS._grouped_mm_main_grad(mat_b, weight, offs, torch.zeros(4, 5, 3)).dtype is torch.bfloat16
        assert OPS.grouped_mm(mat_b.double(), weight.double(), offs).dtype is torch.float64
        assert OPS.grouped_wgrad(mat_a, mat_b, offs).dtype is torch.float32
        assert torch.equal(OPS.grouped_wgrad(**scaled), wanted)


def test_vmap() -> None:
    case = cases.kda(tokens=5)
    q = torch.stack([case.q, case.q * 2, case.q * 3])
    rest = case.arguments[1:]
    batched = torch.vmap(lambda q: OPS.kda_fwd(q, *rest, True))(q)
    for sample in range(3):
        for output, single in zip(batched, OPS.kda_fwd(q[sample], *rest, True)):
            assert torch.equal(output[sample], single)
    x, weight, offs = cases.normal(1, 3, 6, 4), cases.normal(2, 2, 4, 2), torch.tensor([2, 5])
    x.requires_grad_()
    torch.vmap(lambda x: OPS.grouped_mm(x, weight, offs))(x).sum().backward()
    loop = x.detach().clone().requires_grad_()
    sum(OPS.grouped_mm(row, weight, offs).sum() for row in loop).backward()
    assert torch.equal(x.grad, loop.grad)
    out = torch.vmap(partial(OPS.grouped_wgrad, offs=offs), in_dims=(2, None))(
        x.detach().permute(2, 1, 0), x[0].detach()
    )
    assert out.shape == (3, 2, 4, 4)


def product(x: Tensor) -> Tensor:
    return OPS.grouped_mm(x, torch.ones(2, 4, 3), torch.tensor([2, 5]))


def dual(x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return product(forward_ad.make_dual(x, torch.ones_like(x)))


def mutate_dual(x: Tensor) -> None:
    with forward_ad.dual_level():
        rows = forward_ad.make_dual(x, torch.ones_like(x))
        OPS.grouped_wgrad_out(torch.zeros(2, 4, 4), rows.t(), x, torch.tensor([2, 5]))


TRANSFORMS: dict[str, Callable[[Tensor], Any]] = {
    "grad": torch.func.grad(lambda x: product(x).sum()),
    "vjp": lambda x: torch.func.vjp(product, x),
    "jacrev": torch.func.jacrev(product),
    "jvp": lambda x: torch.func.jvp(product, (x,), (x,)),
    "jacfwd": torch.func.jacfwd(product),
    "vmap_of_grad": lambda x: torch.vmap(torch.func.grad(lambda x: product(x).sum()))(x[None]),
    "dual_tensor": dual,
    "dual_tensor_mutating": mutate_dual,
    "kda": lambda x: torch.func.grad(lambda q: OPS.kda_fwd(q, *cases.kda(tokens=5).arguments[1:], False)[0].sum())(
        cases.kda(tokens=5).q
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_functional_transforms_raise(name: str) -> None:
    """They raise, with advice; forward mode would otherwise drop the tangent without a word."""
    with pytest.raises(
        NotImplementedError, match=r"torch.func.*use torch.autograd \(backward, grad, create_graph=True\)"
    ):
        TRANSFORMS[name](cases.normal(1, 6, 4))


def test_functional_transforms_of_other_inputs() -> None:
    """Where no culax input is differentiated, transforms work around the op."""
    x = cases.normal(1, 6, 4)
    gradient = torch.func.grad(lambda scale: (product(x) * scale).sum())(torch.tensor(2.0))
    torch.testing.assert_close(gradient, product(x).sum())


def recomputing_backend() -> Callable[..., Any]:
    """Captured graphs run as they are, split into forward and backward by the partitioner that recomputes."""

    def plain(graph: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=plain, partition_fn=min_cut_rematerialization_partition)


@pytest.mark.parametrize("policy, forwards", [("save", 1), ("recompute", 2)])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot"])
def test_selective_checkpointing(policy: str, forwards: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that saves kda_fwd runs it once, one that doesn't runs it twice; the gradients are the same bits."""
    import culax.kda.api as api

    calls = []
    original = api.kda_chunked.forward
    monkeypatch.setattr(api.kda_chunked, "forward", lambda *a: calls.append(None) or original(*a))
    choice = checkpoint.CheckpointPolicy.MUST_SAVE if policy == "save" else checkpoint.CheckpointPolicy.MUST_RECOMPUTE

    def decide(ctx: Any, op: Any, *arguments: Any, **others: Any) -> checkpoint.CheckpointPolicy:
        return choice if op is OPS.kda_fwd.default else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    case = cases.kda(tokens=5).requiring()

    def block(*inputs: Tensor) -> Tensor:
        return OPS.kda_fwd(*inputs, None, case.scale, False)[0].sin()

    def step(*inputs: Tensor) -> Tensor:
        context = partial(checkpoint.create_selective_checkpoint_contexts, decide)
        return checkpoint.checkpoint(block, *inputs, use_reentrant=False, context_fn=context).sum()

    inputs = case.differentiable
    wanted = torch.autograd.grad(block(*inputs).sum(), inputs)
    run = torch.compile(step, fullgraph=True, backend=recomputing_backend()) if compiled else step
    run(*inputs)
    calls.clear()
    gradients = torch.autograd.grad(run(*inputs), inputs)
    assert len(calls) == forwards
    assert all(map(torch.equal, gradients, wanted))
