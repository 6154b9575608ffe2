"""What one KDA call asks for: pure metadata, hashable, the input of dispatch and of the kernel plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

CHUNK = 64


@dataclass(frozen=True)
class KdaProblem:
    """Sizes and dtypes of one call of ``op`` (``kda_fwd``, ``kda_bwd`` or ``_kda_bwd_bwd``).

    ``sequences`` is the number N of sequences: the batch, or the entries of cu_seqlens less one when ``varlen``.
    """

    family: ClassVar[str] = "kda"

    op: str
    batch: int
    tokens: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    sequences: int
    varlen: bool
    dtype: torch.dtype
    gate_dtype: torch.dtype
    beta_dtype: torch.dtype
    state_dtype: torch.dtype
    device_type: str

    @property
    def chunks(self) -> int:
        """The number of 64-token chunks, bounded from shapes alone (a varlen call may leave some empty)."""
        full = -(-self.tokens // CHUNK)
        return full + self.sequences if self.varlen else full * self.batch
