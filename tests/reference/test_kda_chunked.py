"""The chunked path against the truth: sizes, packings, gates, dtypes, strides and missing arguments."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from culax.reference import kda_chunked
from culax.reference.kda_double import double_backward
from tests.reference.kda_cases import GATES, NAMES, Case, assert_right, assert_within, chunked, errors, make, truth

# Measured on the gates below: fp32 1e-6, bf16 3e-3, fp16 3e-4 (half types: the rounding of outputs and of Aqk, Akk).
BOUNDS = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 6e-3, torch.float16: 7e-4}
CASES = {
    "one token": Case(tokens=1),
    "63": Case(tokens=63),
    "64": Case(tokens=64),
    "65": Case(tokens=65),
    "3 * 64 + 15": Case(tokens=207),
    "two of 100": Case(tokens=100, batch=2),
    "no token": Case(tokens=0, batch=2),
    "no batch": Case(tokens=5, batch=0),
    "no group": Case(tokens=70, heads=2, value_heads=2),
    "groups of three, K > V": Case(tokens=70, heads=2, value_heads=6, key_dim=12, value_dim=3),
    "K < V": Case(tokens=70, key_dim=3, value_dim=12),
    "K = V = 1": Case(tokens=70, key_dim=1, value_dim=1),
    "packed, lengths 0 1 63 64 65": Case(tokens=193, ends=(0, 0, 1, 64, 128, 193)),
    "packed, empty ends": Case(tokens=80, ends=(0, 0, 0, 80, 80)),
    "packed, rows outside": Case(tokens=160, ends=(3, 40, 40, 150)),
    "packed, whole chunks": Case(tokens=192, ends=(0, 64, 192)),
    "packed, all empty": Case(tokens=9, ends=(4, 4, 4)),
    "packed, no token": Case(tokens=0, ends=(0, 0, 0)),
    "packed, no sequence": Case(tokens=9, ends=(0,)),
}


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("name", CASES)
def test_sizes(name, recompute):
    assert_right(make(CASES[name]), BOUNDS[torch.float64], recompute=recompute)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_gates(gate, dtype):
    x = make(Case(tokens=90, value_heads=2, key_dim=16, value_dim=16), gate, dtype)
    assert_right(x, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_one_repeated_key(dtype):
    """beta = 1 and near-equal keys: the powers of L reach 1e17, its inverse stays tame."""
    x = make(Case(tokens=128, key_dim=16, value_dim=16), "-0.02", dtype)
    x = replace(x, k=x.k[:, :1].expand_as(x.k), beta=torch.ones_like(x.beta))
    assert_right(x, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("ends", [None, (0, 5, 70)], ids=["dense", "packed"])
def test_dtypes(ends, dtype):
    x = make(Case(tokens=70, ends=ends), dtype=dtype)
    x = replace(x, g=x.g.to(dtype))
    o, final_state, Aqk, Akk = kda_chunked.forward(*x.forward, True)
    grads = kda_chunked.backward(x.do, x.dht, *x.forward[:5], Aqk, Akk, *x.forward[5:])
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert [y.dtype for y in (o, final_state, Aqk, Akk)] == [dtype, state_dtype, dtype, dtype]
    assert [y.dtype for y in grads] == [dtype, dtype, dtype, dtype, x.beta.dtype, state_dtype]
    assert Aqk.shape == Akk.shape == (*x.v.shape[:3], 64)
    assert all(y.is_contiguous() for y in (o, final_state, Aqk, Akk, *grads))


def test_saved_blocks():
    """Aqk and Akk are lower triangular rows within their own chunk, Akk with a unit diagonal; zero elsewhere."""
    x = make(Case(tokens=150, ends=(3, 40, 140)))
    *_, Aqk, Akk = kda_chunked.forward(*x.forward, False)
    row = torch.full((150,), -1)
    for start, end in ((3, 40), (40, 140)):
        row[start:end] = torch.arange(end - start) % 64
    column = torch.arange(64)
    for saved in (Aqk, Akk):
        assert not saved[0].transpose(1, 2)[column > row[:, None]].any()
        assert not saved[0, row < 0].any()
    inside = torch.arange(3, 140)
    assert (Akk[0, inside, :, row[inside]] == 1).all()
    diagonal = x.scale * (x.q * x.k).sum(-1)[0].expand(-1, 2)
    torch.testing.assert_close(Aqk[0, inside, :, row[inside]], diagonal[inside], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("missing", [("do",), ("dht",), ("do", "dht"), ("initial_state",), ("dht", "initial_state")])
@pytest.mark.parametrize("ends", [None, (0, 70, 71, 100)], ids=["dense", "packed"])
def test_missing_arguments(ends, missing):
    x = replace(make(Case(tokens=100, ends=ends), "soft"), **dict.fromkeys(missing))
    assert_right(x, BOUNDS[torch.float64])
    _, final_state, *_ = kda_chunked.forward(*x.forward, False)
    assert final_state.shape == (0, 2, 8, 6) and final_state.dtype == torch.float64


def test_results_are_not_inputs():
    """Also where there is no token, an op must not return its input's memory."""
    x = make(Case(tokens=0))
    _, final_state, *_ = kda_chunked.forward(*x.forward, True)
    *_, dinitial_state = kda_chunked.backward(x.do, x.dht, *x.forward[:5], None, None, *x.forward[5:])
    assert final_state.data_ptr() != x.initial_state.data_ptr() and dinitial_state.data_ptr() != x.dht.data_ptr()


