"""Each stage of the KDA backward alone, on what the reference's stage before it leaves, against float64."""

from __future__ import annotations

import pytest
import torch

from culax.kda import launch
from tests.gpu import kda_stages
from tests.gpu.kda_problems import (
    BF16,
    DEVICE,
    Case,
    Truth,
    assert_close,
    call,
    given_tapes,
    poisoned,
    poisoned_tapes,
    read_tape,
    truth,
)

CASES = {
    "one_chunk_no_state": Case(1, 64, 1, 1, gate="mild", states=False),
    "partial_last_chunk": Case(2, 200, 2, 2),
    "one_head_rings_go_round": Case(1, 330, 1, 1),
    "one_head_alone_in_its_cluster": Case(1, 330, 1, 1, 64, 64),
    "one_token": Case(2, 1, 2, 2),
    "decay_e-5_a_token": Case(1, 320, 2, 2, gate="five"),
    "no_decay": Case(1, 256, 2, 2, gate="zero"),
    "k64_v64": Case(2, 300, 3, 3, 64, 64, gate="strong"),
    "k64_v128": Case(1, 200, 2, 2, 64, 128),
    "k128_v64": Case(1, 200, 2, 2, 128, 64),
    "packed_grouped": Case(1, 700, 2, 4, offsets=(70, 70, 71, 134, 198, 263, 450, 500, 691)),
    "packed_grouped_k64": Case(1, 300, 1, 3, 64, 64, offsets=(0, 64, 65, 300)),
    "packed_grouped_k64_v128": Case(1, 300, 1, 2, 64, 128, offsets=(0, 130, 300)),
    "packed_grouped_k128_v64": Case(1, 300, 1, 2, 128, 64, offsets=(5, 130, 300)),
}
# One rounding to bf16 is 1.7e-3 for a uniform mantissa, a product of two rounded operands and its own rounding 2.5e-3;
# in dg, a sum over rows, what is left of larger terms is up to twice as far off.
BOUND, TILE_BOUND = 4.5e-3, 8e-3


@pytest.fixture(scope="module", params=CASES)
def problem(request: pytest.FixtureRequest) -> tuple[list, Truth]:
    case = CASES[request.param]
    arguments = call(case)
    return arguments, truth(case, arguments)


def ready(problem: tuple[list, Truth], *names: str) -> tuple[launch.Inputs, kda_stages.Tapes, int]:
    """Inputs, poisoned workspaces with a table and the named tapes, and the number of chunks that hold tokens."""
    arguments, expected = problem
    inputs, _ = launch.collect(tuple(arguments))
    tapes = poisoned_tapes(inputs)
    kda_stages.build_table(expected.case.kernels(), inputs, tapes)
    given_tapes(expected, tapes, names)
    return inputs, tapes, len(expected.case.chunks())


def test_chunk_table(problem: tuple[list, Truth]) -> None:
    _, tapes, count = ready(problem)
    case = problem[1].case
    assert tapes.table[:count].tolist() == case.chunks()
    assert (tapes.table[count:, 3] <= 0).all()
    firsts = [sum(chunk[0] < n for chunk in case.chunks()) for n in range(case.sequences + 1)]
    assert tapes.bounds.tolist() == firsts


def test_prep(problem: tuple[list, Truth]) -> None:
    inputs, tapes, count = ready(problem)
    expected = problem[1]
    kda_stages.prep(expected.case.kernels(), inputs, tapes, problem[0][-1])
    want, scale = expected.prep, problem[0][-1]
    for name, tape in (("minus_w", -want.W), ("u", want.U), ("qg", scale * want.qg), ("kg", want.kg)):
        assert_close(name, read_tape(getattr(tapes, name), tape)[:count], tape[:count], BOUND, TILE_BOUND)
    # Below the normal range the kernel gives 0.
    torch.testing.assert_close(tapes.decay[:count], expected.given["decay"][:count], rtol=2e-4, atol=1e-37)


SCANNED = "minus_w", "u", "qg", "kg", "decay"


@pytest.mark.parametrize("segments", [1, 2, 3, 4, 7])
def test_scans(problem: tuple[list, Truth], segments: int) -> None:
    """Segments of a sequence may be longer by one chunk than others, or empty."""
    inputs, tapes, count = ready(problem, *SCANNED)
    expected = problem[1]
    forward, reverse = expected.scan, expected.reverse_scan
    last = tuple(poisoned(tuple(y.shape), torch.float32) for y in (forward.final_state, reverse.dh0))
    kda_stages.scans(expected.case.kernels(), inputs, tapes, last, segments)
    wanted = {"h": forward.h, "v_new": forward.v_new, "dh": reverse.dh, "dvn": reverse.dvn}
    for name, want in wanted.items():
        assert_close(name, read_tape(getattr(tapes, name), want)[:count], want[:count], BOUND, TILE_BOUND)
    for name, got, want in zip(("final_state", "dh0"), last, (forward.final_state, reverse.dh0)):
        assert_close(name, got, want, BOUND, TILE_BOUND)


