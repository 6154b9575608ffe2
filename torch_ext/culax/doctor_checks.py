"""The doctor's checks: both ops, forward and backward, in every mode the device has, against float64."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

MODES = ("eager", "torch.compile", "CUDA graph", "graphed callables")
# Relative Frobenius error of the worst head (KDA) or expert (grouped products), rounding of the results included.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
TIMED_RUNS = 5

Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensors]


@dataclass(frozen=True)
class Check:
    """One op in one mode on one device.

    `status` is "right", "wrong", "failed" (it raised) or "not run"; `error` is the worst relative error, `ms` the
    median time, and `reason` says what went wrong, why it was not run, or what ran it.
    """

    device: str
    dtype: str
    op: str
    mode: str
    status: str
    error: float | None = None
    bound: float | None = None
    worst: str = ""
    ms: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Data:
    """Inputs of one call, the gradients of its outputs, and the float64 answers by name."""

    inputs: Tensors
    output_gradients: Tensors
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """Results of one forward and backward, and their times in ms."""

    outputs: Tensors
    gradients: Tensors
    forward_ms: float
    backward_ms: float


Runner = Callable[[Data], Outcome]


class Kda:
    """Kimi Delta Attention over packed sequences of 70, 0 and 127 tokens and three rows outside them, with a state."""

    forward_op, backward_op = "kda_fwd", "kda_bwd"
    tokens, heads, value_heads, dim = 200, 2, 4, 64
    partitions = ((0, 70, 70, 197), (0, 1, 130, 200))

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def function(self, *inputs: Tensor) -> Tensors:
        """The op's differentiable outputs."""
        return torch.ops.culax.kda_fwd(*inputs, self.dim**-0.5, True)[:2]

    def explain_inputs(self, inputs: Tensors) -> tuple[object, ...]:
        """Arguments of the backward op, which is the one whose backend is in question."""
        do, dht = inputs[2], inputs[5]
        return (do, dht, *inputs[:5], None, None, *inputs[5:], self.dim**-0.5)

    def data(self, seed: int) -> Data:
        """Unit keys and queries, gates down to -5, and the recurrence in float64 as the answer."""
        from culax.reference.kda_recurrence import kda_recurrence

        gen = torch.Generator().manual_seed(seed)
        t, h, hv, d, partition = self.tokens, self.heads, self.value_heads, self.dim, self.partitions[seed % 2]

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen)

        states = len(partition) - 1
        floats = {
            "q": F.normalize(randn(1, t, h, d), dim=-1).to(self.dtype),
            "k": F.normalize(randn(1, t, h, d), dim=-1).to(self.dtype),
            "v": randn(1, t, hv, d).to(self.dtype),
            "g": F.logsigmoid(randn(1, t, hv, d)).clamp(min=-5),
            "beta": randn(1, t, hv).sigmoid().to(self.dtype),
            "initial_state": randn(states, hv, d, d),
        }
        given = (randn(1, t, hv, d).to(self.dtype), randn(states, hv, d, d))
        cu_seqlens = torch.tensor(partition, dtype=torch.int32)
        leaves = {name: x.double().requires_grad_() for name, x in floats.items()}
        o, state = kda_recurrence(**leaves, cu_seqlens=cu_seqlens, scale=d**-0.5)
        gradients = torch.autograd.grad((o, state), tuple(leaves.values()), tuple(x.double() for x in given))
        return Data(
            tuple(x.to(self.device) for x in (*floats.values(), cu_seqlens)),
            tuple(x.to(self.device) for x in given),
            {"o": o.detach(), "final_state": state.detach()},
            {f"d{name}": x for name, x in zip(floats, gradients)},
        )

    @staticmethod
    def groups(name: str) -> int:
        """The dimension whose entries are judged one by one: the heads."""
        return 1 if name in ("final_state", "dinitial_state") else 2


