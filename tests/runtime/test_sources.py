from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from culax.runtime import sources

STAGE = "stages/scale/kernel.py"
VERSION = "4.8.1"


def _hash(variant) -> str:
    sources.forget()
    return sources.source_hash(variant, VERSION)


def test_hash_is_stable_and_distinguishes_variants(sample) -> None:
    first, second = sample.variants
    assert _hash(first) == _hash(first)
    assert _hash(first) != _hash(second)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (STAGE, "scaled(x[i], s)", "scaled(s, x[i])"),
        ("stages/scale/config.py", "shift: int = 0", "shift: int = 1"),
        ("device/math.py", "value * factor", "factor * value"),
        ("device/__init__.py", "share", "all share"),
    ],
    ids=["kernel", "config", "device", "device-package"],
)
def test_hash_changes_with_what_the_kernel_is_made_of(sample, file: str, old: str, new: str) -> None:
    before = _hash(sample.variants[0])
    sample.edit(file, old, new)
    assert _hash(sample.variants[0]) != before


@pytest.mark.parametrize(
    ("file", "text"),
    [("plan.py", ""), ("__init__.py", "x = 1\n"), ("device/other.py", "y = 1\n"), ("stages/__init__.py", "w = 1\n")],
)
def test_hash_ignores_what_the_kernel_does_not_import(sample, file: str, text: str) -> None:
    before = _hash(sample.variants[0])
    path: Path = sample.folder / file
    path.write_text((path.read_text() if path.exists() else "") + "\n" + text)
    assert _hash(sample.variants[0]) == before


@pytest.mark.parametrize(
    "line",
    [
        "from {name}.device import other",
        "from {name}.device.other import anything",
        "import {name}.device.other",
        "from ...device import other",
        "def late():\n    from {name}.device import other",
    ],
)
def test_every_form_of_import_is_followed(sample, line: str) -> None:
    (sample.folder / "device" / "other.py").write_text("from . import deeper\n")
    (sample.folder / "device" / "deeper.py").write_text("z = 1\n")
    kernel = sample.folder / STAGE
    kernel.write_text(kernel.read_text() + "\n\n" + line.format(name=sample.name) + "\n")
    names = sources.source_files(sample.variants[0].kernel_set)
    assert {f"{sample.name}.device.other", f"{sample.name}.device.deeper"} <= names.keys()
    before = _hash(sample.variants[0])
    (sample.folder / "device" / "deeper.py").write_text("z = 2\n")
    assert _hash(sample.variants[0]) != before


def test_a_file_of_the_stage_counts_without_being_imported(sample) -> None:
    before = _hash(sample.variants[0])
    (sample.folder / "stages" / "scale" / "extra.py").write_text("")
    assert _hash(sample.variants[0]) != before


def test_hash_changes_with_config_compiler_and_options(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = sample.variants[0]
    known = {_hash(variant), sources.source_hash(variant, "4.8.2")}
    changed = dataclasses.replace(variant, config=dataclasses.replace(variant.config, shift=1))
    known.add(_hash(changed))
    monkeypatch.setattr(sources, "OPTIONS", sources.OPTIONS + " --opt-level 2")
    known.add(_hash(variant))
    assert len(known) == 4


def test_hash_does_not_depend_on_where_the_package_lies(sample, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _hash(sample.variants[0])
    moved = sample.folder.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(sources, "_root", lambda top: moved)
    assert _hash(sample.variants[0]) == before


def test_set_hash_covers_every_variant_in_any_order(sample) -> None:
    first, second = sample.variants
    sources.forget()
    both = sources.set_hash((first, second), VERSION)
    assert both == sources.set_hash((second, first), VERSION)
    assert both != sources.set_hash((first,), VERSION)
    assert both != sources.set_hash((first, second), "4.8.2")


def test_an_unknown_kernel_set_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="culax.no_such_stage"):
        sources.source_files("culax.no_such_stage")
