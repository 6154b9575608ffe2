from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from culax.runtime import build, library, load, manifest, sources
from tests.fakecuda import fake_cuda
from tests.runtime.conftest import ARCH, HERE, Built


def _loader(built: Built, tmp_path: Path) -> load.Loader:
    return load.Loader(built.folder, tmp_path / "cache")


def _without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "dsl_version", lambda: None)


def _rewrite(built: Built, **changes: str) -> None:
    """Change fields of the first variant's entry."""
    folder = built.folder / ARCH
    entries = manifest.read(folder)
    name = built.variants[0].name
    entries[name] = dataclasses.replace(entries[name], **changes)
    manifest.write(folder, entries)


def test_built_kernels_load_fast_and_without_the_compiler(built: Built) -> None:
    script = f"""
import sys, time
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from culax.runtime import load
import importlib
variants = importlib.import_module("sample_op.plan").variants({ARCH!r})
loader = load.Loader(Path({str(built.folder)!r}), Path("/nonexistent"))
start = time.perf_counter()
kernels = [loader.get(variant) for variant in variants]
print(time.perf_counter() - start, [kernel.how for kernel in kernels], "cutlass" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(build.AOT.parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    seconds, rest = done.stdout.split(maxsplit=1)
    assert rest.strip() == "['built', 'built'] False"
    assert float(seconds) <= 1.0


def test_a_kernel_is_loaded_once(built: Built, tmp_path: Path) -> None:
    loader = _loader(built, tmp_path)
    kernel = loader.get(built.variants[0])
    assert loader.get(built.variants[0]) is kernel
    assert loader.availability(built.variants[0]) == load.Availability("built", "built ahead of time")
    assert repr(kernel) == f"Kernel({built.variants[0].name}, {ARCH}, built)"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"source_hash": "0"}, "built from other sources"),
        ({"sha256": "0"}, "is damaged"),
        ({"file": "gone.so"}, "gone.so is missing"),
        ({"tvm_ffi": "0.0.1"}, "built against apache-tvm-ffi 0.0.1"),
    ],
    ids=["stale", "damaged", "missing", "abi"],
)
def test_a_library_that_does_not_fit_is_not_used(built: Built, tmp_path, monkeypatch, changes, reason: str) -> None:
    _rewrite(built, **changes)
    _without_compiler(monkeypatch)
    with pytest.raises(NotImplementedError, match=reason) as refused:
        _loader(built, tmp_path).get(built.variants[0])
    assert built.variants[0].name in str(refused.value)
    assert f"python -m culax build --arch {ARCH}" in str(refused.value)
    assert _loader(built, tmp_path).get(built.variants[1]).how == "built"


def test_a_library_of_another_compiler_version_is_not_used(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "dsl_version", lambda: "4.9.0")
    expected = f"built with nvidia-cutlass-dsl {manifest.read(built.folder / ARCH)[built.variants[0].name].dsl}"
    assert expected in str(manifest.find(built.folder / ARCH, built.variants[0]))


def test_an_edited_source_makes_the_library_stale(sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = sample.variants[0]
    entry = manifest.Entry("", "", "", sources.source_hash(variant, "4.8.1"), "4.8.1", "0.1", "", "", "", (), 0.0)
    (tmp_path / "aot" / ARCH).mkdir(parents=True)
    manifest.write(tmp_path / "aot" / ARCH, {variant.name: entry})
    _without_compiler(monkeypatch)
    sample.edit("stages/scale/kernel.py", "scaled(x[i], s)", "scaled(s, x[i])")
    sources.forget()
    with pytest.raises(NotImplementedError, match="built from other sources"):
        load.Loader(tmp_path / "aot", tmp_path / "cache").get(variant)


def test_a_variant_that_was_never_built_is_refused_by_name(built: Built, tmp_path: Path, monkeypatch) -> None:
    _without_compiler(monkeypatch)
    other = dataclasses.replace(built.variants[0], name="sample_scale_other")
    loader = _loader(built, tmp_path)
    expected = (
        f"kernel sample_scale_other for {ARCH}: not built; run python -m culax build --arch {ARCH}, or "
        "pip install 'nvidia-cutlass-dsl[cu13]' to compile it on first use"
    )
    assert loader.availability(other) == load.Availability(None, expected)
    with pytest.raises(NotImplementedError) as refused:
        loader.get(other)
    assert str(refused.value) == expected


def test_without_a_c_compiler_nothing_is_promised_to_compile(built: Built, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    loader = _loader(built, tmp_path)
    other = dataclasses.replace(built.variants[0], name="sample_scale_other")
    expected = (
        f"kernel sample_scale_other for {ARCH}: not built; linking kernels needs a C compiler: install gcc, or set CC"
    )
    assert loader.availability(other) == load.Availability(None, expected)
    assert loader.availability(built.variants[0]).how == "built"


def test_without_a_place_for_it_nothing_is_promised_to_compile(built: Built, tmp_path: Path) -> None:
    """Neither without a home directory, nor where the cache cannot be written: a file is in the way."""
    (tmp_path / "file").touch()
    other = dataclasses.replace(built.variants[0], name="sample_scale_other")
    for cache, reason in ((None, "no home directory: set CULAX_CACHE"), (tmp_path / "file" / "x", "cannot be written")):
        loader = load.Loader(built.folder, cache)
        assert loader.availability(other).how is None and reason in loader.availability(other).reason
        assert loader.availability(built.variants[0]).how == "built"


def test_the_cache_is_found_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CULAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/somebody")
    assert load._cache_directory() == Path("/somebody/.cache/culax")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it returns for a user without a home
    assert load._cache_directory() is None
    monkeypatch.setenv("CULAX_CACHE", "/somewhere")
    assert load._cache_directory() == Path("/somewhere")


def test_missing_runtime_library_is_named_with_the_pip_line(built: Built, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv(library.RUNTIME_VARIABLE, raising=False)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match=r"libcute_dsl_runtime.so.*pip install 'nvidia-cutlass-dsl\[cu13\]'"):
        _loader(built, tmp_path).get(built.variants[0])


def test_runtime_library_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = library.dsl_runtime()
    assert found.parts[-3:] == ("cu13", "lib", "libcute_dsl_runtime.so")
    file = tmp_path / "libcute_dsl_runtime.so"
    monkeypatch.setenv(library.RUNTIME_VARIABLE, str(file))
    with pytest.raises(NotImplementedError, match=f"{library.RUNTIME_VARIABLE} names {file}, which is not a file"):
        library.dsl_runtime()
    file.touch()
    assert library.dsl_runtime() == file


class _Driver:
    """libcuda.so.1 of one version; cuDriverGetVersion writes it and returns an error code."""

    def __init__(self, version: int, error: int = 0) -> None:
        self.version, self.error = version, error

    def cuDriverGetVersion(self, pointer) -> int:
        pointer._obj.value = self.version
        return self.error


@pytest.mark.parametrize(("version", "found"), [(12080, "12.8"), (12000, "12.0"), (11040, "11.4")])
def test_an_old_driver_is_named_before_anything_is_loaded(
    built: Built, tmp_path: Path, monkeypatch, version: int, found: str
) -> None:
    monkeypatch.setattr(library.ctypes, "CDLL", lambda name: _Driver(version))
    loader = _loader(built, tmp_path)
    reason = f"culax kernels need a driver for CUDA 13.0 (580 or later), this one is for CUDA {found}"
    assert loader.availability(built.variants[0]) == load.Availability(None, reason)
    with pytest.raises(NotImplementedError, match="this one is for CUDA"):
        loader.get(built.variants[0])


@pytest.mark.parametrize("driver", [_Driver(13000), _Driver(13020), _Driver(0, error=3), None])
def test_a_new_driver_or_none_is_no_reason(built: Built, tmp_path: Path, monkeypatch, driver: _Driver | None) -> None:
    def load_driver(name: str) -> _Driver:
        assert name == "libcuda.so.1"
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(library.ctypes, "CDLL", load_driver)
    assert _loader(built, tmp_path).availability(built.variants[0]).how == "built"


def test_missing_tvm_ffi_is_named_with_the_pip_line(built: Built, tmp_path: Path, monkeypatch) -> None:
    def not_found(name: str) -> str:
        raise library.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(library.metadata, "version", not_found)
    library.tvm_ffi_version.cache_clear()
    with pytest.raises(NotImplementedError, match="pip install apache-tvm-ffi"):
        _loader(built, tmp_path).get(built.variants[0])


def test_first_use_compiles_and_keeps_and_a_damaged_file_is_discarded(built: Built, tmp_path: Path) -> None:
    variant = dataclasses.replace(
        built.variants[0], name="sample_scale_jit", config=dataclasses.replace(built.variants[0].config, shift=1)
    )
    loader = _loader(built, tmp_path)
    assert loader.availability(variant) == load.Availability("jit", "not built; compiled on first use")
    kernel = loader.get(variant)
    assert kernel.how == "jit"
    (file,) = (tmp_path / "cache").rglob("*.so")
    before = file.stat().st_mtime_ns

    assert _loader(built, tmp_path).get(variant).how == "jit"
    assert file.stat().st_mtime_ns == before

    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[: len(content) // 2])
    assert _loader(built, tmp_path).get(variant).how == "jit"
    assert file.read_bytes() == content


def test_a_kernel_that_does_not_compile_raises_with_the_reason(built: Built, tmp_path: Path) -> None:
    bad = dataclasses.replace(built.variants[0], name="bad", config="not a configuration")
    with pytest.raises(RuntimeError, match=r"kernel bad: (.|\n)*'str' object has no attribute 'threads'"):
        _loader(built, tmp_path).get(bad)
    assert not list((tmp_path / "cache").rglob("*.so"))


class _Function:
    """Stands for a compiled function: counts calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *arguments: object) -> None:
        if arguments == ("bad",):
            raise ValueError("bad argument")
        self.calls += 1


