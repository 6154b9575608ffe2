"""The stages of the chunked path against the equations written out; causality, isolation, planted faults."""

from dataclasses import fields, replace

import pytest
import torch

from culax.reference import kda_chunked, kda_layout
from culax.reference.kda_double import double_backward
from tests.reference.kda_cases import NAMES, Case, assert_right, chunked, make

NAN = float("nan")


def stages(x):
    """The dataclasses of every stage, for dense inputs with one key head a value head."""
    c, table = kda_chunked.chunk_inputs(*x.forward[:5], x.cu_seqlens)
    do = table.gather(x.do, c.v.shape[1], c.v.dtype)
    p = kda_chunked.prep(c, x.scale)
    s = kda_chunked.scan(p, x.initial_state, table)
    r = kda_chunked.reverse_scan(p, do, x.dht, table, x.scale)
    d = kda_chunked.local(c, p, s, r, do, x.scale)
    return c, do, p, s, kda_chunked.output(p, s, x.scale), r, d, kda_chunked.intra(c, d.E, d.dL)


def equations(c, do, h0, dht, scale):
    """Every intermediate of one chunk of one head, [C, ...], with all pairs i, j and their decay written out."""
    q, k, v, g, beta = (getattr(c, f.name)[0, 0] for f in fields(c))
    do, n = do[0, 0], len(c.q[0, 0])
    G = g.cumsum(0) * kda_chunked.LOG2E
    last = G[-1]
    at_or_after = torch.ones(n, n, dtype=torch.bool).tril()
    D = torch.where(at_or_after[:, :, None], (G[:, None] - G[None, :]).clamp(max=0).exp2(), 0.0)
    w = {"G": G, "exp_G": G.exp2(), "exp_rest": (last - G).exp2(), "exp_last": last.exp2()[:, None]}
    w["Aqk"] = scale * torch.einsum("id,jd,ijd->ij", q, k, D)
    L = (beta * torch.einsum("id,jd,ijd->ij", k, k, D)).tril(-1)
    w["P"] = P = torch.linalg.inv(torch.eye(n, dtype=q.dtype) + L)
    w["W"], w["U"] = P @ (beta * k * G.exp2()), P @ (beta * v)
    w["qg"], w["kg"] = q * G.exp2(), k * (last - G).exp2()
    w["h"], w["v_new"] = h0, w["U"] - w["W"] @ h0
    w["final_state"] = w["exp_last"] * h0 + w["kg"].T @ w["v_new"]
    w["o"] = scale * w["qg"] @ h0 + w["Aqk"] @ w["v_new"]

    w["E"] = E = scale * (do @ w["v_new"].T).tril()
    w["dv_loc"], w["dh"] = w["Aqk"].T @ do, dht
    w["dvn"] = dvn = w["dv_loc"] + w["kg"] @ dht
    w["dh0"] = w["exp_last"] * dht + scale * w["qg"].T @ do - w["W"].T @ dvn
    dq = scale * (do @ h0.T) * G.exp2()
    w["dks"] = dks = (w["v_new"] @ dht.T) * (last - G).exp2()
    w["dW"] = dW = -dvn @ h0.T
    w["dX"], w["dY"] = dX, dY = P.T @ dW, P.T @ dvn
    w["dv"] = beta * dY
    w["M"] = M = ((dvn @ v.T + dW @ (k * G.exp2()).T) * beta.T).tril(-1)
    w["dL"] = dL = -(P.T @ M @ P.T).tril(-1)
    E_off = E.tril(-1)
    w["dqi"], w["a"] = torch.einsum("ij,jd,ijd->id", E_off, k, D), torch.einsum("ij,jd,ijd->id", dL, k, D)
    w["t"] = torch.einsum("ij,id,ijd->jd", E_off, q, D) + torch.einsum("ij,id,ijd->jd", dL, beta * k, D)
    w["dbeta"] = ((dY * v).sum(1) + (dX * k * G.exp2()).sum(1) + (w["a"] * k).sum(1))[:, None]
    w["dk"] = dks + beta * (dX * G.exp2() + w["a"]) + w["t"] + E.diag()[:, None] * q
    w["dq"] = dq + w["dqi"] + E.diag()[:, None] * k
    dG = q * dq - k * dks + beta * dX * k * G.exp2() + q * w["dqi"] + beta * k * w["a"] - k * w["t"]
    dG[-1] += last.exp2() * (h0 * dht).sum(1) + (k * dks).sum(0)
    w["dg"] = dG.flip(0).cumsum(0).flip(0)
    return w


def test_every_stage_follows_the_equations():
    x = make(Case(tokens=64, value_heads=1, key_dim=5, value_dim=4))
    c, do, *results = stages(x)
    want = equations(c, do, x.initial_state[0, 0], x.dht[0, 0], x.scale)
    torch.testing.assert_close(c.G[0, 0], want["G"])
    seen = {"G"}
    for result in results:
        for f in fields(result):
            seen.add(f.name)
            got = getattr(result, f.name)[0, 0]
            message = f"{type(result).__name__}.{f.name}"
            assert (got - want[f.name]).norm() <= 1e-12 * want[f.name].norm(), message
    assert seen == set(want)


def test_same_row_pairs_add_nothing_to_dg():
    """A diagonal dAqk is the i = j terms alone: no decay lies between them, so their part of dg is exactly zero."""
    c, _, p, s, _, r, d, _ = stages(make(Case(tokens=64, value_heads=1)))
    diagonal = torch.diag_embed(torch.randn(1, 1, 64, dtype=torch.float64))
    only = kda_chunked.intra(c, diagonal, torch.zeros_like(d.dL))
    assert not only.dqi.any() and not only.a.any() and not only.t.any()


