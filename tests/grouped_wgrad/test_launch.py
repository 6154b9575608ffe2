"""What reaches the kernel: aligned operands, dense outputs, addresses, workspaces. A stand-in plays the kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from culax.grouped_wgrad import checks, launch, plan, scaled
from culax.reference.block_scaled import Scales
from tests.grouped_wgrad.standin import ENDS, M, N, Recorder, T, expected, operands, shifted


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors stand for a GPU's: their device index is None, and so is the current device's."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(launch, "multiprocessors", lambda index: 132)


def planned(op: str, arguments: tuple) -> plan.Plan:
    chosen = plan.plan(checks.build_wgrad(op, arguments), "sm_90a")
    assert isinstance(chosen, plan.Plan), chosen
    return chosen


def padded(tensor: Tensor) -> Tensor:
    return torch.nn.functional.pad(tensor, (1, 7))[:, 1 : 1 + tensor.shape[1]]


def k_major(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def run(monkeypatch: pytest.MonkeyPatch, a: Tensor, b: Tensor, offs: Tensor, out: Tensor, accumulate: bool) -> Recorder:
    rest = (None, None, None, None, "padded", "2d", accumulate)
    chosen = planned("grouped_wgrad_out", (out, a.t(), b, offs, *rest))
    recorder = Recorder(accumulate)
    monkeypatch.setattr(launch, "kernel", lambda _: recorder)
    launch.run(chosen, out, a.t(), b, offs)
    return recorder


@pytest.mark.parametrize(
    "change", [lambda x: x, shifted, padded, k_major], ids=["plain", "shifted", "padded", "k_major"]
)
def test_operands_arrive_aligned_with_their_values(device: None, monkeypatch: pytest.MonkeyPatch, change) -> None:
    a, b, offs = operands()
    out = torch.zeros(len(ENDS), M, N)
    recorder = run(monkeypatch, change(a), change(b), offs, out, False)
    mat_a, mat_b, *_ = recorder.arguments
    for tensor, rows in ((mat_a, a.t()), (mat_b, b)):
        assert tensor.data_ptr() % 16 == 0 and torch.equal(tensor, rows)
        assert sorted(tensor.stride())[0] == 1 and sorted(tensor.stride())[1] % 8 == 0
    torch.testing.assert_close(out, expected(a, b))


@pytest.mark.parametrize("pitch", [0, 1, 8, 57])
def test_one_token_has_a_pitch_that_tma_takes(device: None, monkeypatch: pytest.MonkeyPatch, pitch: int) -> None:
    """The stride of a dimension of size 1 says nothing."""
    a, b = (torch.randn(64).bfloat16().as_strided((1, x), (pitch, 1)) for x in (M, N))
    out, offs = torch.full((3, M, N), 7.0), torch.tensor([0, 1, 1], dtype=torch.int32)
    mat_a, mat_b, *_ = run(monkeypatch, a, b, offs, out, False).arguments
    assert (mat_a.stride(), mat_b.stride()) == ((1, M), (N, 1))
    wanted = torch.zeros(3, M, N)
    wanted[1] = a[0, :, None].float() * b.float()
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("ragged", [False, True], ids=["2d", "ragged"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float4_e2m1fn_x2], ids=["fp8", "fp4"])
def test_block_scaled_operands_arrive_aligned(dtype: torch.dtype, ragged: bool) -> None:
    """Rows 16 bytes apart, but an expert-major operand as one dense buffer, whose groups have places of their own."""
    codes = torch.arange(8 * 24, dtype=torch.uint8).view(8, 24)
    for given in (codes, shifted(codes)):
        found = scaled.aligned(given.view(dtype), ragged)
        assert found.dtype is dtype and found.data_ptr() % 16 == 0
        assert torch.equal(found.view(torch.uint8), codes)
        assert (found.data_ptr() == given.data_ptr()) == (given is codes)
        assert given is codes or found.stride() == ((24, 1) if ragged else (32, 1))


@pytest.mark.parametrize("layout", ["padded", "concatenated"])
def test_scales_arrive_aligned_and_never_without_bytes(layout: str) -> None:
    codes = torch.arange(128 * 4).to(torch.uint8).view(128, 4)
    e8m0, factors = torch.float8_e8m0fnu, torch.ones(8)[::2]
    given = Scales(codes[:, :0].contiguous().view(e8m0), shifted(codes).view(e8m0), factors, None, layout)
    none, some, global_a, global_b, concatenated = scaled.arguments(given)
    assert none.shape == (128, 4) and bool((none.view(torch.uint8) == 0xFF).all())
    assert some.data_ptr() % 16 == 0 and torch.equal(some.view(torch.uint8), codes)
    assert global_a is not None and global_a.is_contiguous() and global_b is None
    assert concatenated == int(layout == "concatenated")


def test_aligned_operands_are_not_copied(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, offs = operands()
    out = torch.zeros(len(ENDS), M, N)
    mat_a, mat_b, seen, target, workspace, _ = run(monkeypatch, a, b, offs, out, False).arguments
    assert (mat_a.data_ptr(), mat_b.data_ptr(), seen.data_ptr()) == (a.data_ptr(), b.data_ptr(), offs.data_ptr())
    assert target is out and workspace is None


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize(
    "make",
    [
        lambda e: torch.ones(e, M, N),
        lambda e: torch.ones(e, N, M).transpose(1, 2),
        lambda e: torch.ones(e, M, N + 8)[:, :, :N],
        lambda e: torch.ones(e * M * N + 1)[1:].view(e, M, N),
        lambda e: torch.ones(e, 2, M, N)[:, 1],
        lambda e: torch.ones(e, M * N + 2)[:, : M * N].view(e, M, N),
    ],
    ids=["dense", "transposed", "padded_rows", "shifted", "strided_experts", "unaligned_experts"],
)
def test_outputs_of_any_stride_get_the_result(device: None, monkeypatch, make, accumulate: bool) -> None:
    a, b, offs = operands()
    out = make(len(ENDS))
    target = run(monkeypatch, a, b, offs, out, accumulate).arguments[3]
    assert target.data_ptr() % 16 == 0 and target.stride()[1:] == (N, 1) and target.stride(0) % 8 == 0
    torch.testing.assert_close(out, expected(a, b) + (1.0 if accumulate else 0.0))


def test_lists_pass_addresses_in_whole_chunks_and_a_workspace(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, offs = operands()
    outs = [torch.full((M, N), 2.0) for _ in ENDS]
    outs[1] = torch.full((M, N + 8), 2.0)[:, :N]
    rest = (None, None, None, None, "padded", "2d", False)
    chosen = planned("grouped_wgrad_out_list", (outs, a.t(), b, offs, *rest))
    calls: list[tuple] = []
    monkeypatch.setattr(launch, "kernel", lambda _: lambda *arguments: calls.append(arguments))
    launch.run(chosen, outs, a.t(), b, offs)
    (_, _, _, addresses, workspace, _) = calls[0]
    assert addresses.dtype is torch.int64 and not addresses.is_cuda and addresses.numel() == launch.POINTERS
    assert addresses[0] == outs[0].data_ptr() and addresses[2] == outs[2].data_ptr()
    assert addresses[1] != outs[1].data_ptr(), "rows with a pitch go through a dense copy"
    assert addresses[3:].count_nonzero() == 0
    assert workspace.shape == (len(ENDS), 1, 16) and workspace.dtype is torch.int64
    assert outs[1].eq(2).all(), "an accumulating kernel needs the copy to hold what was there"


def test_offsets_of_64_bits_are_clamped_before_they_are_narrowed(device: None, monkeypatch) -> None:
    a, b, _ = operands()
    offs = torch.tensor([3, -(2**40), 2**40])
    chosen = planned("grouped_wgrad", (a.t(), b, offs, None, None, None, None, "padded", "2d", None))
    calls: list[tuple] = []
    monkeypatch.setattr(launch, "kernel", lambda _: lambda *arguments: calls.append(arguments))
    launch.run(chosen, torch.zeros(3, M, N, dtype=torch.bfloat16), a.t(), b, offs)
    assert calls[0][2].dtype is torch.int32 and calls[0][2].tolist() == [3, 0, T]


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
def test_no_tokens_need_no_kernel(device: None, monkeypatch: pytest.MonkeyPatch, accumulate: bool) -> None:
    out = torch.full((2, M, N), 5.0)
    a, b = torch.empty(0, M).bfloat16(), torch.empty(0, N).bfloat16()
    recorder = run(monkeypatch, a, b, torch.zeros(2, dtype=torch.int32), out, accumulate)
    assert recorder.arguments == () and out.eq(5.0 if accumulate else 0.0).all()


def test_one_token_gets_a_pitch_tma_can_take(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(1, M).bfloat16(), torch.randn(1, N).bfloat16()
    out = torch.zeros(1, M, N)
    mat_a, mat_b, *_ = run(monkeypatch, a, b, torch.ones(1, dtype=torch.int32), out, False).arguments
    assert mat_a.stride() == (1, M) and mat_b.stride() == (N, 1)
    torch.testing.assert_close(out[0], a.float().t() @ b.float())


def test_chunk_size_is_the_kernels() -> None:
    source = (launch.__file__ or "").replace("launch.py", "stages/gemm/descriptors.py")
    with open(source) as file:
        assert f"\nPOINTERS = {launch.POINTERS}\n" in file.read()
