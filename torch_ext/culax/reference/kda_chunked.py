"""Kimi Delta Attention in chunks of 64 tokens: forward and explicit backward, stage by stage, on any device.

Notation, for one chunk of one value head (C = 64 rows): G is the in-chunk inclusive cumsum of the gate g in log2
units, s the scale, S [K, V] the state, * elementwise, D_ij = 2^(G_i - G_j). Every stage works on all chunks and heads
at once in the layout [NT, HV, C, ...] of `kda_layout`; only the two scans loop, over the chunks of a sequence.

G_i - G_j is never a difference: it is summed from the gates of the rows j+1..i alone. So nothing cancels, no exponent
is positive (gates are <= 0) and no row reads the gate of a later one. `levels` splits the pairs i > j of a chunk by the
smallest aligned block that holds both, 2m rows long: D_ij = up_i * down_j, where up_i decays from the last row of the
block's first half to row i in the second, and down_j from row j to that last row. With the decays moved onto the
operands, all pairs of a level are one batched m x m product. Memory is linear in T.

fp64 inputs are computed in fp64, all others in fp32 (or what torch.backends allows fp32 matrix products to be).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .kda_layout import CHUNK, ChunkTable, chunk_table

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Chunks:
    """Inputs in chunk layout and the compute dtype: q, k, g [NT, HV, C, K], v [NT, HV, C, V], beta [NT, HV, C, 1].

    Rows beyond a sequence's end are zero in all of them, which makes their decay 1 and every product with them 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @property
    def G(self) -> Tensor:
        """F1: [NT, HV, C, K] in log2 units, for comparisons; the stages never subtract two of its rows."""
        return self.g.cumsum(2) * LOG2E


@dataclass(frozen=True)
class Prep:
    """What a chunk needs besides the state. Aqk, P: [NT, HV, C, C]; W, qg, kg: [.., C, K]; U: [.., C, V].

    exp_G is 2^G and exp_rest 2^(G_last - G), both [.., C, K]; exp_last is 2^(G_last), [.., K, 1].
    """

    Aqk: Tensor
    P: Tensor
    W: Tensor
    U: Tensor
    qg: Tensor
    kg: Tensor
    exp_G: Tensor
    exp_rest: Tensor
    exp_last: Tensor


@dataclass(frozen=True)
class Scan:
    """h: [NT, HV, K, V] state before each chunk; v_new: [NT, HV, C, V]; final_state: [N, HV, K, V]."""

    h: Tensor
    v_new: Tensor
    final_state: Tensor


@dataclass(frozen=True)
class Output:
    """o: [NT, HV, C, V]."""

    o: Tensor


@dataclass(frozen=True)
class ReverseScan:
    """dh: [NT, HV, K, V] gradient of the state after each chunk; dv_loc, dvn: [NT, HV, C, V]; dh0: [N, HV, K, V].

    dv_loc is None where do is. dvn is the gradient of both v_new and U.
    """

    dv_loc: Tensor | None
    dh: Tensor
    dvn: Tensor
    dh0: Tensor


@dataclass(frozen=True)
class Intra:
    """B4: gradients through the pairs i > j of a chunk. dqi, a, t: [NT, HV, C, K]; the pairs i = j are not in them."""

    dqi: Tensor
    a: Tensor
    t: Tensor


@dataclass(frozen=True)
class Local:
    """Gradients of one chunk given the states around it, and what leads to them.

    E, M, dL: [NT, HV, C, C]; dks, dW, dX: [.., C, K]; dY: [.., C, V]; the rest like the inputs (a head of q and k for
    each value head). E is None where do is.
    """

    E: Tensor | None
    dks: Tensor
    dW: Tensor
    dX: Tensor
    dY: Tensor
    M: Tensor
    dL: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor


