"""What can be compiled: one Variant is one compiled entry function for one architecture."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

PLAN_MODULES = ("culax.grouped_wgrad.plan", "culax.kda.plan")


@dataclass(frozen=True)
class Variant:
    """One entry function compiled with one configuration for one architecture.

    Attributes:
        op: the operator the kernel serves, ``"grouped_wgrad"`` or ``"kda"``.
        arch: ``"sm_90a"``, ``"sm_100a"`` or ``"sm_103a"``.
        name: C symbol of the compiled function, ``[a-z][a-z0-9_]*``, unique within an architecture.
        entry: ``"package.module:function"``; ``function(config)`` returns the function to compile and fake arguments.
        config: what the entry is compiled with; hashable, picklable, with a repr that shows every field.
    """

    op: str
    arch: str
    name: str
    entry: str
    config: Hashable

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise ValueError(f"Variant: argument `name`: expected a C symbol [a-z][a-z0-9_]*, got {self.name!r}")
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.entry):
            raise ValueError(f"Variant: argument `entry`: expected 'package.module:function', got {self.entry!r}")

    def __hash__(self) -> int:
        return hash(
            self.name
        )  # every launch looks its variant up: the configuration's own hash would cost a microsecond

    @property
    def module(self) -> str:
        """Module of the entry function."""
        return self.entry.partition(":")[0]

    @property
    def kernel_set(self) -> str:
        """The package whose kernels share their sources: the entry module's package."""
        return self.module.rpartition(".")[0]


def enumerate_variants(
    arch: str, plan_modules: Iterable[str] = PLAN_MODULES, *, faults: bool = False
) -> tuple[Variant, ...]:
    """Return every variant that is built ahead of time for `arch`, in a fixed order.

    Each plan module's ``variants(arch)`` is asked; an op without a plan has none. With `faults`, what only
    tests use follows, where a plan has it: ``stage_variants(arch)``, parts of the others, and ``fault_variants(arch)``,
    fault-injection builds.

    Raises:
        ValueError: two variants share a name, or a plan returned one of another architecture.
    """
    found: list[Variant] = []
    for name in plan_modules:
        package = name.rpartition(".")[0]
        if importlib.util.find_spec(package) is None or importlib.util.find_spec(name) is None:
            continue
        plan = importlib.import_module(name)
        for function in ("variants", "stage_variants", "fault_variants") if faults else ("variants",):
            if hasattr(plan, function):
                found.extend(getattr(plan, function)(arch))
    by_name: dict[str, Variant] = {}
    for variant in found:
        if variant.arch != arch:
            raise ValueError(f"variant {variant.name}: expected arch {arch}, got {variant.arch}")
        if variant.name in by_name:
            raise ValueError(f"two variants of {arch} are named {variant.name}")
        by_name[variant.name] = variant
    return tuple(found)
