"""The whole KDA backward by kernels: against the token recurrence in float64, and what must not change its bits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from culax.kda import launch
from culax.reference.kda_recurrence import kda_recurrence
from tests.gpu.graphs import capture
from tests.gpu.kda_problems import BF16, DEVICE, GATES, Case, assert_close, call, double

NAMES = ("dq", "dk", "dv", "dg", "dbeta", "dh0")
CASES = {f"gate_{gate}": Case(2, 200, 2, 2, gate=gate) for gate in GATES} | {
    "grouped": Case(1, 130, 2, 6),
    "k64_v64": Case(1, 200, 2, 2, 64, 64),
    "k64_v64_grouped": Case(1, 130, 1, 2, 64, 64),
    "k64_v128": Case(1, 130, 2, 2, 64, 128),
    "k64_v128_grouped": Case(1, 130, 1, 2, 64, 128),
    "k128_v64": Case(1, 130, 2, 2, 128, 64),
    "k128_v64_grouped": Case(1, 130, 1, 2, 128, 64),
    "packed": Case(1, 330, 2, 2, offsets=(3, 3, 4, 68, 132, 325)),
    "no_states": Case(1, 129, 2, 2, states=False),
}
# Few heads and long sequences: the plan walks over 3 segments of each.
SEGMENTED = {
    "segments_grouped": Case(1, 3090, 1, 2),
    "segments_k64": Case(1, 3090, 2, 2, 64, 64),
    "segments_no_states": Case(1, 3090, 1, 1, gate="mild", states=False),
    "segments_packed": Case(1, 6200, 1, 1, offsets=(3, 6189, 6190)),
}
# Errors of the whole chain of bf16 tapes; global, and for the worst head and chunk.
BOUNDS = {"dq": 4.5e-3, "dk": 6e-3, "dv": 4.5e-3, "dg": 6e-3, "dbeta": 6e-3, "dh0": 4.5e-3}
TILE = 2.5


def run(case: Case, arguments: list) -> tuple[Tensor, ...]:
    return launch.run(case.plan(), tuple(arguments))


def recurrence_gradients(arguments: list) -> list[Tensor]:
    """Autograd through the token recurrence in float64."""
    do, dht, q, k, v, g, beta, _, _, h0, cu_seqlens, scale = double(arguments)
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta)] + ([h0.requires_grad_()] if h0 is not None else [])
    o, final = kda_recurrence(q, k, v, g, beta, h0, cu_seqlens, scale)
    outputs = [(o, do)] + ([(final, dht)] if dht is not None else [])
    return list(torch.autograd.grad([y for y, _ in outputs], leaves, [dy for _, dy in outputs]))


def tiles(x: Tensor, case: Case) -> Tensor:
    """[chunks, heads, 64 * ...] of a gradient [B, T, heads, ...], short chunks filled up with zeros."""
    parts = []
    for _, batch, first, rows in case.chunks():
        part = x[batch, first : first + rows].flatten(2) if x.dim() == 4 else x[batch, first : first + rows, :, None]
        padded = part.new_zeros(64, *part.shape[1:])
        padded[:rows] = part
        parts.append(padded.transpose(0, 1).flatten(1))
    return torch.stack(parts)


def test_segments_are_several() -> None:
    for case in SEGMENTED.values():
        arguments = call(case)
        assert launch.sizes(case.plan(), arguments[4], None if case.offsets is None else case.sequences)[1] == 3


@pytest.mark.parametrize("case", [*CASES.values(), *SEGMENTED.values()], ids=[*CASES, *SEGMENTED])
def test_against_the_token_recurrence(case: Case) -> None:
    arguments = call(case)
    got, want = run(case, arguments), recurrence_gradients(arguments)
    for name, mine, true in zip(NAMES, got, want):
        bound = BOUNDS[name]
        if name == "dh0":
            assert_close(name, mine, true, bound, TILE * bound)
            continue
        # A row's dbeta is a sum of V + K signed terms; they are as large as dv's and dk's terms, and may cancel.
        scale = tiles(want[2] * arguments[4], case).square() if name == "dbeta" else None
        if scale is not None:
            rows = scale.unflatten(2, (64, -1)).sum(-1).sqrt() / tiles(arguments[6].double(), case).clamp(min=0.1)
            scale = torch.maximum(rows, tiles(true, case).abs())
        assert_close(name, tiles(mine, case), tiles(true, case), bound, TILE * bound, scale)
    for mine, given in zip(got, arguments[2:7]):
        assert mine.dtype == given.dtype and mine.shape == given.shape and mine.is_contiguous()


def assert_same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> None:
    for name, a, b in zip(NAMES, first, second):
        assert torch.equal(a, b), name


LONG = Case(1, 1000, 4, 8, offsets=(0, 200, 201, 640, 1000))


def test_twenty_runs_on_two_streams_give_the_same_bits() -> None:
    arguments = call(LONG)
    first = run(LONG, arguments)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    noise = torch.randn(2048, 2048, device=DEVICE)
    for turn in range(20):
        if turn % 2:
            noise = torch.tanh(noise @ noise)
            with torch.cuda.stream(side):
                again = run(LONG, arguments)
            torch.cuda.current_stream().wait_stream(side)
        else:
            again = run(LONG, arguments)
        assert_same(first, again)


def test_strides_dtypes_of_offsets_and_absent_inputs_change_nothing() -> None:
    case = replace(LONG, states=False)
    arguments = call(case)
    first = run(case, arguments)
    strided = list(arguments)
    for i in (0, 2, 3, 4, 5, 7, 8):
        strided[i] = arguments[i].transpose(1, 2).contiguous().transpose(1, 2)
    strided[6] = arguments[6].transpose(1, 2).contiguous().transpose(1, 2)
    strided[2] = torch.cat([arguments[2], arguments[2]], -1)[..., : case.key_dim]
    strided[10] = arguments[10].to(torch.int32)
    assert_same(first, run(case, strided))
    zeros = list(arguments)
    zeros[1] = torch.zeros(case.sequences, case.value_heads, case.key_dim, case.value_dim, device=DEVICE)
    assert_same(first, run(case, zeros))
    no_do, zero_do = list(arguments), list(arguments)
    no_do[0], zero_do[0] = None, torch.zeros_like(arguments[0])
    assert_same(run(case, no_do), run(case, zero_do))


def test_half_precision_gates_get_gradients_in_their_dtype() -> None:
    arguments = call(LONG)
    arguments[5], arguments[6] = arguments[5].to(BF16), arguments[6].to(BF16)
    got = torch.ops.culax.kda_bwd(*arguments)
    arguments[5], arguments[6] = arguments[5].float(), arguments[6].float()
    want = run(LONG, arguments)
    assert got[3].dtype == got[4].dtype == BF16
    assert torch.equal(got[3], want[3].to(BF16)) and torch.equal(got[4], want[4].to(BF16))


@pytest.mark.parametrize("case", [LONG, SEGMENTED["segments_packed"]], ids=["one_segment", "segments"])
def test_a_sequence_of_nan_stays_alone(case: Case) -> None:
    """The second sequence has one token."""
    assert case.offsets is not None
    arguments, token = call(case), case.offsets[1]
    clean = run(case, arguments)
    for i in (0, 2, 3, 4, 5, 6):
        arguments[i] = arguments[i].clone()
        arguments[i][0, token] = math.nan
    for i in (1, 9):
        arguments[i][1] = math.nan
    spoiled = run(case, arguments)
    for name, a, b in zip(NAMES, clean, spoiled):
        whole, spoiled_one = (case.sequences, 1) if name == "dh0" else (case.tokens, token)
        rest = [i for i in range(whole) if i != spoiled_one]
        a, b = (x[rest] if name == "dh0" else x[0, rest] for x in (a, b))
        assert torch.equal(a, b), name


def test_later_gates_do_not_reach_earlier_gradients() -> None:
    case = Case(1, 64, 2, 2, states=False)
    arguments = call(case)
    arguments[0][:, 21:] = 0
    first = run(case, arguments)
    arguments[5] = arguments[5].clone()
    arguments[5][:, 21:] *= 3
    second = run(case, arguments)
    for name, a, b in zip(NAMES[:5], first, second):
        assert torch.equal(a[:, :21], b[:, :21]), name


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_beta_and_offsets_of_either_width_give_the_same_bits(case: Case) -> None:
    arguments = call(case)
    beta, offsets = arguments[6].to(BF16), arguments[10]
    wide = torch.ops.culax.kda_bwd(*arguments[:6], beta.float(), *arguments[7:])
    for width in (torch.int32, torch.int64):
        arguments[10] = None if offsets is None else offsets.to(width)
        narrow = torch.ops.culax.kda_bwd(*arguments[:6], beta, *arguments[7:])
        assert narrow[4].dtype is BF16
        assert_same((*wide[:4], wide[4].to(BF16), wide[5]), narrow)


def test_a_graph_follows_changed_inputs_and_offsets() -> None:
    arguments = call(LONG)
    graph, captured = capture(lambda: run(LONG, arguments))
    changed = call(replace(LONG, offsets=(1, 300, 300, 302, 990)), seed=1)
    for old, new in zip(arguments, changed):
        if isinstance(old, Tensor):
            old.copy_(new)
    graph.replay()
    assert_same(run(LONG, changed), captured)


@pytest.mark.parametrize(
    "case", [LONG, CASES["k64_v64"], SEGMENTED["segments_no_states"]], ids=["packed_grouped", "equal", "segments"]
)
def test_a_warmed_plan_can_be_captured(case: Case) -> None:
    launch.warm(case.plan(), torch.device(DEVICE))
    arguments = call(case)
    torch.cuda.synchronize()
    graph, captured = capture(lambda: run(case, arguments), warm=False)
    graph.replay()
    assert_same(run(case, arguments), captured)


@pytest.mark.parametrize(("tokens", "offsets"), [(0, None), (0, (0, 0)), (5, (2, 2)), (70, (0,))])
def test_nothing_to_do(tokens: int, offsets: tuple[int, ...] | None) -> None:
    case = Case(1, tokens, 2, 2, offsets=offsets)
    arguments = call(replace(case, offsets=None)) if tokens else call(Case(1, 0, 2, 2))
    arguments[10] = None if offsets is None else torch.tensor(offsets, device=DEVICE)
    if case.sequences == 0:
        arguments[1], arguments[9] = arguments[1][:0], arguments[9][:0]
    got = run(case, arguments)
    assert not any(x.any() for x in got[:5])
    assert torch.equal(got[5], arguments[1])


def test_offsets_beyond_32_bits() -> None:
    """The last sequence of a call whose tapes and inputs pass 2^31 elements, against the same sequence alone."""
    heads, tail, tokens = 64, 100, 2**18 + 100
    small = Case(1, tail, heads, heads, states=False)
    arguments = call(small)
    alone = run(small, arguments)
    big = replace(small, tokens=tokens, offsets=(0, tokens - tail, tokens))
    wide = []
    for x in arguments[:10]:
        whole = None if x is None else x.new_zeros(1, tokens, *x.shape[2:])
        if whole is not None:
            whole[:, -tail:] = x
        wide.append(whole)
    got = run(big, [*wide, torch.tensor(big.offsets, device=DEVICE), arguments[11]])
    for name, a, b in zip(NAMES[:5], alone, got):
        assert torch.equal(a, b[:, -tail:]), name
        assert not b[:, : tokens - tail].any(), name