def levels(g: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Decays of the pairs i > j of a chunk for m = 1, 2, .., 32: (m, up, down), both [NT, HV, C / 2m, m, K]."""
    for m in (1, 2, 4, 8, 16, 32):
        yield m, decay_to(_second(g, m)), decay_from(_first(g, m))


def decay_to(g: Tensor) -> Tensor:
    """Decay from before the first row of a block to each of its rows: 2^G. g: [..., rows, K]."""
    return _product(g.new_ones(g.shape[-2], g.shape[-2]).tril(), g).exp()


def decay_from(g: Tensor) -> Tensor:
    """Decay from each row of a block to its last one: 2^(G_last - G). g: [..., rows, K]."""
    return _product(g.new_ones(g.shape[-2], g.shape[-2]).triu(1), g).exp()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b. Batched matrix products are slow for an inner dimension of one, where broadcasting does the same."""
    return a * b if a.shape[-1] == 1 else a @ b


def _first(x: Tensor, m: int) -> Tensor:
    """View of the first halves of the blocks of 2m rows: [NT, HV, C, D] to [NT, HV, C / 2m, m, D]."""
    return x.unflatten(2, (-1, 2, m))[:, :, :, 0]


def _second(x: Tensor, m: int) -> Tensor:
    """View of the second halves of the blocks of 2m rows: [NT, HV, C, D] to [NT, HV, C / 2m, m, D]."""
    return x.unflatten(2, (-1, 2, m))[:, :, :, 1]


def _below(x: Tensor, m: int) -> Tensor:
    """View of the pairs of level m: [NT, HV, C, C] to [NT, HV, C / 2m, m, m] (second halves x first halves)."""
    blocks = x.unflatten(3, (-1, 2, m)).unflatten(2, (-1, 2, m))
    return blocks[:, :, :, 1, :, :, 0].diagonal(dim1=2, dim2=4).movedim(-1, 2)


def prep(x: Chunks, scale: float, Aqk: Tensor | None = None, P: Tensor | None = None) -> Prep:
    """F2 and F3. Aqk and P, [NT, HV, C, C], are computed where they are not given (both or none)."""
    exp_G, exp_rest = decay_to(x.g), decay_from(x.g)
    qg, kg, beta_k = x.q * exp_G, x.k * exp_rest, x.beta * x.k
    if Aqk is None or P is None:
        scaled_q = scale * x.q
        Aqk = torch.diag_embed((scaled_q * x.k).sum(-1))
        L = torch.zeros_like(Aqk)
        for m, up, down in levels(x.g):
            columns = (_first(x.k, m) * down).mT
            _below(Aqk, m).copy_((_second(scaled_q, m) * up) @ columns)
            _below(L, m).copy_((_second(beta_k, m) * up) @ columns)
        eye = torch.eye(CHUNK, dtype=L.dtype, device=L.device).expand_as(L)
        # Forward substitution: the powers of L that a series of I + L needs reach 1e17 for near-equal keys.
        P = torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True)
    return Prep(
        Aqk=Aqk,
        P=P,
        W=P @ (beta_k * exp_G),
        U=P @ (x.beta * x.v),
        qg=qg,
        kg=kg,
        exp_G=exp_G,
        exp_rest=exp_rest,
        exp_last=exp_G[:, :, -1, :, None],
    )


def scan(p: Prep, h0: Tensor, table: ChunkTable, keep_final: bool = True) -> Scan:
    """F4, over the chunks of each sequence from its h0 [N, HV, K, V]. final_state is right only with ``keep_final``."""
    h, v_new, after = [], [], []
    S, edges = table.enter(h0)
    for edge, W, U, kg, exp_last in zip(edges, *map(table.split, (p.W, p.U, p.kg, p.exp_last)), strict=True):
        S = S if edge is None else edge.reset(S)
        h.append(S)
        v_new.append(U - W @ S)
        S = torch.addcmul(kg.mT @ v_new[-1], exp_last, S)
        if keep_final:
            after.append(S)
    return Scan(h=table.join(h, h0), v_new=table.join(v_new, p.U), final_state=table.leave(S, after, h0))


def output(p: Prep, s: Scan, scale: float) -> Output:
    """F5."""
    return Output(o=scale * (p.qg @ s.h) + p.Aqk @ s.v_new)


