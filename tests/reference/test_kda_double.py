"""double_backward against autograd of autograd of the token recurrence, in fp64."""

from dataclasses import replace

import pytest
import torch

from culax.reference.kda_chunked import backward
from culax.reference.kda_double import double_backward
from culax.reference.kda_recurrence import kda_recurrence
from tests.reference.kda_cases import Case, groups, make

NAMES = ("do", "dht", "q", "k", "v", "g", "beta", "initial_state")
OUTPUTS = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")


def second_derivative(x, given):
    """d <given, gradients of the recurrence> / d inputs, by autograd twice. None in ``given``: an unused output."""
    leaves = {n: getattr(x, n).clone().requires_grad_() for n in NAMES if getattr(x, n) is not None}
    inputs = [leaves.get(n) for n in NAMES[2:]]
    o, final_state = kda_recurrence(*inputs, x.cu_seqlens, x.scale)
    heads = [(y, leaves[n]) for y, n in ((o, "do"), (final_state, "dht")) if n in leaves]
    ys, dys = zip(*heads)
    present = [y for y in inputs if y is not None]
    first = torch.autograd.grad(ys, present, dys, create_graph=True, materialize_grads=True, allow_unused=True)
    used = [(y, gy) for y, gy in zip(first, given) if gy is not None and y.requires_grad]
    ys, gys = zip(*used)
    second = torch.autograd.grad(ys, list(leaves.values()), gys, materialize_grads=True, allow_unused=True)
    return dict(zip(leaves, second))


def check(x, unused=(), constant=False):
    shapes = dict(zip(OUTPUTS, (x.q, x.k, x.v, x.g, x.beta, x.initial_state)))
    given = [
        None if name in unused or y is None else torch.ones_like(y) if constant else torch.randn_like(y)
        for name, y in shapes.items()
    ]
    got = dict(zip(NAMES, double_backward(*given, x.do, x.dht, *x.forward), strict=True))
    want = second_derivative(x, given)
    for name in NAMES:
        if name not in want:
            assert got[name] is None, name
            continue
        assert got[name].shape == want[name].shape and got[name].dtype == want[name].dtype
        state = "final_state" if name in ("dht", "initial_state") else name
        difference, norm = groups(state, got[name] - want[name]).norm(dim=1), groups(state, want[name]).norm(dim=1)
        assert (difference <= 1e-12 * norm.clamp(min=float(norm.max()) * 1e-4)).all(), name


CASES = {
    "dense": Case(tokens=70, batch=2, key_dim=5, value_dim=4),
    "packed": Case(tokens=140, ends=(1, 1, 2, 66, 130), key_dim=4, value_dim=3),
    "groups": Case(tokens=30, heads=2, value_heads=4, key_dim=3, value_dim=5),
}


@pytest.mark.parametrize("constant", [False, True], ids=["random", "constant"])
@pytest.mark.parametrize("name", CASES)
def test_against_autograd_twice(name, constant):
    check(make(CASES[name]), constant=constant)


@pytest.mark.parametrize("gate", ["zero", "-5", "mixed"])
def test_gates(gate):
    check(make(Case(tokens=70), gate))


@pytest.mark.parametrize("missing", [("do",), ("dht",), ("initial_state",), ("dht", "initial_state")])
def test_missing_arguments(missing):
    check(replace(make(Case(tokens=40), "soft"), **dict.fromkeys(missing)))


@pytest.mark.parametrize("kept", OUTPUTS)
def test_one_output_used(kept):
    check(make(Case(tokens=40)), unused=set(OUTPUTS) - {kept})


def test_q_is_k():
    """The two get separate gradients even when they are one tensor."""
    x = make(Case(tokens=20))
    check(replace(x, q=x.k))
    check(replace(x, q=x.k[:, :1].expand_as(x.k), k=x.k[:, :1].expand_as(x.k)))


@pytest.mark.parametrize("case", [Case(tokens=0), Case(tokens=0, ends=(0, 0)), Case(tokens=5, ends=(0,))], ids=str)
def test_nothing_to_do(case):
    x = make(case)
    given = backward(x.do, x.dht, *x.forward[:5], None, None, *x.forward[5:])
    for name, got in zip(NAMES, double_backward(*given, x.do, x.dht, *x.forward)):
        want = given[5] if name == "dht" else torch.zeros_like(getattr(x, name))
        assert torch.equal(got, want), name
    assert not any(y.any() for y in double_backward(*[None] * 6, x.do, x.dht, *x.forward))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    x = make(Case(tokens=20), dtype=dtype)
    given = backward(x.do, x.dht, *x.forward[:5], None, None, *x.forward[5:])
    got = double_backward(*given, x.do, x.dht, *x.forward)
    assert [y.dtype for y in got] == [getattr(x, n).dtype for n in NAMES]
    assert all(y.isfinite().all() and not y.requires_grad for y in got)
