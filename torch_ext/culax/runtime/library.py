"""Find and load the two libraries that compiled kernels link to: the kernel compiler's runtime and tvm-ffi.

Neither cutlass nor any CUDA library is imported here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

RUNTIME_VARIABLE = "CULAX_DSL_RUNTIME"
_RUNTIME_NAME = "libcute_dsl_runtime.so"
_DRIVER_NAME = "libcuda.so.1"
DRIVER = 13000
"""The oldest driver that loads kernels, as the CUDA version it supports: 1000 major + 10 minor."""


def expect_driver() -> None:
    """Check that the driver is new enough; where there is none nothing will run, and nothing is said. Makes no context.

    Raises:
        NotImplementedError: the driver supports an older CUDA only.
    """
    try:
        driver = ctypes.CDLL(_DRIVER_NAME)
    except OSError:
        return
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value < DRIVER:
        found = f"{version.value // 1000}.{version.value % 1000 // 10}"
        raise NotImplementedError(
            f"culax kernels need a driver for CUDA 13.0 (580 or later), this one is for CUDA {found}"
        )


def dsl_runtime() -> Path:
    """Path of the kernel compiler's runtime library (CUDA 13): ``CULAX_DSL_RUNTIME``, else the installed wheel's.

    Raises:
        NotImplementedError: there is none; the message names the package and the pip line.
    """
    chosen = os.environ.get(RUNTIME_VARIABLE)
    if chosen:
        if not Path(chosen).is_file():
            raise NotImplementedError(f"{RUNTIME_VARIABLE} names {chosen}, which is not a file")
        return Path(chosen)
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / "cu13" / "lib" / _RUNTIME_NAME
        if file.is_file():
            return file
    raise NotImplementedError(
        f"culax kernels need {_RUNTIME_NAME} of nvidia-cutlass-dsl (CUDA 13): pip install 'nvidia-cutlass-dsl[cu13]', "
        f"or set {RUNTIME_VARIABLE} to the file"
    )


def c_compiler() -> str:
    """The command that links kernels: ``$CC``, gcc or cc.

    Raises:
        NotImplementedError: there is none.
    """
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if found is None:
        raise NotImplementedError("linking kernels needs a C compiler: install gcc, or set CC")
    return found


@cache
def tvm_ffi_version() -> str:
    """Version of the installed tvm-ffi.

    Raises:
        NotImplementedError: it isn't installed.
    """
    try:
        return metadata.version("apache-tvm-ffi")
    except metadata.PackageNotFoundError:
        raise NotImplementedError("culax kernels need apache-tvm-ffi: pip install apache-tvm-ffi") from None


def tvm_ffi_library() -> Path:
    """Path of ``libtvm_ffi.so``.

    Raises:
        NotImplementedError: tvm-ffi isn't installed.
    """
    tvm_ffi_version()
    spec = importlib.util.find_spec("tvm_ffi")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise NotImplementedError("culax kernels need apache-tvm-ffi: pip install apache-tvm-ffi")
    return Path(next(iter(folders))) / "lib" / "libtvm_ffi.so"


@cache
def _runtime_handle() -> ctypes.CDLL:
    # The kernels' libraries name the runtime by soname; loading it first by its path is what resolves that name.
    return ctypes.CDLL(str(dsl_runtime()), mode=ctypes.RTLD_GLOBAL)


def load_function(file: Path, symbol: str) -> Any:
    """Load the shared library `file` and return its tvm-ffi function `symbol`. Makes no CUDA call.

    Raises:
        NotImplementedError: tvm-ffi or the kernel compiler's runtime library is missing.
        OSError, RuntimeError: the file isn't a library that can be loaded.
    """
    tvm_ffi_version()
    _runtime_handle()
    import tvm_ffi

    return getattr(tvm_ffi.load_module(str(file)), symbol)