def reverse_scan(p: Prep, do: Tensor | None, dht: Tensor, table: ChunkTable, scale: float) -> ReverseScan:
    """B1's dv_loc and B2, over the chunks of each sequence back from its dht [N, HV, K, V]. do: [NT, HV, C, V]."""
    # Without do its two terms are left out rather than computed from zeros.
    dv_loc = None if do is None else p.Aqk.mT @ do
    no_do = [None] * table.steps
    rows = no_do if dv_loc is None else table.split(dv_loc)
    states = no_do if do is None else table.split(p.qg.mT @ (scale * do))
    per_step = zip(*map(table.split, (p.W, p.kg, p.exp_last)), rows, states, strict=True)
    dh, dvn, after = [], [], []
    dS, edges = table.enter(dht, reverse=True)
    for edge, (W, kg, exp_last, dv_rows, dS_do) in reversed(list(zip(edges, per_step, strict=True))):
        dS = dS if edge is None else edge.reset(dS)
        dh.append(dS)
        dvn.append(kg @ dS if dv_rows is None else dv_rows + kg @ dS)
        dS = torch.addcmul(-(W.mT @ dvn[-1]) if dS_do is None else dS_do - W.mT @ dvn[-1], exp_last, dS)
        after.append(dS)
    return ReverseScan(
        dv_loc=dv_loc,
        dh=table.join(dh[::-1], dht),
        dvn=table.join(dvn[::-1], p.U),
        dh0=table.leave(dS, after, dht, reverse=True),
    )


def intra(x: Chunks, E: Tensor | None, dL: Tensor) -> Intra:
    """B4's sums over the pairs i > j, level by level. E, dL: [NT, HV, C, C]; E None is zero."""
    dqi, a, t = torch.zeros_like(x.q), torch.zeros_like(x.k), torch.zeros_like(x.k)
    beta_k = x.beta * x.k
    for m, up, down in levels(x.g):
        columns, dL_m = _first(x.k, m) * down, _below(dL, m)
        _second(a, m).addcmul_(up, _product(dL_m, columns))
        t_m = _product(dL_m.mT, _second(beta_k, m) * up)
        if E is not None:
            E_m = _below(E, m)
            _second(dqi, m).addcmul_(up, _product(E_m, columns))
            t_m = t_m + _product(E_m.mT, _second(x.q, m) * up)
        _first(t, m).addcmul_(down, t_m)
    return Intra(dqi=dqi, a=a, t=t)


def local(x: Chunks, p: Prep, s: Scan, r: ReverseScan, do: Tensor | None, scale: float) -> Local:
    """B1's E, B3, B4 and B6: every gradient inside a chunk, given the states around it. do: [NT, HV, C, V].

    B6 sums dG over the rows t and after. Two of dG's terms are summed by hand, so that what cancels is never computed:
    the last row's 2^(G_last) * sum_v(S * dS) reaches every t; and its sum of k * dks over all rows, less the k * dks of
    the rows t and after, is the sum over the rows before t. The pairs i = j cancel in dG and are left out of it.
    """
    scaled_do = None if do is None else scale * do
    E = None if scaled_do is None else (scaled_do @ s.v_new.mT).tril()
    k_exp_G = x.k * p.exp_G
    dks = (s.v_new @ r.dh.mT) * p.exp_rest
    dW = -(r.dvn @ s.h.mT)
    dX, dY = p.P.mT @ dW, p.P.mT @ r.dvn
    M = ((r.dvn @ x.v.mT + dW @ k_exp_G.mT) * x.beta.mT).tril(-1)
    dL = -(p.P.mT @ M @ p.P.mT).tril(-1)
    pairs = intra(x, E, dL)

    dbeta = (dY * x.v).sum(-1, keepdim=True) + (dX * k_exp_G + pairs.a * x.k).sum(-1, keepdim=True)
    dq = pairs.dqi
    dk = torch.addcmul(dks + pairs.t, x.beta, torch.addcmul(pairs.a, dX, p.exp_G))
    if scaled_do is not None:
        dq = torch.addcmul(dq, scaled_do @ s.h.mT, p.exp_G)
    dG = x.q * dq + x.beta * torch.addcmul(dX * k_exp_G, x.k, pairs.a) - x.k * pairs.t
    if E is not None:
        same_row = E.diagonal(dim1=2, dim2=3)[..., None]
        dq, dk = torch.addcmul(dq, same_row, x.k), torch.addcmul(dk, same_row, x.q)
    ones = dG.new_ones(CHUNK, CHUNK)
    state_term = p.exp_last.mT * (s.h * r.dh).sum(-1)[:, :, None]
    dg = ones.triu() @ dG + ones.tril(-1) @ (x.k * dks) + state_term
    return Local(E=E, dks=dks, dW=dW, dX=dX, dY=dY, M=M, dL=dL, dq=dq, dk=dk, dv=x.beta * dY, dg=dg, dbeta=dbeta)


