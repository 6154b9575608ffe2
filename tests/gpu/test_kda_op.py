"""torch.ops.culax.kda_bwd on its kernels: what must not change a bit of it, and how much memory it takes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import culax
from tests.gpu.kda_problems import BF16, DEVICE, Case, call
from tests.gpu.test_kda_backward import BOUNDS, NAMES, assert_same, recurrence_gradients

OP = torch.ops.culax.kda_bwd
INPUTS = ("do", "dht", "q", "k", "v", "g", "beta", "Aqk", "Akk", "initial_state", "cu_seqlens", "scale")
STATES = ("dht", "initial_state")
RUNS = 20
CASES = {
    "packed_grouped": Case(1, 1000, 2, 4, offsets=(0, 200, 201, 640, 1000)),
    "equal": Case(2, 500, 3, 3, gate="strong"),
    "k64_v128": Case(1, 700, 2, 2, 64, 128, gate="mild"),
    "k128_v64": Case(1, 700, 2, 2, 128, 64),
    "segments": Case(1, 3090, 1, 2),
}


def replaced(arguments: list, **changes: Tensor | None) -> list:
    """The arguments with some of them, by name, exchanged."""
    return [changes.get(name, argument) for name, argument in zip(INPUTS, arguments, strict=True)]


def test_the_kernels_serve_the_op() -> None:
    for case in CASES.values():
        assert culax.explain("kda_bwd", *call(case)).backend == "cutedsl"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_poisoned_scratch_on_two_streams_gives_the_same_bits(case: Case, request: pytest.FixtureRequest) -> None:
    arguments = call(case)
    first = OP(*arguments)
    request.getfixturevalue("poisoned_memory")
    side = torch.cuda.Stream()
    for run in range(RUNS):
        if run % 2:
            assert_same(first, OP(*arguments))
            continue
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            again = OP(*arguments)
        torch.cuda.current_stream().wait_stream(side)
        assert_same(first, again)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_second_kernel_on_the_multiprocessors_changes_nothing(case: Case) -> None:
    arguments = call(case)
    first = OP(*arguments)
    a = torch.randn(4096, 4096, device=DEVICE).to(BF16)
    products, side, shared = [torch.empty_like(a) for _ in range(2)], torch.cuda.Stream(), 0
    for _ in range(RUNS):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for turn in range(40):
                torch.mm(a, a, out=products[turn % 2])
        again = OP(*arguments)
        torch.cuda.current_stream().synchronize()
        shared += not side.query()
        assert_same(first, again)
    assert shared > RUNS // 2  # the other kernels were still at work when this one had ended


@pytest.mark.parametrize("gate", [0.0, -0.7, -30.0])
@pytest.mark.parametrize(("tokens", "t"), [(22, 21), (64, 33), (64, 47), (130, 70), (200, 129), (3090, 1600)])
def test_prefix_gradients_ignore_later_gates(tokens: int, t: int, gate: float) -> None:
    """A loss on o[:t] has the same gradients for rows below t, to the bit, whatever the gates from t on."""
    arguments = replaced(call(Case(1, tokens, 2, 2)), dht=None)
    arguments[0][:, t:] = 0
    want = OP(*arguments)
    arguments[5] = arguments[5].clone()
    arguments[5][:, t:] = gate
    got = OP(*arguments)
    assert torch.equal(got[5], want[5])
    for name, a, b in zip(NAMES[:5], got, want):
        assert torch.equal(a[:, :t], b[:, :t]), name


ENDS = (2, 12, 82, 82, 100)
ROWS = {"first": slice(2, 12), "middle": slice(12, 82), "last": slice(82, 100)}


@pytest.mark.parametrize("argument", [name for name in INPUTS if name not in ("cu_seqlens", "scale")])
@pytest.mark.parametrize("poisoned", ROWS)
def test_nan_stays_in_its_sequence(poisoned: str, argument: str) -> None:
    """NaN in one sequence, and in rows outside all, leaves every other gradient as it was, to the bit."""
    arguments = call(Case(1, 110, 2, 4, offsets=ENDS))
    want = OP(*arguments)
    sequence = list(ROWS).index(poisoned) + (poisoned == "last")
    tensor = arguments[INPUTS.index(argument)].clone()
    if argument in STATES:
        tensor[sequence] = math.nan
    else:
        for rows in (ROWS[poisoned], slice(0, 2), slice(100, 110)):
            tensor[:, rows] = math.nan
    got = OP(*replaced(arguments, **{argument: tensor}))
    rows, states = torch.ones(110, dtype=torch.bool), torch.ones(4, dtype=torch.bool)
    rows[ROWS[poisoned]], states[sequence] = False, False
    assert any(a.isnan().any() for a in got)
    for name, a, b in zip(NAMES, got, want):
        kept = (states,) if name == "dh0" else (slice(None), rows)
        assert torch.equal(a[kept], b[kept]), name


def with_nan_behind(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_full((*x.shape[:-1], 3), math.nan)], -1)[..., : x.shape[-1]]


def every_second(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, math.nan)], -1).flatten(-2)[..., ::2]


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def tokens_first(x: Tensor) -> Tensor:
    return x.movedim(1, 0).contiguous().movedim(0, 1)


def off_by_one_element(x: Tensor) -> Tensor:
    return torch.cat([x.new_full((1,), math.nan), x.reshape(-1)])[1:].view(x.shape)


def one_token_everywhere(x: Tensor) -> Tensor:
    return x[:, :1].expand_as(x)


STRIDES = (with_nan_behind, every_second, heads_first, tokens_first, off_by_one_element, one_token_everywhere)


@pytest.mark.parametrize("offsets", [None, (0, 3, 60)], ids=["equal", "packed"])
@pytest.mark.parametrize("change", STRIDES, ids=lambda change: change.__name__)
def test_any_strides(change: Callable[[Tensor], Tensor], offsets: tuple[int, ...] | None) -> None:
    arguments = call(Case(1, 70, 2, 4, offsets=offsets))
    strided = [change(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
    if offsets is not None:
        strided[10] = torch.stack([arguments[10], arguments[10]], -1).to(torch.int32)[:, 0]
    plain = [x.contiguous() if isinstance(x, Tensor) else x for x in strided]
    assert_same(OP(*plain), OP(*strided))


def test_a_hundred_thousand_short_sequences() -> None:
    """1,000 sequences of 0 to 3 tokens against the recurrence; 100 times as many, with the same values, bit for bit."""
    lengths = torch.randint(0, 4, (1000,), generator=torch.Generator().manual_seed(0))
    tokens, times = int(lengths.sum()), 100
    case = Case(1, tokens, 1, 1, 64, 64, offsets=(0, *lengths.cumsum(0).tolist()))
    arguments = call(case)
    small = OP(*arguments)
    for name, mine, true in zip(NAMES, small, recurrence_gradients(arguments)):
        assert (mine.double() - true).norm() <= BOUNDS[name] * true.norm(), name
    many = []
    for name, x in zip(INPUTS, arguments, strict=True):
        if name in STATES:
            x = x.repeat(times, 1, 1, 1)
        elif isinstance(x, Tensor) and x.is_floating_point():
            x = x.repeat(1, times, *(1,) * (x.dim() - 2))
        many.append(x)
    many[10] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.repeat(times).cumsum(0)]).to(DEVICE)
    for name, few, all_ in zip(NAMES, small, OP(*many)):
        copies = all_.view(times, *(few.shape if name == "dh0" else few.shape[1:]))
        assert torch.equal(copies, few.expand_as(copies)), name


@pytest.mark.parametrize("packed", [False, True], ids=["equal", "packed"])
def test_peak_memory(packed: bool) -> None:
    """The outputs, the tapes (W, U, qg, kg, v_new, dvn a token, h and dh a chunk, in bf16), and a tenth more."""
    tokens, heads, dim = 8192, 8, 128
    case = Case(1, tokens, heads, heads, offsets=(0, 1000, 4096, tokens) if packed else None)
    arguments = call(case)
    outputs = sum(x.numel() * x.element_size() for x in OP(*arguments))
    chunks = tokens // 64 + (case.sequences if packed else 0)
    tapes = 2 * heads * (6 * 64 * chunks * dim + 2 * chunks * dim * dim)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    OP(*arguments)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * (outputs + tapes)
