"""What a benchmark case is: shapes, inputs, truth, cost, and the implementations that can run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

Inputs = dict[str, torch.Tensor]
Outputs = dict[str, torch.Tensor]
Call = Callable[[], Outputs]
# Binds an implementation to one set of inputs. What comes before the measured part (a forward whose backward
# is measured) happens here; the returned call is what is timed.
Prepare = Callable[[Inputs], Call]


@dataclass(frozen=True)
class Cost:
    """Work a case cannot avoid: floating-point operations of its matrix products, bytes read and written once."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Gate:
    """Outcome of the correctness check: the worst relative error, where it was, and the bound it had to meet."""

    ok: bool
    error: float
    bound: float
    worst: str


@dataclass(frozen=True)
class Peer:
    """An implementation from another project. `reason` says why it cannot run here, else it is None.

    captured: whether a CUDA graph can hold its calls.
    """

    prepare: Prepare | None
    reason: str | None = None
    captured: bool = True


class Case(Protocol):
    """One benchmark case. Implementations are keyed by name; `culax` is ours."""

    @property
    def name(self) -> str: ...

    @property
    def op(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def shape(self) -> dict[str, int | str]:
        """The numbers that define the case, as they go into the results."""

    def cost(self) -> Cost: ...

    def make_inputs(self, seed: int) -> Inputs: ...

    def truth(self, inputs: Inputs) -> Outputs:
        """The same outputs in float64."""

    def implementations(self) -> Mapping[str, Prepare | Peer]: ...

    def gate(self, outputs: Outputs, truth: Outputs) -> Gate: ...


@dataclass(frozen=True)
class Timing:
    """Medians; overhead and allocation are of the host, in wall time and in the calling thread's CPU time; peak_mib is
    memory taken during a call, its outputs among it. Fields are None where the mode was not asked for or does not exist
    on the device, or for the implementation."""

    eager_ms: float | None = None
    graph_ms: float | None = None
    kernels_ms: float | None = None
    overhead_us: float | None = None
    overhead_cpu_us: float | None = None
    allocation_us: float | None = None
    allocation_cpu_us: float | None = None
    peak_mib: float | None = None

    @property
    def best_ms(self) -> float | None:
        """The figure that shares of the roofline are taken from: inside a graph where there is one."""
        return self.graph_ms if self.graph_ms is not None else self.eager_ms
