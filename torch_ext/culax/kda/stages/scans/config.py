"""What the kernels that walk over the chunks are compiled for, and their shared memory as plain numbers."""

from dataclasses import dataclass

from culax.device.sizes import CHUNK
from culax.device.walks import Walk

WALK = {"forward": (4, 2), "reverse": (3, 1)}
"""Stages, and buffers of what goes out."""


@dataclass(frozen=True)
class ForwardConfig(Walk):
    """See Walk."""

    @property
    def stage_bytes(self) -> int:
        """-W and kg [64, K], U [64, 64] in bf16, the decay [K] in fp32."""
        return 2 * self.key_bytes + self.value_bytes + 4 * self.key_dim


@dataclass(frozen=True)
class ReverseConfig(Walk):
    """See Walk."""

    @property
    def stage_bytes(self) -> int:
        """qg, -W and kg [64, K], do and Aqk [64, 64] in bf16, the decay [K] in fp32."""
        return 3 * self.key_bytes + self.value_bytes + 2 * CHUNK * CHUNK + 4 * self.key_dim


@dataclass(frozen=True)
class ScansConfig:
    """Both walks of a call.

    key_dim, value_dim: 64 or 128 each. summary: over each sequence's first segment on either way, and summaries of the
    others. fault, poison: see Walk.
    """

    key_dim: int
    value_dim: int
    summary: bool = False
    fault: str = ""
    poison: bool = False

    def _walk(self, name: str) -> tuple[int, int, int, int, str, bool]:
        return self.key_dim, self.value_dim, *WALK[name], self.fault, self.poison

    @property
    def forward(self) -> ForwardConfig:
        """From the first chunk on."""
        return ForwardConfig(*self._walk("forward"))

    @property
    def reverse(self) -> ReverseConfig:
        """From the last chunk on."""
        return ReverseConfig(*self._walk("reverse"))

    @property
    def threads(self) -> int:
        """Of a CTA, whichever way it walks."""
        return self.forward.threads

    @property
    def smem_bytes(self) -> int:
        """What the larger of both takes."""
        return max(self.forward.smem_bytes, self.reverse.smem_bytes)

    @property
    def most_slices(self) -> int:
        """CTAs of one kind that share a segment: as many as its states have slices, or its transition."""
        return max(self.key_dim, self.value_dim) // 64
