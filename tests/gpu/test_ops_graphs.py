"""CUDA graphs: captured by hand, by torch.compile(mode="reduce-overhead"), and by make_graphed_callables."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import culax
from tests.gpu import ops_cases
from tests.gpu.graphs import capture
from tests.ops import cases

OPS = torch.ops.culax
NAMES = ("kda_fwd_kernel", "kda_bwd_kernel", "kda_bwd_kernel_packed", "kda_bwd_torch_packed", "grouped_mm_kernel")
NAMES += ("grouped_wgrad_kernel", "grouped_wgrad_torch", "grouped_wgrad_out_kernel", "grouped_wgrad_out_list_kernel")
NAMES += ("grouped_wgrad_e4m3", "grouped_wgrad_nvfp4", "kda_bwd_bwd")


@pytest.fixture(scope="module")
def calls() -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    return ops_cases.calls()


@pytest.mark.parametrize("name", NAMES)
def test_hundred_replays(name: str, calls: dict) -> None:
    wanted = calls[name]()
    graph, outputs = capture(calls[name])
    for _ in range(100):
        graph.replay()
    assert all(map(torch.equal, outputs, wanted))
    for output in outputs:
        if output.is_floating_point():
            output.fill_(float("nan"))
    graph.replay()
    assert all(map(torch.equal, outputs, wanted))


@pytest.mark.parametrize("path", ["kernel", "torch"])
def test_replay_with_changed_inputs(path: str) -> None:
    """New values and cu_seqlens written in place; a larger eager call and a second graph of the pool in between."""
    make = ops_cases.kernel_kda if path == "kernel" else ops_cases.torch_kda
    case, other = make(tokens=130, lengths=(1, 0, 64, 65)), make(tokens=130, lengths=(60, 5, 0, 60))
    gradients = lambda: case.backward(case.v, case.initial_state)  # noqa: E731
    graph, outputs = capture(gradients)
    second, forward = capture(case.forward, graph.pool())
    for replay in range(4):
        source = other if replay % 2 == 0 else make(tokens=130, lengths=(1, 0, 64, 65))
        for name in (*cases.KDA_INPUTS, "cu_seqlens"):
            getattr(case, name).copy_(getattr(source, name))
        large = make(tokens=1000)
        large.backward(large.v, None)
        graph.replay()
        for output, wanted in zip(outputs, source.backward(source.v, source.initial_state)):
            assert torch.equal(output, wanted)
        second.replay()
        for output, wanted in zip(forward, source.forward()):
            assert torch.equal(output, wanted)


@pytest.mark.parametrize("form", ["functional", "out", "list"])
def test_replay_honours_new_offsets(form: str) -> None:
    mat_a, mat_b, offs = ops_cases.kernel_wgrad((128, 128, 0, 256), tail=0)
    out = torch.zeros(4, 64, 72, device="cuda")

    def call() -> tuple[Tensor, ...]:
        if form == "functional":
            return (OPS.grouped_wgrad(mat_a, mat_b, offs, out_dtype=torch.float32),)
        if form == "out":
            OPS.grouped_wgrad_out(out, mat_a, mat_b, offs)
        else:
            OPS.grouped_wgrad_out_list(list(out), mat_a, mat_b, offs)
        return (out,)

    graph, (result,) = capture(call)
    for sizes in ((256, 0, 128, 128), (0, 0, 512, 0), (1, 63, 65, 7), (0, 0, 0, 0)):
        offs.copy_(torch.tensor(sizes).cumsum(0))
        result.fill_(float("nan"))
        graph.replay()
        wanted = OPS.grouped_wgrad(mat_a, mat_b, offs, out_dtype=torch.float32)
        assert torch.equal(result, wanted), sizes


def test_reduce_overhead_kda(compiled_graphs: None) -> None:
    """Forward and backward replayed on new data, gradients accumulated over two steps."""

    def loss_of(*inputs: Tensor) -> Tensor:
        o, final_state, _, _ = OPS.kda_fwd(*inputs, None, 0.5, True)
        return o.float().sin().sum() + final_state.sin().sum()

    compiled = torch.compile(loss_of, fullgraph=True, mode="reduce-overhead")
    leaves = ops_cases.kernel_kda().requiring().differentiable
    twins = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    for leaf in (*leaves, *twins):  # memory of its own to accumulate into, not the graph's
        leaf.grad = torch.zeros_like(leaf)
    for step in range(6):
        for leaf, twin in zip(leaves, twins):
            with torch.no_grad():
                leaf.mul_(0.9)
                twin.mul_(0.9)
        torch.compiler.cudagraph_mark_step_begin()
        compiled(*leaves).backward()
        loss_of(*twins).backward()
        if step % 2:
            for leaf, twin in zip(leaves, twins):
                assert leaf.grad is not None and twin.grad is not None
                assert twin.grad.any() and ops_cases.relative(leaf.grad, twin.grad) < 1e-2
                leaf.grad.zero_()
                twin.grad.zero_()


def test_reduce_overhead_grouped_linear(compiled_graphs: None) -> None:
    layer = culax.GroupedLinear(4, 64, 72, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for step in range(5):
        x = cases.normal(step, 200, 64, dtype=torch.bfloat16, device="cuda").requires_grad_()
        offs = torch.tensor([20 * step, 64, 130, 190 + step], dtype=torch.int32, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x, offs).float().square().sum().backward()
        ours = (x.grad.clone(), layer.weight.grad.clone())
        x.grad = layer.weight.grad = None
        layer(x, offs).float().square().sum().backward()
        for gradient, wanted in zip(ours, (x.grad, layer.weight.grad)):
            assert ops_cases.relative(gradient, wanted) < 1e-2
        x.grad = layer.weight.grad = None


@pytest.mark.parametrize("op", ["kda", "grouped_mm"])
def test_make_graphed_callables(op: str) -> None:
    if op == "kda":
        leaves = ops_cases.kernel_kda().requiring().differentiable
        function = lambda *inputs: OPS.kda_fwd(*inputs, None, 0.5, True)[:2]  # noqa: E731
    else:
        _, mat_b, offs = ops_cases.kernel_wgrad()
        weight = cases.normal(9, 4, 72, 64, dtype=torch.bfloat16, device="cuda")
        leaves = [mat_b.detach().requires_grad_(), weight.requires_grad_()]
        function = lambda x, weight: (OPS.grouped_mm(x, weight, offs),)  # noqa: E731
    samples = tuple(leaf.detach().clone().requires_grad_() for leaf in leaves)
    graphed = torch.cuda.make_graphed_callables(function, samples)
    for step in range(3):
        inputs = [(leaf.detach() * (1 - 0.1 * step)).requires_grad_() for leaf in leaves]
        results = []
        for run in (graphed, function):
            outputs = run(*inputs)
            loss = sum(output.float().sin().sum() for output in outputs)
            results.append([output.detach().clone() for output in outputs] + list(torch.autograd.grad(loss, inputs)))
        for ours, wanted in zip(*results):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=0)


def test_warmup_before_capture() -> None:
    """warmup, with meta tensors, makes the first call of a shape legal inside a capture."""
    case = ops_cases.kernel_kda(tokens=77)
    metas = [tensor.to("meta") if isinstance(tensor, Tensor) else tensor for tensor in case.arguments]
    culax.warmup("kda_fwd", *metas, False)
    culax.warmup("kda_bwd", metas[2], None, *metas[:5], None, None, *metas[5:])
    mat_a, mat_b, offs = ops_cases.kernel_wgrad()
    culax.warmup(OPS.grouped_wgrad, mat_a, mat_b, offs)

    def calls() -> tuple[Tensor, ...]:
        OPS.grouped_wgrad(mat_a, mat_b, offs)
        o, _, Aqk, Akk = case.forward()
        return case.backward(o, None, (Aqk, Akk))

    graph, gradients = capture(calls, warm=False)
    graph.replay()
    assert all(gradient.isfinite().all() for gradient in gradients)
