from __future__ import annotations

import sys
from types import ModuleType

import pytest

from culax.runtime.arch import ARCHS
from culax.runtime.variants import Variant, enumerate_variants


def _variant(name: str, arch: str = "sm_90a") -> Variant:
    return Variant("op", arch, name, "package.stages.one.kernel:entry", 0)


def _plan(monkeypatch: pytest.MonkeyPatch, **functions: object) -> str:
    package, plan = ModuleType("made_up"), ModuleType("made_up.plan")
    package.__path__ = []
    for module in (package, plan):
        module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, function in functions.items():
        setattr(plan, name, function)
    return "made_up.plan"


@pytest.mark.parametrize("arch", ARCHS)
def test_every_variant_of_the_package_is_well_formed(arch: str) -> None:
    variants = enumerate_variants(arch, faults=True)
    assert len({variant.name for variant in variants}) == len(variants)
    assert all(variant.arch == arch and hash(variant) is not None for variant in variants)
    assert all(variant.kernel_set.startswith(f"culax.{variant.op}.stages.") for variant in variants)


def test_fault_variants_are_left_out_unless_asked_for() -> None:
    for arch in ARCHS:
        shipped = enumerate_variants(arch)
        assert not [variant for variant in shipped if getattr(variant.config, "fault", "")]
        assert enumerate_variants(arch, faults=True)[: len(shipped)] == shipped or set(shipped) <= set(
            enumerate_variants(arch, faults=True)
        )


def test_an_op_without_a_plan_has_no_variants() -> None:
    assert enumerate_variants("sm_90a", ["culax.no_such_op.plan", "culax.runtime.no_such_plan"]) == ()


def test_order_is_the_plan_s(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(monkeypatch, variants=lambda arch: (_variant("b"), _variant("a")))
    assert [variant.name for variant in enumerate_variants("sm_90a", [plan])] == ["b", "a"]


def test_fault_variants_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(monkeypatch, variants=lambda arch: (_variant("b"),), fault_variants=lambda arch: (_variant("a"),))
    assert [variant.name for variant in enumerate_variants("sm_90a", [plan], faults=True)] == ["b", "a"]
    assert [variant.name for variant in enumerate_variants("sm_90a", [plan])] == ["b"]


def test_two_variants_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(monkeypatch, variants=lambda arch: (_variant("a"), _variant("a")))
    with pytest.raises(ValueError, match="two variants of sm_90a are named a"):
        enumerate_variants("sm_90a", [plan])


def test_a_variant_of_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(monkeypatch, variants=lambda arch: (_variant("a", "sm_100a"),))
    with pytest.raises(ValueError, match="variant a: expected arch sm_90a, got sm_100a"):
        enumerate_variants("sm_90a", [plan])


@pytest.mark.parametrize("name", ["", "A", "1a", "a-b", "a.b", "a b"])
def test_names_are_c_symbols(name: str) -> None:
    with pytest.raises(ValueError, match="argument `name`"):
        _variant(name)


@pytest.mark.parametrize("entry", ["module", "module:", ":entry", "module:a.b", "a b:c"])
def test_entries_name_a_function(entry: str) -> None:
    with pytest.raises(ValueError, match="argument `entry`"):
        Variant("op", "sm_90a", "a", entry, 0)


def test_kernel_set_is_the_entry_s_package() -> None:
    assert _variant("a").kernel_set == "package.stages.one"