@pytest.mark.parametrize("segments", [2, 3, 5])
def test_summaries(problem: tuple[list, Truth], segments: int) -> None:
    """Transitions are the products of the chunks' own; what is in none is not written."""
    inputs, tapes, _ = ready(problem, *SCANNED)
    expected = problem[1]
    case, given = expected.case, {name: y.double() for name, y in expected.given.items()}
    got = kda_stages.summarise(case.kernels(), inputs, tapes, segments)
    identity = torch.eye(case.key_dim, dtype=torch.float64, device=DEVICE)
    bounds = tapes.bounds.tolist()
    for n in range(case.sequences):
        for segment in range(segments):
            row, length = n * segments + segment, bounds[n + 1] - bounds[n]
            if segment in (0, segments - 1):
                assert got.transitions[row].isnan().all() and got.transposed[row].isnan().all()
                continue
            want = identity.expand(case.value_heads, -1, -1)
            for chunk in range(
                bounds[n] + length * segment // segments, bounds[n] + length * (segment + 1) // segments
            ):
                step = given["kg"][chunk].mT @ given["minus_w"][chunk] + torch.diag_embed(given["decay"][chunk])
                want = step @ want
            assert_close("transition", got.transitions[row, None], want[None], BOUND, TILE_BOUND)
            assert torch.equal(got.transposed[row], got.transitions[row].mT)


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_join(key_dim: int, value_dim: int, states: bool) -> None:
    segments, sequences, heads = 5, 2, 3
    case = Case(1, 1, heads, heads, key_dim, value_dim)

    def normal(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, heads, key_dim, width, device=DEVICE)

    given = [normal(sequences if states else 0, value_dim) for _ in range(2)]
    starts, ends = (normal(sequences * segments, value_dim) for _ in range(2))
    matrices = normal(sequences * segments, key_dim) / key_dim**0.5
    matrices.view(sequences, segments, -1)[:, [0, -1]] = float("nan")
    want = [
        torch.zeros(sequences, segments, heads, key_dim, value_dim, dtype=torch.float64, device=DEVICE) for _ in "ab"
    ]
    per_sequence = [y.double().unflatten(0, (sequences, segments)) for y in (starts, ends, matrices)]
    steps = per_sequence[2]
    for out, there, first, step in zip(want, per_sequence, given, (1, -1)):
        order = list(range(segments))[::step]
        if states:
            out[:, order[0]] = first.double()
        out[:, order[1]] = there[:, order[1]]
        for here, after in zip(order[1:], order[2:]):
            matrix = steps[:, here] if step == 1 else steps[:, here].mT
            out[:, after] = there[:, after] + matrix @ out[:, here]
    transposed = matrices.mT.contiguous()
    case.kernels().join(*given, matrices, transposed, starts, ends, segments)
    for name, got, expected in zip(("starts", "ends"), (starts, ends), want):
        assert_close(name, got, expected.flatten(0, 1), 1e-6, 2e-6)


def test_local(problem: tuple[list, Truth]) -> None:
    inputs, tapes, count = ready(problem, "h", "v_new", "dh", "dvn")
    arguments, expected = problem
    case, want = expected.case, expected.local
    heads = (case.batch, case.tokens, case.value_heads)
    key_dtype = torch.float32 if case.value_heads > case.heads else BF16
    outputs = {
        "dq": poisoned((*heads, case.key_dim), key_dtype),
        "dk": poisoned((*heads, case.key_dim), key_dtype),
        "dv": poisoned((*heads, case.value_dim), BF16),
        "dg": poisoned((*heads, case.key_dim), torch.float32),
        "dbeta": poisoned(heads, torch.float32),
    }
    kda_stages.local(case.kernels(), inputs, tapes, tuple(outputs.values()), arguments[-1])
    for name, got in outputs.items():
        rows = got if got.dim() == 4 else got[..., None]
        tiles = expected.table.gather(rows, case.value_heads, torch.float64)[:count]
        valid = expected.table.gather(torch.ones_like(rows[..., :1]), case.value_heads, torch.float64)[:count]
        scale = (want.dY * expected.x.v).norm(dim=-1, keepdim=True)[:count] if name == "dbeta" else None
        assert_close(name, tiles, valid * getattr(want, name)[:count], BOUND, TILE_BOUND, scale)
        if case.offsets is not None:
            outside = torch.ones(case.tokens, dtype=torch.bool, device=DEVICE)
            outside[case.offsets[0] : case.offsets[-1]] = False
            assert not got[0, outside].any(), f"{name}: not zero outside all sequences"


@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize("key_dim", [64, 128])
def test_group_sum(key_dim: int, group: int) -> None:
    shares = [torch.randn(37, group, key_dim, device=DEVICE) for _ in range(2)]
    totals = [poisoned((37, key_dim), BF16) for _ in range(2)]
    Case(1, 1, 1, 2, key_dim, 64).kernels().group_sum(*shares, *totals)
    for share, total in zip(shares, totals):
        expected = torch.zeros(37, key_dim, device=DEVICE)
        for head in range(group):
            expected = expected + share[:, head]
        assert torch.equal(total, expected.to(BF16))


@pytest.mark.parametrize(
    ("tokens", "given", "cleaned"),
    [
        (300, (0, 200, 100, 300), (0, 200, 200, 300)),
        (300, (-5, 50, 1000, 700), (0, 50, 300, 300)),
        (300, (10,), (10,)),
        (0, (0, 0, 0), (0, 0, 0)),
        (7000, tuple(range(7001)), tuple(range(7001))),
    ],
    ids=["descending", "outside", "no_sequence", "no_token", "sequences_of_one_token"],
)
def test_chunk_table_of_any_offsets(tokens: int, given: tuple[int, ...], cleaned: tuple[int, ...]) -> None:
    case = Case(1, tokens, 1, 1, states=False, offsets=cleaned)
    rows = -(-tokens // 64) + len(given) + 1
    table = torch.full((rows, 4), -7, dtype=torch.int32, device=DEVICE)
    bounds, clean = (torch.full((len(given),), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    case.kernels().chunk_table(torch.tensor(given, device=DEVICE), clean, bounds, table, tokens)
    assert clean.tolist() == list(cleaned)
    expected = case.chunks()
    assert table[: len(expected)].tolist() == expected
    outside = {t for first, rows in table[len(expected) :, 2:].tolist() for t in range(first, first - rows)}
    covered = set(range(cleaned[0], cleaned[-1]))
    assert outside == set(range(tokens)) - covered
