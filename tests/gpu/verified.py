"""The record of what ran on hardware: ``verified.json`` beside this file, and whether it still holds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from culax.runtime import sources
from culax.runtime.arch import ARCHS
from culax.runtime.variants import Variant, enumerate_variants

FILE = Path(__file__).with_name("verified.json")
CALLED = "kernels"
"""The property of a test's report that lists kernels, so that a run in several processes knows what it called."""


@dataclass(frozen=True)
class Verified:
    """One kernel set's last full run of tests/gpu, in which every test passed.

    Attributes:
        hash: ``sources.set_hash`` of the set's variants.
        variants: how many variants the set has.
        called: how many of them the run called.
        device, driver, torch, dsl, tvm_ffi: of the run; dsl is the compiler the kernels were built with.
        date: of the run, ISO.
        passed, skipped: tests of the run.
    """

    hash: str
    variants: int
    called: int
    device: str
    driver: str
    torch: str
    dsl: str
    tvm_ffi: str
    date: str
    passed: int
    skipped: int


@dataclass(frozen=True)
class Record:
    """Verified sets, and those that aren't with the reason; keys are ``arch/package``."""

    verified: dict[str, Verified] = field(default_factory=dict)
    unverified: dict[str, str] = field(default_factory=dict)


def read(file: Path = FILE) -> Record:
    """Read the record."""
    content = json.loads(file.read_text())
    return Record({key: Verified(**fields) for key, fields in content["verified"].items()}, content["unverified"])


def write(record: Record, file: Path = FILE) -> None:
    """Write the record, sorted."""
    content = {
        "verified": {key: asdict(record.verified[key]) for key in sorted(record.verified)},
        "unverified": {key: record.unverified[key] for key in sorted(record.unverified)},
    }
    file.write_text(json.dumps(content, indent=1) + "\n")


def kernel_sets(archs: Iterable[str] = ARCHS) -> dict[str, tuple[Variant, ...]]:
    """Variants of every kernel set, by ``arch/package``."""
    found: dict[str, list[Variant]] = {}
    for arch in archs:
        for variant in enumerate_variants(arch):
            found.setdefault(f"{arch}/{variant.kernel_set}", []).append(variant)
    return {key: tuple(variants) for key, variants in found.items()}


def problems(record: Record, sets: Mapping[str, tuple[Variant, ...]], dsl: str) -> list[str]:
    """What is wrong with the record for these kernel sets, compiled by version `dsl`: [] if it holds."""
    found = []
    for key, variants in sets.items():
        entry, reason = record.verified.get(key), record.unverified.get(key)
        if reason is not None and not reason.strip():
            found.append(f"{key} is listed as unverified without a reason")
        if reason is None and entry is None:
            found.append(f"{key} is neither verified nor listed as unverified")
        if reason is None and entry is not None and entry.hash != sources.set_hash(variants, dsl):
            found.append(f"{key} was verified with other sources, or another compiler: run make gpu-test")
    found.extend(
        f"{key} is in the record but not a kernel set"
        for key in sorted({*record.verified, *record.unverified} - {*sets})
    )
    return found


def mark_unverified(record: Record, sets: Mapping[str, tuple[Variant, ...]], dsl: str, reason: str) -> Record:
    """List every set whose record doesn't hold as unverified for `reason`; keep reasons given before, drop old keys."""
    unverified = {key: text for key, text in record.unverified.items() if key in sets}
    for key, variants in sets.items():
        entry = record.verified.get(key)
        if entry is None or entry.hash != sources.set_hash(variants, dsl):
            unverified.setdefault(key, reason)
        else:
            unverified.pop(key, None)
    return Record({key: entry for key, entry in record.verified.items() if key in sets}, unverified)
