"""The token recurrence: against the textbook matrix form, and its own derivatives."""

import pytest
import torch

from culax.reference.kda_recurrence import kda_recurrence
from tests.reference.kda_cases import Case, make, truth


def test_matrix_form():
    """S_t = (I - beta k k^T) diag(exp g) S_{t-1} + beta k v^T, a head at a time; value head h reads key head h // 2."""
    x = make(Case(tokens=9, batch=2, heads=2, value_heads=4, key_dim=5, value_dim=3))
    o, final_state = kda_recurrence(*x.forward)
    for b in range(2):
        for h in range(4):
            q, k, v, g, beta = x.q[b, :, h // 2], x.k[b, :, h // 2], x.v[b, :, h], x.g[b, :, h], x.beta[b, :, h]
            S = x.initial_state[b, h]
            for t in range(9):
                move = torch.eye(5, dtype=torch.float64) - beta[t] * torch.outer(k[t], k[t])
                S = move @ torch.diag(g[t].exp()) @ S + beta[t] * torch.outer(k[t], v[t])
                torch.testing.assert_close(o[b, t, h], x.scale * S.T @ q[t], rtol=1e-13, atol=1e-14)
            torch.testing.assert_close(final_state[b, h], S, rtol=1e-13, atol=1e-14)


def test_gradcheck():
    x = make(Case(tokens=5, ends=(0, 0, 3, 4), heads=1, value_heads=2, key_dim=3, value_dim=2))
    leaves = [y.requires_grad_() for y in x.forward[:6]]
    assert torch.autograd.gradcheck(lambda *y: kda_recurrence(*y, x.cu_seqlens, x.scale), leaves)


def test_packed_sequences_are_separate_calls():
    ends = (2, 2, 5, 9)
    x = make(Case(tokens=11, ends=ends))
    o, final_state = kda_recurrence(*x.forward)
    for n, (start, end) in enumerate(zip(ends[:-1], ends[1:])):
        alone = [y[:, start:end] for y in x.forward[:5]]
        o_n, state_n = kda_recurrence(*alone, x.initial_state[n : n + 1], None, x.scale)
        assert torch.equal(o[:, start:end], o_n) and torch.equal(final_state[n : n + 1], state_n)
    assert not o[:, :2].any() and not o[:, 9:].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [Case(tokens=0), Case(tokens=0, ends=(0, 0)), Case(tokens=3)], ids=str)
def test_dtypes(case, dtype):
    x = make(case, dtype=dtype)
    o, final_state = kda_recurrence(*x.forward)
    assert o.dtype == dtype and o.shape == x.v.shape
    assert final_state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    if case.tokens == 0:
        assert torch.equal(final_state, x.initial_state)


def test_truth_differentiates_the_recurrence():
    x = make(Case(tokens=4))
    leaves = [y.clone().requires_grad_() for y in x.forward[:6]]
    o, final_state = kda_recurrence(*leaves, None, x.scale)
    ((o * x.do).sum() + (final_state * x.dht).sum()).backward()
    want = truth(x)
    for name, leaf in zip(("dq", "dk", "dv", "dg", "dbeta", "dinitial_state"), leaves):
        torch.testing.assert_close(leaf.grad, want[name], rtol=1e-14, atol=1e-15)
