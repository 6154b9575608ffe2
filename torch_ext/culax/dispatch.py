"""From a problem and a device to the code that runs it, with a reason a user can read."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch


class Problem(Protocol):
    """What all problems have: the package that plans them, and where their tensors are."""

    family: ClassVar[str]

    @property
    def device_type(self) -> str: ...


@dataclass(frozen=True)
class Choice:
    """What runs a problem.

    ``backend`` is ``"reference"`` (culax's own path in plain torch), ``"torch"`` (a product of torch itself) or
    ``"cutedsl"`` (culax's kernels, described by ``plan``). ``built`` says where the kernels come from: ``"built"``
    (compiled ahead of time), ``"jit"`` (compiled at first use), or ``""`` where there are none.
    """

    backend: str
    reason: str
    plan: Any = None
    built: str = ""


def choose(problem: Problem, device: torch.device) -> Choice:
    """Choose the backend for ``problem`` on ``device``. Never compiles, never synchronises."""
    if device.type != "cuda":
        return Choice("reference", f"tensors on {device.type} take the torch path; kernels need a CUDA device")
    if problem.family == "grouped_mm":
        return _choose_product(problem, device)
    return _choose_kernel(problem, device)


def variants(plan: Any) -> tuple[Any, ...]:
    """The runtime variants a plan launches: its ``variants``, or its one ``variant``."""
    return tuple(plan.variants) if hasattr(plan, "variants") else (plan.variant,)


def _choose_kernel(problem: Problem, device: torch.device) -> Choice:
    from .runtime import arch, load

    architecture = arch.arch_of(device)
    if architecture is None:
        major, minor = torch.cuda.get_device_capability(device)
        return Choice("reference", f"compute capability {major}.{minor}: kernels are made for 9.0")
    name = f"culax.{problem.family}.plan"
    if importlib.util.find_spec(name) is None:
        return Choice("reference", "this release has no CUDA kernel for this op")
    plan = importlib.import_module(name).plan(problem, architecture)
    if isinstance(plan, str):
        return Choice("reference", plan)
    origins = []
    for variant in variants(plan):
        available = load.availability(variant)
        if available.how is None:
            return Choice("reference", available.reason)
        origins.append(available.how)
    built = "built" if all(how == "built" for how in origins) else "jit"
    return Choice("cutedsl", f"{architecture} kernel", plan, built)


def _choose_product(problem: Any, device: torch.device) -> Choice:
    refusal = problem.refused_by_torch(torch.cuda.get_device_capability(device))
    if refusal:
        return Choice("reference", refusal)
    return Choice("torch", "bfloat16 on compute capability 9.0 or later, 16-byte strides")


_prepared: dict[tuple, tuple[Any, Choice]] = {}
REMEMBERED = 4096
"""The most call signatures kept; all are dropped when one more comes."""


def keep(known: dict[tuple, Any], key: tuple, value: Any) -> None:
    """Add a signature to what is known of signatures."""
    if len(known) >= REMEMBERED:
        known.clear()
    known[key] = value


def prepare(
    op: str, signature: tuple, build: Callable[[str, tuple], Problem], arguments: tuple, device: torch.device
) -> tuple[Any, Choice]:
    """The checked problem of a call and the backend chosen for it, remembered by the call's signature."""
    key = (op, signature)
    found = _prepared.get(key)
    if found is None:
        problem = build(op, arguments)
        found = problem, choose(problem, device)
        keep(_prepared, key, found)
    return found
