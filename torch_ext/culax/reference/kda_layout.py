"""Chunk layout of the chunked KDA path: [B, T, H, ...] tokens to and from [NT, HV, C, ...] chunks of one sequence each.

Whole sequences are laid out by views, packed ones by tables from device-side integer arithmetic: nothing is read back
from the device, and all of it is legal inside a CUDA graph capture. For N packed sequences NT is the bound
ceil(T / C) + N that shapes alone give; the surplus chunks at the end are empty.
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
    """Where packed sequences lie. N is the number of sequences; chunk ids beyond the last sequence are surplus.

    token: [NT, C] token of each chunk row (clamped where invalid). valid: [NT, C] whether the row holds one.
    chunk, row: [T] position of each token (arbitrary where not covered). covered: [T] whether a sequence holds it.
    owner: [NT] sequence of each chunk (the last one for surplus chunks). starts, ends: [NT] whether the chunk is the
    first or the last of its sequence (surplus chunks are both). first, last: [N] chunk ids (arbitrary for empty
    sequences). empty: [N] whether the sequence has no rows.
    """

    token: Tensor
    valid: Tensor
    chunk: Tensor
    row: Tensor
    covered: Tensor
    owner: Tensor
    starts: Tensor
    ends: Tensor
    first: Tensor
    last: Tensor
    empty: Tensor


@dataclass(frozen=True)
class ChunkTable:
    """Where the chunks of [batch, tokens, ...] lie: of each batch entry, or of packed sequences in the only one.

    The scans see NT as lanes x steps: B lanes of ceil(T / C) steps, or for packed sequences one lane of NT steps.
    """

    tokens: int
    lanes: int
    steps: int
    packing: Packing | None

    def gather(self, x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        """[B, T, H, ...] of any strides to contiguous [NT, heads, C, ...] in ``dtype``; invalid rows are zero."""
        if self.packing is None:
            rest = x.shape[3:]
            missing = self.steps * CHUNK - self.tokens
            if missing:
                x = torch.nn.functional.pad(x, (0, 0) * (len(rest) + 1) + (0, missing))
            y = x.unflatten(1, (self.steps, CHUNK)).transpose(2, 3)[:, :, :, None]
            y = y.expand(-1, -1, -1, heads // x.shape[2], *y.shape[4:])
            return y.to(dtype).reshape(self.lanes * self.steps, heads, CHUNK, *rest).contiguous()
        head = torch.arange(heads, device=x.device) // (heads // x.shape[2])
        y = x[0][self.packing.token[:, None, :], head[None, :, None]].to(dtype)
        mask = self.packing.valid[:, None, :].reshape(-1, 1, CHUNK, *[1] * (x.dim() - 3))
        return torch.where(mask, y, y.new_zeros(()))

    def scatter(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """[NT, H, C, ...] back to contiguous [B, T, H, ...] in ``dtype``; tokens of no sequence are zero."""
        if self.packing is None:
            x = y.to(dtype).unflatten(0, (self.lanes, self.steps)).transpose(2, 3).flatten(1, 2)
            # contiguous() would keep the strides of dimensions of size one, the batch's padded one among them.
            return x[:, : self.tokens].clone(memory_format=torch.contiguous_format)
        if y.shape[0] == 0:
            return y.new_zeros(1, self.tokens, y.shape[1], *y.shape[3:], dtype=dtype)
        head = torch.arange(y.shape[1], device=y.device)
        x = y.to(dtype)[self.packing.chunk[:, None], head, self.packing.row[:, None]]
        mask = self.packing.covered.reshape(-1, *[1] * (x.dim() - 1))
        return torch.where(mask, x, x.new_zeros(()))[None]

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


def chunk_table(batch: int, tokens: int, cu_seqlens: Tensor | None) -> ChunkTable:
    """The table of ``batch`` sequences of ``tokens`` rows, or of the sequences that ``cu_seqlens`` [N + 1] packs."""
    if cu_seqlens is not None:
        return _packed(tokens, cu_seqlens)
    return ChunkTable(tokens=tokens, lanes=batch, steps=-(-tokens // CHUNK), packing=None)


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
        tokens=tokens,
        lanes=1,
        steps=count,
        packing=Packing(
            token=token.clamp(0, max(tokens - 1, 0)),
            valid=valid,
            chunk=chunk,
            row=within % CHUNK,
            covered=covered,
            owner=owner,
            starts=(chunk_id == first[owner]) | surplus,
            ends=(chunk_id == last[owner]) | surplus,
            first=first,
            last=last,
            empty=chunks == 0,
        ),
    )
