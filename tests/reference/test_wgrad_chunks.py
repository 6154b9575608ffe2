"""Token ranges, token owners and the chunk table: every owned token exactly once, for any offsets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from culax.reference.expert_chunks import CHUNK, chunk_count, chunk_table, expert_ranges, token_owners
from tests.reference.wgrad_cases import GROUPS, ends_of, offsets


def coverage(ends: list[int], tokens: int) -> torch.Tensor:
    """Owning expert of each token according to the chunk table, -1 where none; fails on a token covered twice."""
    chunks = chunk_table(expert_ranges(offsets(ends), tokens), tokens)
    assert len(chunks.expert) == chunk_count(tokens, len(ends)) == -(-tokens // CHUNK) + len(ends)
    lane = torch.arange(CHUNK)
    live = lane < chunks.length[:, None]
    token = (chunks.first[:, None] + lane)[live]
    assert len(token.unique()) == len(token)
    owner = torch.full((tokens,), -1)
    owner[token] = chunks.expert[:, None].expand(-1, CHUNK)[live]
    assert torch.equal(token, token.sort().values), "chunks follow the order of tokens"
    return owner


def expected_owner(ends: list[int], tokens: int) -> torch.Tensor:
    owner, start = torch.full((tokens,), -1), 0
    for expert, end in enumerate(ends):
        owner[start:end] = expert
        start = end
    return owner


def test_every_token_once_for_thousands_of_offsets():
    generator = torch.Generator().manual_seed(0)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(4000):
        experts, tokens = draw(1, 12), draw(0, 500)
        cuts = torch.randint(0, tokens + 1, (experts,), generator=generator)
        if draw(0, 2):  # multiples of 64 meet chunk ends exactly
            cuts = cuts // CHUNK * CHUNK
        ends = cuts.sort().values.tolist()
        assert torch.equal(coverage(ends, tokens), expected_owner(ends, tokens)), (ends, tokens)


@pytest.mark.parametrize("experts", [1, 128, 512])
@pytest.mark.parametrize("tail", [0, 1, 63, 64, 200])
def test_bound_is_reached_and_suffices(experts, tail):
    ends = ends_of([1] * experts)  # the most partial chunks that E experts can have
    assert torch.equal(coverage(ends, experts + tail), expected_owner(ends, experts + tail))


@pytest.mark.parametrize("name", [n for n in GROUPS if n != "no_experts"])
def test_token_owners(name):
    ends = ends_of(GROUPS[name])
    tokens = ends[-1] + 5
    owners = token_owners(expert_ranges(offsets(ends), tokens), tokens)
    expected = expected_owner(ends, tokens)
    assert torch.equal(owners.live, expected >= 0)
    assert torch.equal(owners.expert[owners.live], expected[owners.live])
    token = torch.arange(tokens)
    within = token - owners.start
    assert ((within >= 0) & (within < owners.count))[owners.live].all()


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8), st.integers(0, 300), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_offsets_are_clamped_to_previous_and_tokens(values, tokens, small):
    if small:
        values = [value % 400 - 50 for value in values]
    expected, previous = [], 0
    for value in values:
        previous = max(previous, min(value, tokens))
        expected.append(previous)
    ranges = expert_ranges(offsets(values), tokens)
    assert ranges.end.tolist() == expected
    assert ranges.start.tolist() == [0, *expected[:-1]]
    assert torch.equal(coverage(values, tokens), expected_owner(expected, tokens))


def test_int64_and_strided_offsets():
    spaced = torch.tensor([3, -1, 9, -1, 9, -1], dtype=torch.int64)[::2]
    assert expert_ranges(spaced, 20).end.tolist() == [3, 9, 9]


def test_no_experts_own_nothing():
    ranges = expert_ranges(offsets([]), 10)
    assert ranges.start.shape == ranges.end.shape == (0,)