STRIDES = {
    "sliced": lambda y: torch.cat([y, y.new_full((*y.shape[:-1], 3), float("nan"))], -1)[..., : y.shape[-1]],
    "transposed": lambda y: y.transpose(1, 2).contiguous().transpose(1, 2),
    "tokens first": lambda y: y.movedim(1, 0).contiguous().movedim(0, 1),
    "every second": lambda y: torch.stack([y, torch.full_like(y, float("nan"))], -1).flatten(-2)[..., ::2],
    "expanded": lambda y: y[:, :1].expand_as(y),
}


@pytest.mark.parametrize("ends", [None, (0, 3, 60)], ids=["dense", "packed"])
@pytest.mark.parametrize("name", STRIDES)
def test_strides(name, ends):
    x = make(Case(tokens=70, ends=ends)).map(STRIDES[name])
    strided, plain = chunked(x), chunked(x.map(torch.Tensor.contiguous))
    for y in NAMES:
        assert torch.equal(strided[y], plain[y]), y


def test_offsets_out_of_order():
    """Descending offsets, and offsets beyond T, are clamped to [previous, T]."""
    x = make(Case(tokens=90, ends=(0, 50, 20, 120)))
    clamped = replace(x, cu_seqlens=torch.tensor([0, 50, 50, 90], dtype=torch.int32))
    got, want = chunked(x), chunked(clamped)
    assert all(torch.equal(got[y], want[y]) for y in NAMES)


def test_bitwise_repeat():
    x = make(Case(tokens=150, ends=(0, 1, 100, 150)), dtype=torch.bfloat16)
    first = chunked(x)
    for _ in range(5):
        again = chunked(x)
        assert all(torch.equal(first[y], again[y]) for y in NAMES)


@pytest.mark.parametrize("ends", [None, (0, 0, 5, 70)], ids=["dense", "packed"])
def test_uninitialised_memory_is_never_read(poisoned_memory, ends):
    x = make(Case(tokens=75, ends=ends))
    assert_right(x, BOUNDS[torch.float64])


class NoSync(TorchDispatchMode):
    """Fails on every operator that would read values back from the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim"}, (
            name
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ends", [None, (2, 2, 5, 70)], ids=["dense", "packed"])
def test_nothing_is_read_back(ends):
    x = make(Case(tokens=75, ends=ends))
    with NoSync():
        grads = chunked(x)
        double_backward(*(grads[y] for y in NAMES[2:]), x.do, x.dht, *x.forward)
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            x.q[0, 0, 0, 0].item()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_call(data):
    """Drawn shapes, lengths, strides and gates, in fp64 against the truth.

    The bound leaves room for gradients that have only travelled through decayed states (do or dht missing).
    """
    draw = data.draw
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 15, 17, 63, 64, 65, 79]), min_size=1, max_size=3))
    group, heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    sizes = {"heads": heads, "value_heads": heads * group, "key_dim": draw(st.integers(1, 9))}
    sizes["value_dim"] = draw(st.integers(1, 9))
    if draw(st.booleans()):
        ends = [draw(st.integers(0, 3))]
        for length in lengths:
            ends.append(ends[-1] + length)
        case = Case(tokens=ends[-1] + draw(st.integers(0, 3)), ends=tuple(ends), **sizes)
    else:
        case = Case(tokens=lengths[0], batch=draw(st.integers(1, 2)), **sizes)
    x = make(case, draw(st.sampled_from(sorted(GATES))), seed=draw(st.integers(0, 99)))
    x = x.map(STRIDES[draw(st.sampled_from(sorted(STRIDES)[1:]))] if case.tokens else torch.clone)
    x = replace(x, **dict.fromkeys(draw(st.sets(st.sampled_from(["do", "dht", "initial_state"])))))
    assert_within(errors(chunked(x, recompute=draw(st.booleans())), truth(x)), 1e-10)
