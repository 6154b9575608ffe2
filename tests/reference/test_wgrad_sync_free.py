"""The way by chunk never needs a value on the host: proved on the meta device, which has no values to give.

Meta tensors stand for any device that isn't the CPU: reading one raises, an operator whose output shape depends on
data raises, and a tensor made on the CPU and sent over (a hidden copy, illegal in a CUDA graph capture) is caught.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from culax.reference import grouped_wgrad as reference
from culax.reference.block_scaled import Scales
from tests.reference.wgrad_cases import DTYPES, ends_of, normal, offsets

MX = [torch.float8_e4m3fn, torch.float8_e5m2]
# Operators that wait for the device on CUDA although their meta kernel has a shape.
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}


class OneDevice(TorchDispatchMode):
    """Every tensor of every operator lives on the meta device, and no operator waits for it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)}
        assert devices <= {"meta"}, f"{func} touches {devices}"
        assert func.name().split(".")[0] not in WAITING, func
        if func is torch.ops.aten.index.Tensor:
            assert all(index is None or index.dtype is torch.int64 for index in args[1]), "a mask as an index waits"
        return out


def meta(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def offs_of(experts):
    return meta(experts, dtype=torch.int32)


def scales_of(m, n, columns, dtype, experts, layout):
    rows_a, rows_b = -(-m // 128) * 128, -(-n // 128) * 128
    global_scale = meta(experts, dtype=torch.float32) if dtype is torch.float8_e4m3fn else None
    return Scales(
        meta(rows_a, columns, dtype=dtype), meta(rows_b, columns, dtype=dtype), global_scale, global_scale, layout
    )


def test_the_mode_catches_a_hidden_copy_and_a_read():
    with OneDevice():
        with pytest.raises(AssertionError, match="touches"):
            torch.tensor([1, 2], device="cpu").to("meta")
        with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
            offs_of(3)[0].item()
        with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
            reference.wgrad_by_expert(
                meta(4, 8, dtype=torch.float32),
                meta(4, 8, dtype=torch.float32),
                reference.expert_ranges(offs_of(3), 8),
                None,
            ).__next__()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["2d", "ragged"])
@pytest.mark.parametrize("tokens, experts", [(300, 5), (0, 5), (1, 64), (7, 0)])
def test_grouped_wgrad(dtype, layout, tokens, experts):
    with OneDevice():
        mat_a, mat_b = meta(24, tokens, dtype=dtype), meta(40, tokens, dtype=dtype).t()
        out = reference.grouped_wgrad(mat_a, mat_b, offs_of(experts), None, layout, None)
        assert out.shape == (experts, 24, 40) and out.dtype == dtype and out.is_contiguous()
        for outs in (out.float(), list(out.float().unbind())):
            for accumulate in (False, True):
                reference.grouped_wgrad_out(outs, mat_a, mat_b, offs_of(experts), None, layout, accumulate)


@pytest.mark.parametrize("layout", ["padded", "concatenated"])
@pytest.mark.parametrize("operand_layout", ["2d", "ragged"])
@pytest.mark.parametrize("dtype", MX, ids=str)
@pytest.mark.parametrize("tokens", [300, 0])
def test_mxfp8(dtype, operand_layout, layout, tokens):
    with OneDevice():
        mat_a, mat_b = meta(24, tokens, dtype=dtype), meta(200, tokens, dtype=MX[0]).t()
        scales = scales_of(24, 200, 32, torch.float8_e8m0fnu, 5, layout)
        out = reference.grouped_wgrad(mat_a, mat_b, offs_of(5), scales, operand_layout, None)
        assert out.shape == (5, 24, 200) and out.dtype == torch.bfloat16


@pytest.mark.parametrize("layout", ["padded", "concatenated"])
@pytest.mark.parametrize("operand_layout", ["2d", "ragged"])
def test_nvfp4(operand_layout, layout):
    with OneDevice():
        mat_a, mat_b = (meta(rows, 160, dtype=torch.float4_e2m1fn_x2) for rows in (24, 200))
        scales = scales_of(24, 200, 40, torch.float8_e4m3fn, 5, layout)
        out = reference.grouped_wgrad(mat_a, mat_b.t(), offs_of(5), scales, operand_layout, torch.float32)
        assert out.shape == (5, 24, 200) and out.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens, experts", [(300, 5), (0, 5), (1, 64), (7, 0)])
def test_grouped_mm(dtype, tokens, experts):
    with OneDevice():
        out = reference.grouped_mm(meta(tokens, 24, dtype=dtype), meta(experts, 24, 40, dtype=dtype), offs_of(experts))
        assert out.shape == (tokens, 40) and out.dtype == dtype and out.is_contiguous()


def test_memory_alive_is_bounded_by_slices(monkeypatch):
    """No operator of the way by chunk makes more than the output, an operand or a slice of partial products."""
    m, n, tokens, experts = 64, 64, 6400, 4
    monkeypatch.setattr(reference, "SLICE_BYTES", 1 << 18)
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            sizes = [t.numel() * t.element_size() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            if not any(out is arg for arg in args):
                largest = max([largest, *sizes])
            return out

    with Largest():
        mat_a, mat_b = meta(m, tokens, dtype=torch.bfloat16), meta(tokens, n, dtype=torch.bfloat16)
        reference.grouped_wgrad(mat_a, mat_b, offs_of(experts), None, "2d", torch.float32)
    assert largest <= max(m * tokens * 2, experts * m * n * 4, 1 << 18)
    all_partials = (tokens // 64 + experts) * m * n * 4
    assert largest < all_partials / 2


def test_offsets_rewritten_in_place_are_honoured(monkeypatch):
    """The same tensors, new offsets: what a replayed graph sees."""
    monkeypatch.setattr(reference, "reads_offsets", lambda offs: False)
    mat_a, mat_b, offs = normal(0, 8, 200), normal(1, 200, 16), offsets(ends_of([3, 70, 0, 50]))
    first = reference.grouped_wgrad(mat_a, mat_b, offs, None, "2d", None)
    offs.copy_(offsets(ends_of([70, 0, 3, 127])))
    second = reference.grouped_wgrad(mat_a, mat_b, offs, None, "2d", None)
    fresh = reference.grouped_wgrad(mat_a, mat_b, offs.clone(), None, "2d", None)
    assert torch.equal(second, fresh) and not torch.equal(first, second)
