"""Streams, memory that is freed at once, devices other than the current one, and no host synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.gpu import ops_cases
from tests.ops import cases

OPS = torch.ops.culax


@pytest.fixture(scope="module")
def calls() -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    return ops_cases.calls()


NAMES = list(ops_cases.calls()) if torch.cuda.is_available() else ["every_op"]


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
def test_no_host_synchronisation(name: str, calls: dict, no_synchronisation: None) -> None:
    calls[name]()


def test_backward_does_not_synchronise(no_synchronisation: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    case = ops_cases.kernel_kda(lengths=(3, 190)).requiring()
    layer_input, weight = (
        cases.normal(s, *shape, device="cuda").requires_grad_() for s, shape in ((1, (6, 4)), (2, (2, 4, 3)))
    )
    offs = torch.tensor([2, 5], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    ops_cases.kda_loss(case).backward()
    OPS.grouped_mm(layer_input, weight, offs).sum().backward()


@pytest.mark.parametrize(
    "name", ["kda_bwd_kernel", "kda_fwd_torch_packed", "grouped_wgrad_kernel", "grouped_mm_kernel"]
)
def test_side_stream(name: str, calls: dict) -> None:
    """The work is on the current stream: behind a long kernel of that stream, before the next one."""
    wanted = calls[name]()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        outputs = calls[name]()
        copies = [output.clone() for output in outputs]
    stream.synchronize()
    assert all(map(torch.equal, copies, wanted))


@pytest.mark.parametrize("path", ["kernel", "torch"])
def test_inputs_freed_straight_after_the_call(path: str) -> None:
    """The allocator hands an input's memory to the next tensor while the kernels are still queued."""
    make = ops_cases.kernel_kda if path == "kernel" else ops_cases.torch_kda
    keep = make()
    wanted = keep.backward(keep.v, keep.initial_state)
    for _ in range(3):
        torch.cuda._sleep(5_000_000)
        case = make()
        outputs = case.backward(case.v, case.initial_state)
        shapes = [tensor.shape for tensor in case.differentiable]
        del case
        garbage = [torch.full(shape, float("nan"), device="cuda", dtype=keep.q.dtype) for shape in shapes]
        torch.cuda.synchronize()
        assert all(map(torch.equal, outputs, wanted))
        del garbage


def test_other_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    case = ops_cases.kernel_kda(lengths=(3, 190))
    wanted = case.backward(case.v, case.initial_state)
    moved = cases.Kda(*(a.to("cuda:1") if isinstance(a, Tensor) else a for a in case.arguments))
    mat_a, mat_b, offs = ops_cases.kernel_wgrad()
    product = OPS.grouped_wgrad(mat_a, mat_b, offs)
    with torch.cuda.device(0):
        outputs = moved.backward(moved.v, moved.initial_state)
        assert all(output.device.index == 1 for output in outputs)
        assert all(torch.equal(output.cpu(), true.cpu()) for output, true in zip(outputs, wanted))
        other = OPS.grouped_wgrad(mat_a.to("cuda:1"), mat_b.to("cuda:1"), offs.to("cuda:1"))
        assert torch.equal(other.cpu(), product.cpu())
        with pytest.raises(ValueError, match=r"argument `k`: expected device cuda:1"):
            OPS.kda_fwd(moved.q, case.k, *moved.arguments[2:], True)
