"""The record beside built kernels: what each library was built from, so that a stale or damaged one is never used."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from culax.runtime import library, sources
from culax.runtime.variants import Variant

_FILE = "manifest.json"
_SCHEMA = 1


@dataclass(frozen=True)
class Entry:
    """One built variant.

    Attributes:
        op, entry, config: the variant's own fields; config as text.
        source_hash: ``sources.source_hash`` of the variant when it was built.
        dsl: version of the kernel compiler.
        tvm_ffi: version of tvm-ffi linked to.
        symbol: name of the function in the library.
        file: library's file name, in the manifest's folder.
        sha256: of the library.
        launch_smem: dynamic shared memory of each launch in bytes; None where known only at run time.
        seconds: compile time.
    """

    op: str
    entry: str
    config: str
    source_hash: str
    dsl: str
    tvm_ffi: str
    symbol: str
    file: str
    sha256: str
    launch_smem: tuple[int | None, ...]
    seconds: float


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read(directory: Path) -> dict[str, Entry]:
    """Entries by variant name; empty where there is no manifest, or one this version can't read."""
    try:
        content = json.loads((directory / _FILE).read_text())
        if content["schema"] != _SCHEMA:
            return {}
        return {
            name: Entry(**{**fields, "launch_smem": tuple(fields["launch_smem"])})
            for name, fields in content["variants"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write(directory: Path, entries: Mapping[str, Entry]) -> None:
    """Replace the manifest in one step: a reader sees the old one or the new one."""
    content = {"schema": _SCHEMA, "variants": {name: asdict(entries[name]) for name in sorted(entries)}}
    aside = directory / f".{_FILE}.{os.getpid()}"
    aside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(aside, directory / _FILE)


@contextlib.contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Hold `directory` for writing, against other processes; waits for its turn."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def find(directory: Path, variant: Variant, entries: Mapping[str, Entry] | None = None) -> Path | str:
    """Return the library that holds `variant`, or a phrase that says why there is none to use.

    The entry's source hash must be that of the current sources, the library's bytes those that were built, and the
    installed tvm-ffi and kernel compiler (where it is installed) of the same minor version as at the build.
    """
    entry = (read(directory) if entries is None else entries).get(variant.name)
    if entry is None:
        return "not built"
    if entry.source_hash != sources.source_hash(variant, entry.dsl):
        return "built from other sources"
    installed = sources.dsl_version()
    if installed is not None and _minor(installed) != _minor(entry.dsl):
        return f"built with nvidia-cutlass-dsl {entry.dsl}, installed is {installed}"
    if _minor(library.tvm_ffi_version()) != _minor(entry.tvm_ffi):
        return f"built against apache-tvm-ffi {entry.tvm_ffi}, installed is {library.tvm_ffi_version()}"
    file = directory / entry.file
    try:
        damaged = digest(file) != entry.sha256
    except OSError:
        return f"{entry.file} is missing"
    return f"{entry.file} is damaged" if damaged else file


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
