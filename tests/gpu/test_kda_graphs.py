"""KDA in CUDA graphs, forward and backward: captured by hand, by torch.compile, and by make_graphed_callables."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import culax
from tests.gpu import ops_cases
from tests.gpu.graphs import capture
from tests.ops import cases

BF16 = torch.bfloat16
HEADS, VALUE_HEADS, DIM, TOKENS = 2, 4, 128, 300
PACKINGS = (
    (0, 1, 1, 65, 300),
    (0, 300, 300, 300, 300),
    (10, 74, 138, 202, 266),
    (0, 0, 0, 0, 0),
    (0, 64, 128, 192, 290),
)


def raw_inputs(seed: int, tokens: int = TOKENS, heads: int = HEADS) -> dict[str, Tensor]:
    """What chunk_kda takes with all its options in the kernel: raw q, k, gates and logits of beta."""

    def normal(index: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return cases.normal(100 * seed + index, *shape, dtype=dtype, device="cuda")

    rows = (1, tokens)
    return {
        "q": normal(1, *rows, heads, DIM),
        "k": normal(2, *rows, heads, DIM),
        "v": normal(3, *rows, VALUE_HEADS, DIM),
        "g": normal(4, *rows, VALUE_HEADS, DIM, dtype=torch.float32),
        "beta": normal(5, *rows, VALUE_HEADS, dtype=torch.float32),
        "A_log": normal(6, VALUE_HEADS, dtype=torch.float32),
        "dt_bias": normal(7, VALUE_HEADS * DIM, dtype=torch.float32),
    }


def chunk_kda(inputs: dict[str, Tensor], cu_seqlens: Tensor | None, initial_state: Tensor | None) -> tuple:
    """The Kimi configuration, with its bounded gate."""
    return culax.chunk_kda(
        **inputs,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=-5.0,
    )


class Step:
    """Forward and backward of packed sequences over tensors that stay where they are."""

    def __init__(self, seed: int) -> None:
        self.inputs = {name: x.requires_grad_() for name, x in raw_inputs(seed).items()}
        self.initial, self.dht = (cases.normal(100 * seed + i, 4, VALUE_HEADS, DIM, DIM, device="cuda") for i in (8, 9))
        self.initial.requires_grad_()
        self.do = cases.normal(100 * seed + 10, 1, TOKENS, VALUE_HEADS, DIM, dtype=BF16, device="cuda")
        self.cu_seqlens = torch.tensor(PACKINGS[seed % len(PACKINGS)], dtype=torch.int32, device="cuda")

    @property
    def tensors(self) -> list[Tensor]:
        """All inputs."""
        return [*self.inputs.values(), self.initial, self.dht, self.do, self.cu_seqlens]

    def __call__(self) -> list[Tensor]:
        """o, final state, and every gradient."""
        outputs = chunk_kda(self.inputs, self.cu_seqlens, self.initial)
        leaves = (*self.inputs.values(), self.initial)
        return [*outputs, *torch.autograd.grad(outputs, leaves, (self.do, self.dht))]


def test_a_thousand_replays_of_forward_and_backward() -> None:
    """New inputs and new cu_seqlens values before every replay, a larger eager call before some: eager's bits."""
    sources = [Step(seed) for seed in range(len(PACKINGS))]
    wanted = [[result.clone() for result in source()] for source in sources]
    held, larger = Step(0), raw_inputs(50, tokens=1500)
    graph, results = capture(held)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(1000):
        index = (7 * replay) % len(sources)
        with torch.no_grad():
            torch._foreach_copy_(held.tensors, sources[index].tensors)
        if replay % 50 == 0:
            chunk_kda(larger, None, None)[0].isfinite()
        graph.replay()
        for result, right in zip(results, wanted[index], strict=True):
            different += (result != right).sum()
    assert different.item() == 0


@pytest.mark.parametrize("packed", [False, True], ids=["fixed", "packed"])
def test_reduce_overhead_skips_no_graph(packed: bool, compiled_graphs: None) -> None:
    """Every step's gradients follow its inputs and offsets. Inductor rounds around the ops otherwise than eager."""

    def loss_of(inputs: dict[str, Tensor], cu_seqlens: Tensor | None) -> Tensor:
        o, final_state = chunk_kda(inputs, cu_seqlens, None)
        return o.float().sin().sum() + final_state.sin().sum()

    compiled = torch.compile(loss_of, fullgraph=True, mode="reduce-overhead")
    for step in range(5):
        inputs = {name: x.requires_grad_() for name, x in raw_inputs(step).items()}
        cu_seqlens = torch.tensor(PACKINGS[step], dtype=torch.int32, device="cuda") if packed else None
        torch.compiler.cudagraph_mark_step_begin()
        ours = [x.clone() for x in torch.autograd.grad(compiled(inputs, cu_seqlens), tuple(inputs.values()))]
        wanted = torch.autograd.grad(loss_of(inputs, cu_seqlens), tuple(inputs.values()))
        for name, gradient, right in zip(inputs, ours, wanted):
            assert ops_cases.relative(gradient, right) < 1e-2, name


class Block(nn.Module):
    """Projections around chunk_kda, all its options on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = HEADS * DIM
        self.qkv, self.gate = nn.Linear(width, 3 * inner, bias=False), nn.Linear(width, inner, bias=False)
        self.beta, self.out = nn.Linear(width, HEADS, bias=False), nn.Linear(inner, width, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.zeros(inner))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        heads = (*x.shape[:2], 3, HEADS, DIM)
        q, k, v = self.qkv(x).view(heads).unbind(2)
        gate = self.gate(x).view(q.shape)
        inputs = {"q": q, "k": k, "v": v, "g": gate, "beta": self.beta(x), "A_log": self.A_log, "dt_bias": self.dt_bias}
        o, _ = chunk_kda(inputs, None, None)
        return self.out(o.flatten(2))


def test_make_graphed_callables_around_a_block() -> None:
    """Outputs, dx and every parameter's gradient are eager's, on data the capture has not seen."""
    torch.manual_seed(0)
    block = Block(192).to("cuda", BF16)
    twin = copy.deepcopy(block)
    sample = cases.normal(0, 2, 130, 192, dtype=BF16, device="cuda").requires_grad_()
    graphed = torch.cuda.make_graphed_callables(block, (sample,))
    for step in range(1, 5):
        results = []
        for module in (graphed, twin):
            x = cases.normal(step, 2, 130, 192, dtype=BF16, device="cuda").requires_grad_()
            y = module(x)
            gradients = torch.autograd.grad(y.float().sin().sum(), (x, *module.parameters()))
            results.append([y.detach().clone(), *(gradient.clone() for gradient in gradients)])
        names = ["y", "x", *(name for name, _ in twin.named_parameters())]
        for name, ours, wanted in zip(names, *results, strict=True):
            assert torch.equal(ours, wanted), name