class GroupedLinear:
    """A grouped linear layer with an empty expert and a capacity tail; its weight gradient is grouped_wgrad."""

    forward_op, backward_op = "grouped_mm", "grouped_wgrad"
    tokens, experts, k, n = 200, 4, 64, 96
    ends = ((60, 60, 137, 190), (1, 64, 129, 200))

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def function(self, *inputs: Tensor) -> Tensors:
        """The layer's output."""
        return (torch.ops.culax.grouped_mm(*inputs),)

    def explain_inputs(self, inputs: Tensors) -> tuple[object, ...]:
        """Arguments of the weight gradient."""
        x, _, offs = inputs
        return (x.t(), x.new_empty(self.tokens, self.n), offs)

    def data(self, seed: int) -> Data:
        """Standard normal operands, and one float64 product an expert as the answer."""
        gen = torch.Generator().manual_seed(seed)
        x = torch.randn(self.tokens, self.k, generator=gen).to(self.dtype)
        weight = torch.randn(self.experts, self.k, self.n, generator=gen).to(self.dtype)
        dy = torch.randn(self.tokens, self.n, generator=gen).to(self.dtype)
        y, dx = x.new_zeros(self.tokens, self.n, dtype=torch.float64), torch.zeros_like(x, dtype=torch.float64)
        dweight = torch.zeros_like(weight, dtype=torch.float64)
        start = 0
        for expert, end in enumerate(self.ends[seed % 2]):
            rows = slice(start, end)
            y[rows] = x[rows].double() @ weight[expert].double()
            dx[rows] = dy[rows].double() @ weight[expert].double().t()
            dweight[expert] = x[rows].double().t() @ dy[rows].double()
            start = end
        offs = torch.tensor(self.ends[seed % 2], dtype=torch.int32)
        inputs = tuple(tensor.to(self.device) for tensor in (x, weight, offs))
        return Data(inputs, (dy.to(self.device),), {"y": y}, {"dx": dx, "dweight": dweight})

    @staticmethod
    def groups(name: str) -> int:
        """The dimension whose entries are judged one by one: experts, or columns of an activation."""
        return 0 if name == "dweight" else 1


SUBJECTS: tuple[type[Kda] | type[GroupedLinear], ...] = (Kda, GroupedLinear)


class _Clock:
    """Wall time in ms of the device's work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._last = 0.0
        self.lap()

    def lap(self) -> float:
        """Time since the last lap, after everything queued has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        before, self._last = self._last, time.perf_counter()
        return 1e3 * (self._last - before)


def _leaves(inputs: Tensors) -> Tensors:
    return tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)


def _direct(function: Function, device: torch.device) -> Runner:
    def run(data: Data) -> Outcome:
        leaves = _leaves(data.inputs)
        wanted = [x for x in leaves if x.requires_grad]
        clock = _Clock(device)
        outputs = function(*leaves)
        forward_ms = clock.lap()
        gradients = torch.autograd.grad(outputs, wanted, data.output_gradients)
        backward_ms = clock.lap()
        # A graphed callable returns static buffers, which its next call overwrites.
        outputs, gradients = (tuple(x.detach().clone() for x in results) for results in (outputs, gradients))
        return Outcome(outputs, gradients, forward_ms, backward_ms)

    return run


def _captured(function: Function, example: Data, device: torch.device) -> Runner:
    """Forward and backward each in a CUDA graph; new data, offsets included, is copied into the static inputs."""
    leaves = _leaves(example.inputs)
    wanted = [x for x in leaves if x.requires_grad]
    given = tuple(x.clone() for x in example.output_gradients)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        torch.autograd.grad(function(*leaves), wanted, given)
    torch.cuda.current_stream(device).wait_stream(side)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward, stream=side):
        outputs = function(*leaves)
    with torch.cuda.graph(backward, pool=forward.pool(), stream=side):
        gradients = torch.autograd.grad(outputs, wanted, given)

    def run(data: Data) -> Outcome:
        with torch.no_grad():
            for static, new in zip((*leaves, *given), (*data.inputs, *data.output_gradients)):
                static.copy_(new)
        clock = _Clock(device)
        forward.replay()
        forward_ms = clock.lap()
        backward.replay()
        backward_ms = clock.lap()
        copies = [tuple(x.detach().clone() for x in xs) for xs in (outputs, gradients)]
        return Outcome(copies[0], copies[1], forward_ms, backward_ms)

    return run


def _why_not(mode: str, device: torch.device) -> str:
    if device.type == "cuda":
        return ""
    if mode in ("CUDA graph", "graphed callables"):
        return "CUDA graphs and make_graphed_callables need a CUDA device"
    compiler = os.environ.get("CXX", "g++")
    if mode == "torch.compile" and not any(map(shutil.which, (compiler, "g++", "clang++"))):
        return "torch.compile needs a C++ compiler on the CPU, and none is installed"
    return ""


