"""A sample op of two variants: its package on the path, built once, and copies of it that a test may edit."""

from __future__ import annotations

import importlib
import itertools
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from culax.runtime import build
from culax.runtime.variants import Variant

HERE = Path(__file__).resolve().parent
ARCH = "sm_90a"
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))
_numbers = itertools.count()


@dataclass(frozen=True)
class Sample:
    """A copy of the sample op under a name of its own."""

    name: str
    folder: Path
    variants: tuple[Variant, ...]

    @property
    def plan(self) -> str:
        return f"{self.name}.plan"

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.folder / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


def _copy(folder: Path) -> Sample:
    name = f"sample_copy_{next(_numbers)}"
    target = folder / name
    shutil.copytree(HERE / "sample_op", target, ignore=shutil.ignore_patterns("__pycache__"))
    for file in target.rglob("*.py"):
        file.write_text(file.read_text().replace("sample_op", name))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    plan: ModuleType = importlib.import_module(f"{name}.plan")
    return Sample(name, target, plan.variants(ARCH))


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sample:
    """A copy of the sample op that the test may edit; nothing built."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    return _copy(tmp_path)


@dataclass(frozen=True)
class Built:
    """Variants of the sample op and the folder (one subfolder an architecture) they are built in."""

    variants: tuple[Variant, ...]
    folder: Path


@pytest.fixture(scope="session")
def shared_built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    variants = importlib.import_module("sample_op.plan").variants(ARCH)
    folder = tmp_path_factory.mktemp("aot")
    report = build.build(variants, folder / ARCH)
    assert report.failed == {}
    assert report.built == tuple(variant.name for variant in variants)
    return Built(variants, folder)


@pytest.fixture
def built(shared_built: Built, tmp_path: Path) -> Built:
    """The built sample op in a folder of the test's own."""
    shutil.copytree(shared_built.folder, tmp_path / "aot")
    return Built(shared_built.variants, tmp_path / "aot")