def _capturing(monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: yes)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: yes)


def test_a_cold_kernel_in_a_capture_is_refused_before_it_is_called(built: Built, monkeypatch) -> None:
    function = _Function()
    kernel = load.Kernel(built.variants[0], function, "built")
    _capturing(monkeypatch, True)
    with pytest.raises(RuntimeError, match=f"{built.variants[0].name} was not loaded .* call culax.warmup"):
        kernel(1, 2)
    assert (function.calls, kernel.warm) == (0, False)
    _capturing(monkeypatch, False)
    kernel(1, 2)
    _capturing(monkeypatch, True)
    kernel(1, 2)
    assert (function.calls, kernel.warm) == (2, True)


def test_a_refused_call_leaves_a_kernel_cold(built: Built) -> None:
    kernel = load.Kernel(built.variants[0], _Function(), "built")
    with pytest.raises(ValueError, match="bad argument"):
        kernel("bad")
    assert not kernel.warm


def test_nothing_is_compiled_in_a_capture(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _capturing(monkeypatch, True)
    other = dataclasses.replace(built.variants[0], name="sample_scale_cold")
    with pytest.raises(RuntimeError, match="call culax.warmup"):
        _loader(built, tmp_path).get(other)
    assert not list(tmp_path.glob("cache/**/*.so"))
    assert _loader(built, tmp_path).get(built.variants[0]).how == "built"


def test_threads_get_one_kernel(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []

    def slowly(file: Path, symbol: str) -> _Function:
        loads.append(symbol)
        time.sleep(0.05)
        return _Function()

    monkeypatch.setattr(library, "load_function", slowly)
    loader = _loader(built, tmp_path)
    kernels: list[load.Kernel] = []
    threads = [threading.Thread(target=lambda: kernels.append(loader.get(built.variants[0]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == [built.variants[0].name]
    assert len(kernels) == 8
    assert len(set(map(id, kernels))) == 1


def test_a_child_forked_while_a_thread_loads_can_load(built: Built, tmp_path: Path) -> None:
    script = f"""
import os, sys, threading
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from culax.runtime import load
import importlib
first, second = importlib.import_module("sample_op.plan").variants({ARCH!r})
loader = load.Loader(Path({str(built.folder)!r}), Path("/nonexistent"))
loader.get(first)
held, release = threading.Event(), threading.Event()
def hold():
    with load._LOCK:
        held.set()
        release.wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    os._exit(0 if loader.get(second).how == "built" and loader.get(first).how == "built" else 1)
_, status = os.waitpid(child, 0)
release.set()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    environment = {**os.environ, "PYTHONPATH": str(build.AOT.parents[1])}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"y": (9,)}, ValueError, r"y.shape\[0\] .* expected to match x.shape\[0\]"),
        ({"y": (10, 1)}, ValueError, r"argument #1 .*ndim"),
        ({"dtype": torch.float16}, ValueError, "argument #1 .*dtype|dtype .*argument #1"),
        ({"strides": (2,)}, ValueError, "argument #1 .*strides|strides.*argument #1"),
        ({"address": (1 << 20) + 4}, ValueError, "alignment=16"),
        ({"device": 1}, ValueError, "argument #1 .*device|device.*argument #1"),
        ({"factor": "two"}, TypeError, "argument #2"),
    ],
    ids=["shape", "rank", "dtype", "strides", "alignment", "device", "scalar"],
)
def test_compiled_kernels_check_their_arguments(built: Built, tmp_path: Path, arguments: dict, error, words) -> None:
    kernel = _loader(built, tmp_path).get(built.variants[0])
    y = fake_cuda(
        arguments.get("y", (10,)),
        arguments.get("dtype", torch.float32),
        strides=arguments.get("strides"),
        address=arguments.get("address", 1 << 20),
        device=arguments.get("device", 0),
    )
    with pytest.raises(error, match=words):
        kernel(fake_cuda((10,), torch.float32), y, arguments.get("factor", 1.0))
    assert not kernel.warm


@pytest.mark.skipif(torch.cuda.is_available(), reason="ends in a driver error only where there is no driver")
def test_right_arguments_reach_the_driver(built: Built, tmp_path: Path) -> None:
    kernel = _loader(built, tmp_path).get(built.variants[0])
    x = fake_cuda((10,), torch.float32)
    with pytest.raises(RuntimeError, match="[Cc]uda"):
        kernel(x, x, 1.0)