def chunk_inputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None
) -> tuple[Chunks, ChunkTable]:
    """The inputs of `forward` in chunk layout, q and k with a head for each value head, and the layout's table."""
    batch, tokens, heads = v.shape[:3]
    table = chunk_table(batch, tokens, cu_seqlens)
    q, k, v, g, beta = (table.gather(x, heads, state_dtype(q)) for x in (q, k, v, g, beta[..., None]))
    return Chunks(q=q, k=k, v=v, g=g, beta=beta), table


def boundary_state(state: Tensor | None, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The states [N, HV, K, V] that the sequences start from or end with, in the compute dtype; None is zero."""
    if state is not None:
        return state.to(state_dtype(k))
    sequences = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return k.new_zeros(sequences, v.shape[2], k.shape[3], v.shape[3], dtype=state_dtype(k))


def state_dtype(q: Tensor) -> torch.dtype:
    """The dtype of states and of all arithmetic: fp64 for fp64 inputs, fp32 for all others."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    output_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Kimi Delta Attention over all tokens.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H. g: [B, T, HV, K], natural-log decay of each token.
        beta: [B, T, HV]. initial_state: [N, HV, K, V] or None for zeros. Any strides.
        cu_seqlens: [N + 1] integer offsets of N sequences packed along T with B = 1, or None for N = B.
        scale: factor on the output.
        output_final_state: whether final_state is wanted.

    Returns:
        o: [B, T, HV, V] in q's dtype, zero for tokens of no sequence.
        final_state: [N, HV, K, V] ([0, HV, K, V] if not wanted), fp32 (fp64 for fp64 inputs).
        Aqk, Akk: [B, T, HV, 64] in q's dtype, what `backward` can reuse: row t of its chunk's Aqk and P.
    """
    x, table = chunk_inputs(q, k, v, g, beta, cu_seqlens)
    p = prep(x, scale)
    s = scan(p, boundary_state(initial_state, k, v, cu_seqlens), table, output_final_state)
    o = output(p, s, scale).o
    # A copy where the scan had no step: an op must not return its input.
    final_state = s.final_state.clone() if output_final_state else s.final_state.new_zeros(0, *s.final_state.shape[1:])
    return table.scatter(o, q.dtype), final_state, table.scatter(p.Aqk, q.dtype), table.scatter(p.P, q.dtype)


def backward(
    do: Tensor | None,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    Aqk: Tensor | None,
    Akk: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `forward`, by explicit formulas.

    Args:
        do: [B, T, HV, V] or None for zero. dht: [N, HV, K, V] or None for zero. Aqk, Akk: from `forward`; recomputed
        (in the compute dtype) unless both are given. The rest as in `forward`.

    Returns:
        dq, dk, dv, dg, dbeta: each with its input's shape and dtype, zero for tokens of no sequence.
        dinitial_state: [N, HV, K, V] ([0, HV, K, V] if initial_state is None), fp32 (fp64 for fp64 inputs).
    """
    x, table = chunk_inputs(q, k, v, g, beta, cu_seqlens)
    heads, dtype = v.shape[2], state_dtype(q)
    saved = () if Aqk is None or Akk is None else (table.gather(Aqk, heads, dtype), table.gather(Akk, heads, dtype))
    do_chunks = None if do is None else table.gather(do, heads, dtype)
    p = prep(x, scale, *saved)
    s = scan(p, boundary_state(initial_state, k, v, cu_seqlens), table, keep_final=False)
    r = reverse_scan(p, do_chunks, boundary_state(dht, k, v, cu_seqlens), table, scale)
    d = local(x, p, s, r, do_chunks, scale)
    groups = (q.shape[2], heads // q.shape[2])
    dq, dk = (y.unflatten(1, groups).sum(2) for y in (d.dq, d.dk))
    dh0 = r.dh0.new_zeros(0, *r.dh0.shape[1:]) if initial_state is None else r.dh0.clone()
    return (
        table.scatter(dq, q.dtype),
        table.scatter(dk, k.dtype),
        table.scatter(d.dv, v.dtype),
        table.scatter(d.dg, g.dtype),
        table.scatter(d.dbeta, beta.dtype)[..., 0],
        dh0,
    )
