"""The source hash: one value that changes whenever the compiled kernel could.

The same function serves the manifest, the loader and the record of what was verified on hardware, so "built from these
sources" and "verified with these sources" cannot mean different things.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

from culax.runtime.variants import Variant

OPTIONS = "--enable-tvm-ffi --gpu-arch {arch}"
DSL_DISTRIBUTION = "nvidia-cutlass-dsl"


@cache
def dsl_version() -> str | None:
    """Version of the installed kernel compiler, or None where it isn't installed. Doesn't import it."""
    try:
        return metadata.version(DSL_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


@cache
def _root(top: str) -> Path:
    """Folder of the top-level package `top`, found without importing it."""
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"package {top} not found")
    return Path(next(iter(spec.submodule_search_locations)))


def _file_of(module: str) -> Path | None:
    """Source file of `module`, without importing it or its parents; None if there is none."""
    top, _, rest = module.partition(".")
    base = _root(top).joinpath(*rest.split(".")) if rest else _root(top)
    if (base / "__init__.py").is_file():
        return base / "__init__.py"
    file = base.with_suffix(".py")
    return file if rest and file.is_file() else None


@cache
def _imports(file: Path, module: str) -> tuple[str, ...]:
    """Names of the modules in `module`'s top-level package that `file` imports anywhere in its text."""
    top = module.partition(".")[0]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_bytes(), filename=str(file))):
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(relative, package) if node.level else node.module
            found.extend([f"{base}", *(f"{base}.{alias.name}" for alias in node.names)])
    return tuple(name for name in found if name.startswith(f"{top}."))


def source_files(kernel_set: str) -> dict[str, Path]:
    """Return the files a kernel set is compiled from, by module name.

    They are every Python file in the package `kernel_set` and, transitively, the modules of the same top-level package
    that those import, with the packages they lie in. The packages above `kernel_set` are not among them: their
    ``__init__`` imports what has nothing to do with the kernel.
    """
    top, _, rest = kernel_set.partition(".")
    folder = _root(top).joinpath(*rest.split(".")) if rest else _root(top)
    todo = []
    for file in folder.rglob("*.py"):
        parts = file.relative_to(folder).with_suffix("").parts
        todo.append(".".join((kernel_set, *(part for part in parts if part != "__init__"))))
    if not todo:
        raise ModuleNotFoundError(f"kernel set {kernel_set} has no Python files in {folder}")
    files: dict[str, Path] = {}
    while todo:
        module = todo.pop()
        found = None if module in files or kernel_set.startswith(f"{module}.") else _file_of(module)
        if found is not None:
            files[module] = found
            todo.append(module.rpartition(".")[0])
            todo.extend(_imports(found, module))
    return dict(sorted(files.items()))


@cache
def _digest_of_files(kernel_set: str) -> str:
    digest = hashlib.sha256()
    for module, file in source_files(kernel_set).items():
        content = file.read_bytes()
        digest.update(f"{module} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def forget() -> None:
    """Drop what was read: files that changed since are read anew by the next hash."""
    _digest_of_files.cache_clear()
    _imports.cache_clear()


def source_hash(variant: Variant, dsl: str) -> str:
    """Hash of all that decides what `variant` compiles to: sources, entry, config, options, compiler version `dsl`.

    Files are read once per process and kernel set; `forget` makes the next call read them again.
    """
    parts = (_digest_of_files(variant.kernel_set), variant.entry, repr(variant.config), OPTIONS, variant.arch, dsl)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def set_hash(variants: Iterable[Variant], dsl: str) -> str:
    """Hash of a kernel set as a whole: its variants' names and source hashes, in any order."""
    lines = sorted(f"{variant.name} {source_hash(variant, dsl)}" for variant in variants)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
