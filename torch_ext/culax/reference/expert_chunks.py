"""Device-side bookkeeping for groups of tokens: who owns a token, and which chunks of 64 tokens cover all groups.

Everything here is arithmetic on the offsets' own device. Shapes depend on shapes alone, so nothing waits for the
device and a captured CUDA graph honours offsets that are rewritten before a replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64


@dataclass(frozen=True)
class Experts:
    """Token ranges of E experts, int64 [E] each: expert e owns tokens start[e] .. end[e] - 1."""

    start: Tensor
    end: Tensor

    @property
    def count(self) -> Tensor:
        """Tokens of each expert, k_e, int64 [E]."""
        return self.end - self.start


@dataclass(frozen=True)
class Tokens:
    """The owner of each of T tokens: its expert's index, first token and token count, int64 [T]; live is bool [T].

    A token past the last expert's end is not live; its other fields then describe the last expert.
    """

    expert: Tensor
    start: Tensor
    count: Tensor
    live: Tensor


@dataclass(frozen=True)
class Chunks:
    """At most 64 tokens of one expert each: expert, first token, number of tokens (0: surplus chunk), int64 [NC]."""

    expert: Tensor
    first: Tensor
    length: Tensor


def expert_ranges(offs: Tensor, tokens: int) -> Experts:
    """Token ranges from end offsets [E] (int32 or int64), each clamped to [previous end, tokens]."""
    if offs.numel() == 0:
        empty = offs.to(torch.int64)
        return Experts(empty, empty)
    end = offs.to(torch.int64).clamp(0, tokens).cummax(0).values
    start = torch.cat((torch.zeros_like(end[:1]), end[:-1]))
    return Experts(start, end)


def token_owners(experts: Experts, tokens: int) -> Tokens:
    """The owner of each token, for E >= 1 experts. Empty experts own nothing."""
    token = torch.arange(tokens, device=experts.end.device)
    expert = torch.searchsorted(experts.end, token, right=True).clamp(max=experts.end.numel() - 1)
    return Tokens(expert, experts.start[expert], experts.count[expert], token < experts.end[-1:])


def chunk_count(tokens: int, experts: int) -> int:
    """NC = ceil(T / 64) + E, the bound from shapes alone: a partial chunk an expert is all that is ever wasted."""
    return -(-tokens // CHUNK) + experts


def chunk_table(experts: Experts, tokens: int) -> Chunks:
    """Covers every owned token exactly once by NC chunks, in token order, for E >= 1 experts.

    Chunk j belongs to the first expert whose cumulated chunk count passes j; chunks past the last are empty.
    """
    number = experts.end.numel()
    chunks = (experts.count + (CHUNK - 1)) // CHUNK
    cumulated = chunks.cumsum(0)
    index = torch.arange(chunk_count(tokens, number), device=chunks.device)
    expert = torch.searchsorted(cumulated, index, right=True).clamp(max=number - 1)
    within = (index - (cumulated - chunks)[expert]) * CHUNK
    length = (experts.count[expert] - within).clamp(0, CHUNK)
    return Chunks(expert, experts.start[expert] + within, length)
