"""Builds the schema stub beside the pure-Python package. Everything else is in pyproject.toml.

The stub needs a C++20 compiler and an installed torch (install with --no-build-isolation). Without them the
package is built all the same: culax then declares its schemas from Python, and `python -m culax` says so.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
SCHEMAS = ROOT / "torch_ext" / "culax" / "schemas.txt"
TORCH_2_11 = "0x020b000000000000"


class BuildStub(build_ext):
    def build_extension(self, ext: Extension) -> None:
        generated = Path(self.build_temp)
        generated.mkdir(parents=True, exist_ok=True)
        text = SCHEMAS.read_text()
        rows = " \\\n".join(f"X({json.dumps(line)})" for line in text.splitlines())
        header = f"#define CULAX_SCHEMAS(X) \\\n{rows}\n#define CULAX_SCHEMA_TEXT {json.dumps(text)}\n"
        (generated / "culax_schemas.h").write_text(header)
        ext.include_dirs.append(str(generated))
        super().build_extension(ext)


class StableAbiWheel(bdist_wheel):
    """One wheel serves every CPython from 3.10 on: the stub uses no Python API at all."""

    def finalize_options(self) -> None:
        if self.distribution.ext_modules:
            self.py_limited_api = "cp310"
        super().finalize_options()


def stub_extension() -> list[Extension]:
    if importlib.util.find_spec("torch") is None:
        print("warning: torch is not installed, so the schema stub is not built", file=sys.stderr)
        return []
    torch_root = Path(importlib.util.find_spec("torch").origin).parent
    return [
        Extension(
            "culax._stub",
            sources=["csrc_stub/stub.cpp"],
            depends=[str(SCHEMAS.relative_to(ROOT))],
            include_dirs=[str(torch_root / "include")],
            library_dirs=[str(torch_root / "lib")],
            libraries=["torch_cpu", "torch", "c10"],
            define_macros=[("TORCH_TARGET_VERSION", TORCH_2_11)],
            extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"],
            language="c++",
            py_limited_api=True,
            optional=True,
        )
    ]


setup(ext_modules=stub_extension(), cmdclass={"build_ext": BuildStub, "bdist_wheel": StableAbiWheel})
