"""``culax.explain``: what would run for given inputs, and why; ``culax.warmup``: make it ready."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import dispatch, ops
from .grouped_wgrad import checks as grouped_checks
from .kda import checks as kda_checks

Op = str | torch._ops.OpOverload | torch._ops.OpOverloadPacket

_BUILD: dict[str, Callable[[str, tuple], dispatch.Problem]] = {
    **dict.fromkeys(kda_checks.VALIDATORS, kda_checks.build),
    **dict.fromkeys(("grouped_wgrad", "grouped_wgrad_out", "grouped_wgrad_out_list"), grouped_checks.build_wgrad),
    "grouped_mm": grouped_checks.build_mm,
}


@dataclass(frozen=True)
class Explanation:
    """What runs an op for given inputs.

    Attributes:
        op: the op's name.
        backend: ``"reference"`` (plain torch), ``"torch"`` (a product of torch's own), ``"cutedsl"`` (our kernels).
        variant: names of the kernels, joined by ``", "``; empty where no kernel runs.
        built: ``"built"`` (compiled ahead of time), ``"jit"`` (compiled at first use) or empty.
        reason: one sentence on why.
    """

    op: str
    backend: str
    variant: str
    built: str
    reason: str

    def __str__(self) -> str:
        kernels = f" [{self.variant}; {self.built}]" if self.variant else ""
        return f"culax::{self.op} -> {self.backend}{kernels}: {self.reason}"


def _name(op: Op) -> str:
    text = op if isinstance(op, str) else str(op)
    name = text.removeprefix("torch.ops.").replace("::", ".").removeprefix("culax.").removesuffix(".default")
    if name not in _BUILD:
        raise ValueError(f"explain: argument `op`: expected one of {', '.join(sorted(_BUILD))}, got {text!r}")
    return name


def _bind(name: str, inputs: tuple, others: dict[str, Any]) -> tuple:
    """Arguments in schema order; optional tensors left out are None, other arguments left out take their default."""
    schema = ops.overload(name)._schema
    fallback = {"scale": 1.0, "output_final_state": False}
    names = [argument.name for argument in schema.arguments]
    if len(inputs) > len(names) or not set(others) <= set(names[len(inputs) :]):
        got = f"{len(inputs)} by position and {sorted(others)}"
        raise ValueError(f"explain: arguments of {name}: expected ({', '.join(names)}), got {got}")
    bound = list(inputs)
    for argument in schema.arguments[len(inputs) :]:
        if argument.name in others:
            bound.append(others[argument.name])
        elif argument.has_default_value():
            bound.append(argument.default_value)
        elif isinstance(argument.type, torch.OptionalType):
            bound.append(None)
        elif argument.name in fallback:
            bound.append(fallback[argument.name])
        else:
            raise ValueError(f"explain: argument `{argument.name}`: expected a value for {name}, got none")
    return tuple(bound)


def _device(arguments: tuple) -> torch.device:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument.device
    raise ValueError("explain: arguments: expected at least one tensor, got none")


def _choose(name: str, inputs: tuple, others: dict[str, Any]) -> tuple[dispatch.Choice, torch.device]:
    arguments = _bind(name, inputs, others)
    device = _device(arguments)
    problem: Any = _BUILD[name](name, arguments)
    if device.type == "meta":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        problem = replace(problem, device_type=device.type)
    return dispatch.choose(problem, device), device


def _explanation(name: str, choice: dispatch.Choice) -> Explanation:
    names = ", ".join(variant.name for variant in dispatch.variants(choice.plan)) if choice.plan else ""
    return Explanation(name, choice.backend, names, choice.built, choice.reason)


def explain(op: Op, *inputs: Any, **others: Any) -> Explanation:
    """Say what would run ``op`` for ``inputs``, without running or compiling anything.

    Args:
        op: ``"kda_bwd"``, ``"culax::kda_bwd"``, ``torch.ops.culax.kda_bwd`` or its overload.
        inputs, others: the op's arguments by position and by name. Optional tensors may be left out. Meta tensors
            stand for tensors on the current CUDA device, or on the CPU where there is none.

    Raises:
        ValueError: an unknown op, or arguments the op itself would refuse.
    """
    name = _name(op)
    return _explanation(name, _choose(name, inputs, others)[0])


def warmup(op: Op, *example_inputs: Any, **others: Any) -> Explanation:
    """Load or build the kernels that ``op`` needs for such inputs, so that a CUDA graph capture finds them ready.

    Takes the arguments of :func:`explain` and returns what it returns. Where plain torch runs the op on CUDA, cuBLAS is
    made ready: its first call may not fall into a capture either.

    Raises:
        ValueError: an unknown op, or arguments the op itself would refuse.
        NotImplementedError: a kernel that is neither built nor can be compiled here.
    """
    name = _name(op)
    choice, device = _choose(name, example_inputs, others)
    if choice.backend == "cutedsl":
        family = "kda" if name in kda_checks.VALIDATORS else "grouped_wgrad"
        importlib.import_module(f"culax.{family}.launch").warm(choice.plan, device)
    elif device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.current_blas_handle()
    return _explanation(name, choice)