def _runner(mode: str, function: Function, example: Data, device: torch.device) -> Runner:
    if mode == "eager":
        return _direct(function, device)
    if mode == "torch.compile":
        return _direct(cast(Function, torch.compile(function, fullgraph=True)), device)
    if mode == "CUDA graph":
        return _captured(function, example, device)
    return _direct(cast(Function, torch.cuda.make_graphed_callables(function, _leaves(example.inputs))), device)


def _worst(got: Sequence[Tensor], truth: dict[str, Tensor], groups: Callable[[str], int]) -> tuple[float, str]:
    """Largest relative Frobenius error over all groups of all tensors, and the tensor it is in."""
    worst, place = 0.0, ""
    for (name, expected), tensor in zip(truth.items(), got, strict=True):
        rest = [d for d in range(expected.dim()) if d != groups(name)]
        difference = torch.linalg.vector_norm(tensor.cpu().double() - expected, dim=rest)
        norm = torch.linalg.vector_norm(expected, dim=rest)
        errors = torch.where(difference == 0, torch.zeros_like(difference), difference / norm)
        error = torch.nan_to_num(errors, nan=torch.inf, posinf=torch.inf).max().item()
        if error >= worst:
            worst, place = error, name
    return worst, place


@dataclass(frozen=True)
class Plan:
    """One subject in one mode on one device: yields a Check of its forward op and one of its backward op."""

    subject: Kda | GroupedLinear
    mode: str

    @cached_property
    def _blank(self) -> tuple[Check, Check]:
        subject = self.subject
        dtype = str(subject.dtype).removeprefix("torch.")
        ops = (subject.forward_op, subject.backward_op)
        forward, backward = (Check(str(subject.device), dtype, op, self.mode, "not run") for op in ops)
        return forward, backward

    def run(self, data: Sequence[Data]) -> tuple[Check, Check]:
        """Run on each of `data`, judge every result, then time repeated runs. Never raises: a failure is a result."""
        subject, (forward, backward) = self.subject, self._blank
        if reason := _why_not(self.mode, subject.device):
            return replace(forward, reason=reason), replace(backward, reason=reason)
        try:
            run = _runner(self.mode, subject.function, data[0], subject.device)
            outcomes = [run(each) for each in data]
            timed = [run(data[0]) for _ in range(TIMED_RUNS)]
            reasons = self._reasons(data[0])
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            reason = f"{type(error).__name__}: {lines[0]}"
            return replace(forward, status="failed", reason=reason), replace(backward, status="failed", reason=reason)
        outputs = max(_worst(x.outputs, d.outputs, subject.groups) for x, d in zip(outcomes, data))
        gradients = max(_worst(x.gradients, d.gradients, subject.groups) for x, d in zip(outcomes, data))
        return (
            self._judge(forward, outputs, statistics.median(x.forward_ms for x in timed), reasons[0]),
            self._judge(backward, gradients, statistics.median(x.backward_ms for x in timed), reasons[1]),
        )

    def _judge(self, check: Check, worst: tuple[float, str], ms: float, reason: str) -> Check:
        bound = BOUNDS[self.subject.dtype]
        status = "right" if worst[0] <= bound else "wrong"
        return replace(check, status=status, error=worst[0], bound=bound, worst=worst[1], ms=ms, reason=reason)

    def _reasons(self, data: Data) -> tuple[str, str]:
        """What runs each op, said once: in the eager rows."""
        if self.mode != "eager":
            return "", ""
        import culax

        subject = self.subject
        forward_inputs = data.inputs + ((subject.dim**-0.5, True) if isinstance(subject, Kda) else ())
        forward = culax.explain(subject.forward_op, *forward_inputs)
        backward = culax.explain(subject.backward_op, *subject.explain_inputs(data.inputs))
        return f"{forward.backend}: {forward.reason}", f"{backward.backend}: {backward.reason}"


def devices() -> list[tuple[torch.device, torch.dtype]]:
    """What to check: the CPU in fp32, and each CUDA device in bf16."""
    found = [(torch.device("cpu"), torch.float32)]
    return found + [(torch.device("cuda", i), torch.bfloat16) for i in range(torch.cuda.device_count())]


def count() -> int:
    """Number of steps that `run` yields."""
    return len(devices()) * len(SUBJECTS) * len(MODES)


def run() -> Iterator[tuple[Check, Check]]:
    """Yield the two checks of each step: every device, subject and mode."""
    for device, dtype in devices():
        for kind in SUBJECTS:
            subject = kind(device, dtype)
            data = [subject.data(0), subject.data(1)]
            for mode in MODES:
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    yield Plan(subject, mode).run(data)
