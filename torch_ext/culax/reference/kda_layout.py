"""Chunk layout of the chunked KDA path: [B, T, H, ...] tokens to and from [NT, HV, C, ...] chunks of one sequence each.

All tables come from shapes and device-side integer arithmetic, so building and using them reads nothing back from the
device and is legal inside a CUDA graph capture. For N packed sequences NT is the bound ceil(T / C) + N that shapes
alone give; the surplus chunks at the end are empty.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64


@dataclass(frozen=True)
class Edge:
    """Where ``mask`` [] is true a scan drops what it carries for ``state`` [1, HV, K, V]."""

    mask: Tensor
    state: Tensor

    def reset(self, carried: Tensor) -> Tensor:
        return torch.where(self.mask, self.state, carried)


@dataclass(frozen=True)
class Packing:
    """What only packed sequences need. N is the number of sequences; chunk ids beyond the last sequence are surplus.

    owner: [NT] sequence of each chunk (the last one for surplus chunks). starts, ends: [NT] whether the chunk is the
    first or the last of its sequence (surplus chunks are both). first, last: [N] chunk ids (arbitrary for empty
    sequences). empty: [N] whether the sequence has no rows. covered: [T] whether a sequence holds the token.
    """

    owner: Tensor
    starts: Tensor
    ends: Tensor
    first: Tensor
    last: Tensor
    empty: Tensor
    covered: Tensor


@dataclass(frozen=True)
class ChunkTable:
    """Which token each chunk row holds, and where each token went.

    token: [NT, C] row of the token in its batch entry (clamped where invalid). batch: [NT]. valid: [NT, C], or None
    when shapes alone say that every row is valid. chunk, row: [B, T] position of each token.
    The scans see NT as lanes x steps: B lanes of ceil(T / C) steps, or for packed sequences one lane of NT steps.
    """

    batch: Tensor
    token: Tensor
    valid: Tensor | None
    chunk: Tensor
    row: Tensor
    lanes: int
    steps: int
    packing: Packing | None

    def gather(self, x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        """[B, T, H, ...] of any strides to contiguous [NT, heads, C, ...] in ``dtype``; invalid rows are zero."""
        head = torch.arange(heads, device=x.device) // (heads // x.shape[2])
        y = x[self.batch[:, None, None], self.token[:, None, :], head[None, :, None]].to(dtype)
        if self.valid is None:
            return y
        mask = self.valid[:, None, :].reshape(-1, 1, CHUNK, *[1] * (x.dim() - 3))
        return torch.where(mask, y, y.new_zeros(()))

    def scatter(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """[NT, H, C, ...] back to contiguous [B, T, H, ...] in ``dtype``; tokens of no sequence are zero."""
        if y.shape[0] == 0:
            return y.new_zeros(*self.chunk.shape, y.shape[1], *y.shape[3:], dtype=dtype)
        head = torch.arange(y.shape[1], device=y.device)
        x = y.to(dtype)[self.chunk[:, :, None], head, self.row[:, :, None]]
        if self.packing is None:
            return x
        mask = self.packing.covered.reshape(1, -1, *[1] * (x.dim() - 2))
        return torch.where(mask, x, x.new_zeros(()))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """[NT, ...] to the chunks [lanes, ...] that a scan visits together, one entry a step."""
        return x.unflatten(0, (self.lanes, self.steps)).unbind(1)

    def join(self, chunks: list[Tensor], like: Tensor) -> Tensor:
        """The inverse of ``split``; the shape behind NT is that of ``like``."""
        return torch.stack(chunks, 1).flatten(0, 1) if chunks else like.new_zeros(0, *like.shape[1:])

    def enter(self, boundary: Tensor, *, reverse: bool = False) -> tuple[Tensor, list[Edge | None]]:
        """The state [lanes, HV, K, V] a scan starts from, and for each step where it starts anew.

        boundary: [N, HV, K, V], the state each sequence starts from (ends with, if ``reverse``).
        """
        if self.packing is None:
            return boundary, [None] * self.steps
        if not self.steps:
            return boundary, []
        states = boundary.index_select(0, self.packing.owner).split(1)
        masks = (self.packing.ends if reverse else self.packing.starts).unbind()
        return states[0], [Edge(mask, state) for mask, state in zip(masks, states, strict=True)]

    def leave(self, carried: Tensor, after: list[Tensor], boundary: Tensor, *, reverse: bool = False) -> Tensor:
        """The state [N, HV, K, V] each sequence ends with; ``after`` holds the state behind each step of the scan."""
        if self.packing is None or not after:
            return carried
        step = self.steps - 1 - self.packing.first if reverse else self.packing.last
        ended = torch.cat(after).index_select(0, step.clamp(0, self.steps - 1))
        return torch.where(self.packing.empty[:, None, None, None], boundary, ended)


def chunk_table(batch: int, tokens: int, cu_seqlens: Tensor | None, device: torch.device) -> ChunkTable:
    """The table of ``batch`` sequences of ``tokens`` rows, or of the sequences that ``cu_seqlens`` [N + 1] packs."""
    if cu_seqlens is not None:
        return _packed(tokens, cu_seqlens)
    steps = -(-tokens // CHUNK)
    chunk_id = torch.arange(batch * steps, device=device)
    within = chunk_id % steps if steps else chunk_id
    token = within[:, None] * CHUNK + torch.arange(CHUNK, device=device)
    t = torch.arange(tokens, device=device)
    chunk = torch.arange(batch, device=device)[:, None] * steps + t // CHUNK
    return ChunkTable(
        batch=chunk_id // steps if steps else chunk_id,
        token=token.clamp(max=tokens - 1),
        valid=None if tokens % CHUNK == 0 else token < tokens,
        chunk=chunk,
        row=(t % CHUNK).expand(batch, tokens),
        lanes=batch,
        steps=steps,
        packing=None,
    )


def _packed(tokens: int, cu_seqlens: Tensor) -> ChunkTable:
    sequences, device = cu_seqlens.shape[0] - 1, cu_seqlens.device
    count = -(-tokens // CHUNK) + sequences if tokens and sequences else 0
    # Offsets that descend or pass T cannot be seen without a sync: clamp them to [previous, T].
    bounds = cu_seqlens.long().clamp(0, tokens).cummax(0).values
    chunks = (bounds.diff() + CHUNK - 1) // CHUNK
    stops = chunks.cumsum(0)
    first, last = stops - chunks, stops - 1

    chunk_id = torch.arange(count, device=device)
    sequence = torch.searchsorted(stops, chunk_id, right=True)
    surplus, owner = sequence == sequences, sequence.clamp(max=max(sequences - 1, 0))
    token = (bounds[owner] + (chunk_id - first[owner]) * CHUNK)[:, None] + torch.arange(CHUNK, device=device)
    valid = (token < bounds[owner + 1][:, None]) & ~surplus[:, None]

    t = torch.arange(tokens, device=device)
    covered = (t >= bounds[0]) & (t < bounds[-1])
    if sequences:
        holder = torch.searchsorted(bounds[1:], t, right=True).clamp(max=sequences - 1)
        within = torch.where(covered, t - bounds[holder], 0)
        chunk = torch.where(covered, first[holder] + within // CHUNK, 0)
    else:
        within = chunk = torch.zeros_like(t)
    return ChunkTable(
        batch=torch.zeros_like(chunk_id),
        token=token.clamp(0, max(tokens - 1, 0)),
        valid=valid,
        chunk=chunk[None],
        row=(within % CHUNK)[None],
        lanes=1,
        steps=count,
        packing=Packing(
            owner=owner,
            starts=(chunk_id == first[owner]) | surplus,
            ends=(chunk_id == last[owner]) | surplus,
            first=first,
            last=last,
            empty=chunks == 0,
            covered=covered,
        ),
    )