@pytest.mark.parametrize("gate", ["zero", "soft", "-5"])
def test_one_token_without_state_has_no_gate_gradient(gate):
    x = replace(make(Case(tokens=1, key_dim=64), gate, torch.float32), initial_state=None)
    got = chunked(x)
    assert torch.equal(got["dg"], torch.zeros_like(x.g))
    assert got["dq"].any() and got["dk"].any()


def check_causality(tokens, t, dtype):
    """A loss on o[:t] has the same gradients for rows < t, to the bit, whatever the gates from t on."""
    x = make(Case(tokens=tokens, key_dim=16, value_dim=16), "soft", dtype)
    do = torch.where(torch.arange(tokens)[:, None, None] < t, x.do, 0)
    x = replace(x, do=do, dht=None)
    want = chunked(x)
    for gate in (0.0, -0.7, -30.0):
        g = torch.where(torch.arange(tokens)[:, None, None] < t, x.g, gate)
        got = chunked(replace(x, g=g))
        assert torch.equal(got["dinitial_state"], want["dinitial_state"])
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            assert torch.equal(got[name][:, :t], want[name][:, :t]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tokens, t", [(22, 21), (64, 33), (64, 47), (130, 70)])
def test_prefix_gradients_ignore_later_gates(tokens, t, dtype):
    check_causality(tokens, t, dtype)


def test_an_anchor_in_a_later_row_is_caught(monkeypatch):
    """Anchoring at the block's last row gives the same decays but for rounding: only the bitwise test can tell."""
    to = kda_chunked.decay_to

    def from_the_last_row(g):
        total = g.sum(-2, keepdim=True)
        return to(g) if g.shape[-2] == 64 else (total - (total - g.cumsum(-2))).exp()

    monkeypatch.setattr(kda_chunked, "decay_to", from_the_last_row)
    assert_right(make(Case(tokens=22, key_dim=16, value_dim=16), "soft"), 1e-12)
    with pytest.raises(AssertionError):
        check_causality(22, 21, torch.float32)


ENDS = (2, 12, 82, 82, 100)
ROWS = {"first": slice(2, 12), "middle": slice(12, 82), "last": slice(82, 100)}


@pytest.mark.parametrize("argument", ["q", "k", "v", "g", "beta", "do", "initial_state", "dht"])
@pytest.mark.parametrize("poisoned", ROWS)
def test_nan_stays_in_its_sequence(poisoned, argument):
    """NaN in one sequence, and in rows outside all, leaves every other result and gradient as it was, to the bit."""
    x = make(Case(tokens=110, ends=ENDS))
    tensor = getattr(x, argument).clone()
    if argument in ("initial_state", "dht"):
        tensor[list(ROWS).index(poisoned) + (poisoned == "last")] = NAN
    else:
        for rows in (ROWS[poisoned], slice(0, 2), slice(100, 110)):
            tensor[:, rows] = NAN
    bad = replace(x, **{argument: tensor})
    want, got = chunked(x), chunked(bad)
    second = [want[name] for name in NAMES[2:]]
    want_second = double_backward(*second, x.do, x.dht, *x.forward)
    got_second = double_backward(*second, bad.do, bad.dht, *bad.forward)

    clean = torch.ones(110, dtype=torch.bool)
    clean[ROWS[poisoned]] = False
    states = torch.ones(4, dtype=torch.bool)
    states[list(ROWS).index(poisoned) + (poisoned == "last")] = False
    pairs = [(got[name], want[name], name) for name in NAMES]
    pairs += zip(got_second, want_second, ("gdo", "gdht", "gq", "gk", "gv", "gg", "gbeta", "ginitial_state"))
    assert any(a.isnan().any() for a, _, _ in pairs)
    for a, b, name in pairs:
        kept = (states,) if a.shape[0] == 4 else (slice(None), clean)
        assert torch.equal(a[kept], b[kept]), name


FAULTS = {
    "decay to a row without its own gate": ("decay_to", lambda real: lambda g: real(g) / g.exp()),
    "decay from a row with its own gate": ("decay_from", lambda real: lambda g: real(g) * g.exp()),
    "one level of pairs missing": ("levels", lambda real: lambda g: (x for x in real(g) if x[0] != 4)),
    "pairs read transposed": ("_below", lambda real: lambda x, m: real(x, m).mT),
    "no transposed term": ("intra", lambda real: lambda *a: replace(real(*a), t=torch.zeros_like(a[0].k))),
    "no term through L": ("intra", lambda real: lambda x, E, dL: real(x, E, torch.zeros_like(dL))),
    "state not passed on": ("scan", lambda real: lambda *a, **k: replace(s := real(*a, **k), h=torch.zeros_like(s.h))),
    "dv_loc left out": ("reverse_scan", lambda real: lambda p, do, *a: real(replace(p, Aqk=0 * p.Aqk), do, *a)),
    "scale left out": ("reverse_scan", lambda real: lambda *a: real(*a[:4], 1.0)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name, monkeypatch):
    function, plant = FAULTS[name]
    x = make(Case(tokens=100, batch=2))
    assert_right(x)
    monkeypatch.setattr(kda_chunked, function, plant(getattr(kda_chunked, function)))
    with pytest.raises(AssertionError, match="beyond their bounds"):
        assert_right(x, 1e-4)


def test_a_state_that_leaks_into_the_next_sequence_is_caught(monkeypatch):
    x = make(Case(tokens=100, ends=(0, 30, 100)))
    assert_right(x)
    monkeypatch.setattr(kda_layout.Edge, "reset", lambda self, carried: carried)
    with pytest.raises(AssertionError, match="beyond their bounds"):
        assert_right(x, 1e-4)
