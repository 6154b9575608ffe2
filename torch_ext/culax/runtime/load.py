"""From a variant to a callable: the library built ahead of time, else one compiled on first use, else a refusal."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from culax.runtime import build, library, manifest, sources
from culax.runtime.variants import Variant

# One lock for all loading and every kernel's first call. A child forked while another thread held it gets a new one.
_LOCK = threading.RLock()


def _new_lock() -> None:
    global _LOCK
    _LOCK = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


@dataclass(frozen=True)
class Availability:
    """Whether a variant can be had here: ``how`` is "built", "jit" or None, and ``reason`` a phrase that says why."""

    how: Literal["built", "jit"] | None
    reason: str


def _refuse_in_capture(variant: Variant) -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"kernel {variant.name} was not loaded before this CUDA graph capture: call culax.warmup(op, *inputs), "
            "or run the op once, before capturing"
        )


class Kernel:
    """A compiled variant. Call it with torch tensors and scalars; it runs on torch's current stream.

    ``call`` is the same without a frame of Python between; look it up for every call, as the first replaces it.

    The first call of the process loads the device code, for every visible device, so it must not happen inside a CUDA
    graph capture: there it raises RuntimeError before anything is touched. Any call whose arguments pass the compiled
    checks counts, an empty problem's too.

    Raises (from the call):
        ValueError, TypeError: an argument's shape, stride, dtype, alignment or device isn't what was compiled for.
        RuntimeError: the first call is inside a capture, or a CUDA error.
    """

    __slots__ = ("_function", "call", "how", "variant", "warm")

    def __init__(self, variant: Variant, function: Any, how: Literal["built", "jit"]) -> None:
        self.variant = variant
        self.how = how
        self.warm = False
        self._function = function
        self.call: Callable[..., None] = self._first_call  # once warm, the compiled function itself

    def __call__(self, *arguments: Any) -> None:
        self.call(*arguments)

    def _first_call(self, *arguments: Any) -> None:
        with _LOCK:
            if not self.warm:
                _refuse_in_capture(self.variant)
            self._function(*arguments)
            self.warm = True
        self.call = self._function

    def __repr__(self) -> str:
        return f"Kernel({self.variant.name}, {self.variant.arch}, {self.how})"


class Loader:
    """Finds kernels in `aot` (one folder an architecture), then in `cache` (or None), where it also compiles to."""

    def __init__(self, aot: Path, cache: Path | None) -> None:
        self._aot = aot
        self._cache = cache
        self._kernels: dict[Variant, Kernel] = {}
        self._availability: dict[Variant, Availability] = {}
        self._manifests: dict[str, dict[str, manifest.Entry]] = {}

    def get(self, variant: Variant) -> Kernel:
        """Return the callable of `variant`, loading or compiling it if this is the first time.

        A library whose recorded source hash isn't that of the current sources is not used. Compiling takes seconds,
        once a machine: the result is kept on disk.

        Raises:
            NotImplementedError: it isn't built and can't be compiled here; the message says what to run.
            RuntimeError: it would have to be compiled inside a CUDA graph capture, or it doesn't compile.
        """
        kernel = self._kernels.get(variant)
        if kernel is not None:
            return kernel
        with _LOCK:
            if variant not in self._kernels:
                self._kernels[variant] = self._load(variant)
            return self._kernels[variant]

    def availability(self, variant: Variant) -> Availability:
        """Say whether and how `get` would find `variant`. Compiles nothing and makes no CUDA context."""
        known = self._availability.get(variant)
        if known is None:
            known = self._availability[variant] = self._find_out(variant)
        return known

    def loaded(self) -> tuple[Kernel, ...]:
        """Kernels handed out so far; a `warm` one has been called."""
        return tuple(self._kernels.values())

    def _built(self, variant: Variant) -> Path | str:
        directory = self._aot / variant.arch
        if variant.arch not in self._manifests:
            self._manifests[variant.arch] = manifest.read(directory)
        return manifest.find(directory, variant, self._manifests[variant.arch])

    def _find_out(self, variant: Variant) -> Availability:
        try:
            library.expect_driver()
            library.dsl_runtime()
            built = self._built(variant)
        except NotImplementedError as missing:
            return Availability(None, str(missing))
        if isinstance(built, Path):
            return Availability("built", "built ahead of time")
        if sources.dsl_version() is not None:
            try:
                library.c_compiler()
                self._expect_cache(variant)
            except NotImplementedError as missing:
                return Availability(None, f"kernel {variant.name} for {variant.arch}: {built}; {missing}")
            return Availability("jit", f"{built}; compiled on first use")
        return Availability(
            None,
            f"kernel {variant.name} for {variant.arch}: {built}; run python -m culax build --arch {variant.arch}, or "
            "pip install 'nvidia-cutlass-dsl[cu13]' to compile it on first use",
        )

    def _load(self, variant: Variant) -> Kernel:
        found = self.availability(variant)
        if found.how is None:
            raise NotImplementedError(found.reason)
        file = self._built(variant) if found.how == "built" else self._compiled(variant)
        assert isinstance(file, Path), file
        return Kernel(variant, library.load_function(file, variant.name), found.how)

    def _cached(self, variant: Variant) -> Path:
        """The folder of `variant` in the cache."""
        dsl = sources.dsl_version()
        assert dsl is not None and self._cache is not None
        return self._cache / variant.arch / sources.source_hash(variant, dsl)[:32]

    def _expect_cache(self, variant: Variant) -> None:
        """Refuse to compile `variant` where it would have no place."""
        if self._cache is None:
            raise NotImplementedError("compiling it needs a folder and there is no home directory: set CULAX_CACHE")
        folder = self._cached(variant)
        if not isinstance(manifest.find(folder, variant), Path) and not _may_write(folder):
            raise NotImplementedError(f"compiling it needs a folder and {folder} cannot be written: set CULAX_CACHE")

    def _compiled(self, variant: Variant) -> Path:
        """Library of `variant` in the cache, compiled if it isn't there or is damaged."""
        directory = self._cached(variant)
        found = manifest.find(directory, variant)
        if isinstance(found, Path):
            return found
        _refuse_in_capture(variant)
        report = build.build([variant], directory)
        if report.failed:
            raise RuntimeError(f"kernel {report.failed[variant.name]}")
        found = manifest.find(directory, variant)
        assert isinstance(found, Path), found
        return found


def _may_write(folder: Path) -> bool:
    """Whether a folder, or the first one above it that exists, can be written."""
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _cache_directory() -> Path | None:
    """Where kernels compiled at first use are kept; None for a user without a home directory."""
    chosen = os.environ.get("CULAX_CACHE")
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if cache.startswith("~") else Path(cache) / "culax"


_loader = Loader(build.AOT, _cache_directory())
get = _loader.get
availability = _loader.availability
loaded = _loader.loaded
