"""The public grouped weight-gradient ops on a GPU with kernels: strides, dtypes, graphs, no synchronisation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import culax
from tests.gpu.graphs import capture
from tests.gpu.wgrad_problems import DEVICE, Sizes, assert_each_expert_close, offsets, truth

SIZES = Sizes(264, 392, (100, 0, 37, 1, 250), tail=40)
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def rows(sizes: Sizes = SIZES, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token-major random operands, NaN past the last offset."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    pair = [torch.randn(sizes.tokens, x, device=DEVICE, generator=generator).to(dtype) for x in (sizes.m, sizes.n)]
    for tensor in pair:
        tensor[sum(sizes.experts) :] = float("nan")
    return pair[0], pair[1]


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_kernel_serves_the_op() -> None:
    a, b = rows()
    assert culax.explain("grouped_wgrad", a.t(), b, offsets(SIZES.experts)).backend == "cutedsl"


@pytest.mark.parametrize("out_dtype", NAMES, ids=NAMES.values())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_functional_op_against_float64(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    a, b = rows(dtype=dtype)
    offs = offsets(SIZES.experts)
    torch.ops.culax.grouped_wgrad(a.t(), b, offs, out_dtype=out_dtype)
    with no_synchronisation():
        result = torch.ops.culax.grouped_wgrad(a.t(), b, offs, out_dtype=out_dtype)
    assert result.dtype is out_dtype and result.is_contiguous()
    assert_each_expert_close(result, truth(a, b, SIZES.experts), NAMES[out_dtype])


def padded(tensor: Tensor) -> Tensor:
    """The same values with rows 8 elements longer than needed."""
    return torch.nn.functional.pad(tensor, (0, 8))[:, : tensor.shape[1]]


def shifted(tensor: Tensor) -> Tensor:
    """The same values at an address that is no multiple of 16 bytes."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=DEVICE)
    flat[1:] = tensor.reshape(-1)
    return flat[1:].view(tensor.shape)


def shifted_and_padded(tensor: Tensor) -> Tensor:
    """Rows 8 elements longer than needed, the first element left out."""
    return torch.nn.functional.pad(tensor, (1, 7))[:, 1 : 1 + tensor.shape[1]]


def k_major(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


@pytest.mark.parametrize("change", [padded, shifted, shifted_and_padded, k_major], ids=lambda change: change.__name__)
@pytest.mark.parametrize("which", ["mat_a", "mat_b", "both"])
def test_operands_in_other_places_and_strides(which: str, change) -> None:
    a, b = rows()
    mat_a = change(a).t() if which != "mat_b" else a.t()
    mat_b = change(b) if which != "mat_a" else b
    result = torch.ops.culax.grouped_wgrad(mat_a, mat_b, offsets(SIZES.experts))
    assert_each_expert_close(result, truth(a, b, SIZES.experts), "bfloat16")


@pytest.mark.parametrize("tokens", [0, 1, 8], ids=["t0", "t1", "t8"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
def test_few_tokens(tokens: int, accumulate: bool) -> None:
    a = torch.randn(tokens, 64, device=DEVICE).bfloat16()
    b = torch.randn(tokens, 72, device=DEVICE).bfloat16()
    out = torch.full((2, 64, 72), 2.0, device=DEVICE)
    torch.ops.culax.grouped_wgrad_out(out, a.t(), b, offsets((0, tokens)), accumulate=accumulate)
    expected = truth(a, b, (0, tokens)) + (2.0 if accumulate else 0.0)
    assert_each_expert_close(out, expected, "float32")


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("kind", ["dense", "list", "transposed", "shifted_list", "padded_list", "strided_experts"])
def test_outputs_in_other_places_and_strides(kind: str, accumulate: bool) -> None:
    a, b = rows()
    experts, shape = len(SIZES.experts), (SIZES.m, SIZES.n)
    make = {
        "dense": lambda: torch.empty(experts, *shape, device=DEVICE),
        "list": lambda: [torch.empty(shape, device=DEVICE) for _ in range(experts)],
        "transposed": lambda: torch.empty(experts, *shape[::-1], device=DEVICE).transpose(1, 2),
        "shifted_list": lambda: [
            torch.empty(shape[0] * shape[1] + 1, device=DEVICE)[1:].view(shape) for _ in range(experts)
        ],
        "padded_list": lambda: [torch.empty(shape[0], shape[1] + 8, device=DEVICE)[:, :-8] for _ in range(experts)],
        "strided_experts": lambda: torch.empty(experts, 2, *shape, device=DEVICE)[:, 1],
    }
    out = make[kind]()
    for part in out:
        part.fill_(1.0)
    op = torch.ops.culax.grouped_wgrad_out_list if isinstance(out, list) else torch.ops.culax.grouped_wgrad_out
    op(out, a.t(), b, offsets(SIZES.experts), accumulate=accumulate)
    result = torch.stack(list(out))
    assert_each_expert_close(result, truth(a, b, SIZES.experts) + (1.0 if accumulate else 0.0), "float32")


def test_offsets_of_64_bits_far_past_t_are_clamped() -> None:
    a, b = rows(Sizes(64, 64, (10, 20)))
    offs = torch.tensor([10, 2**40], device=DEVICE)
    a[30:], b[30:] = 0, 0
    result = torch.ops.culax.grouped_wgrad(a.t(), b, offs)
    assert_each_expert_close(result, truth(a, b, (10, 22)), "bfloat16")


@pytest.mark.parametrize("kind", ["dense", "list_add"])
def test_a_thousand_replays_follow_offsets_rewritten_in_place(kind: str) -> None:
    a, b = rows()
    offs = offsets(SIZES.experts)
    out = [torch.zeros(SIZES.m, SIZES.n, device=DEVICE) for _ in SIZES.experts]
    dense = torch.zeros(len(SIZES.experts), SIZES.m, SIZES.n, device=DEVICE)

    def call() -> None:
        if kind == "dense":
            torch.ops.culax.grouped_wgrad_out(dense, a.t(), b, offs)
        else:
            torch.ops.culax.grouped_wgrad_out_list(out, a.t(), b, offs, accumulate=True)

    graph, _ = capture(call)
    splits = [SIZES.experts, (0, 0, 388, 0, 0), (388, 0, 0, 0, 0), (1, 2, 3, 4, 5), (97, 97, 97, 97, 0)]
    expected = {split: truth(a, b, split) for split in splits}
    for replay in range(1000):
        split = splits[replay % len(splits)]
        offs.copy_(offsets(split))
        for part in out:
            part.zero_()
        dense.fill_(float("nan"))
        graph.replay()
        if replay < 20 or replay > 980:
            result = dense if kind == "dense" else torch.stack(out)
            assert_each_expert_close(result, expected[split], "float32")


def test_reduce_overhead_skips_no_graph() -> None:
    from torch._dynamo.utils import counters

    a, b = rows()
    offs = offsets(SIZES.experts)
    counters.clear()
    compiled = torch.compile(torch.ops.culax.grouped_wgrad, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        result = compiled(a.t(), b, offs)
    assert_each_expert_close(result.clone(), truth(a, b, SIZES.experts), "bfloat16")
    assert counters["inductor"]["cudagraph_skips"] == 0
