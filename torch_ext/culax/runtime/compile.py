"""Compile one variant to an object, and link objects to a library. Needs the kernel compiler, but no GPU."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from culax.runtime import library
from culax.runtime.sources import OPTIONS
from culax.runtime.variants import Variant

# Reports of the assembler (registers, spills, serialised wgmma); they don't change the code.
_REPORTS = " --keep-ptx --keep-cubin remarks{ptx}"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Compiled:
    """What one compilation gave.

    Attributes:
        variant: what was compiled.
        object: the relocatable object file; its one public function is ``variant.name``.
        ptx: PTX text of all kernels the entry launches.
        cubin: machine code of the same kernels.
        log: what the assembler said, one section a kernel: registers, spills, warnings.
        launch_smem: dynamic shared memory of each launch in bytes, in order; None where it is known only at run time.
        seconds: time spent.
    """

    variant: Variant
    object: Path
    ptx: str
    cubin: bytes
    log: str
    launch_smem: tuple[int | None, ...]
    seconds: float

    def keep(self, directory: Path) -> None:
        """Write ``NAME.ptx``, ``NAME.cubin`` and ``NAME.log`` into `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{self.variant.name}.ptx").write_text(self.ptx)
        (directory / f"{self.variant.name}.cubin").write_bytes(self.cubin)
        (directory / f"{self.variant.name}.log").write_text(self.log)


def compile_variant(variant: Variant, directory: Path) -> Compiled:
    """Compile `variant` in this process and write ``NAME.o`` into `directory`.

    The compiler reads its target architecture from the environment when it is imported, so one process compiles for
    one architecture; ``worker`` starts such processes. What the compiler prints goes into ``Compiled.log``.

    Raises:
        RuntimeError: the compiler was imported for another architecture before.
    """
    if "cutlass" not in sys.modules:
        os.environ["CUTE_DSL_ARCH"] = variant.arch
    elif os.environ.get("CUTE_DSL_ARCH") != variant.arch:
        raise RuntimeError(
            f"compile {variant.name}: this process compiles for {os.environ.get('CUTE_DSL_ARCH')}, not {variant.arch}"
        )
    start = time.perf_counter()
    import cutlass.cute as cute

    module, _, function = variant.entry.partition(":")
    entry = getattr(importlib.import_module(module), function)
    jit_function, arguments = entry(variant.config)
    directory.mkdir(parents=True, exist_ok=True)
    with _StderrToFile() as log:
        compiled = cute.compile(jit_function, *arguments, options=OPTIONS.format(arch=variant.arch) + _REPORTS)
    file = directory / f"{variant.name}.o"
    compiled.export_to_c(str(file), function_name=variant.name)
    return Compiled(
        variant=variant,
        object=file,
        ptx=compiled.__ptx__,
        cubin=compiled.__cubin__,
        log=_ANSI.sub("", log.text),
        launch_smem=launch_smem(str(compiled.ir_module)),
        seconds=time.perf_counter() - start,
    )


class _StderrToFile:
    """Collect what native code writes to file descriptor 2 while the block runs."""

    def __enter__(self) -> _StderrToFile:
        sys.stderr.flush()
        self._saved = os.dup(2)
        self._file = tempfile.TemporaryFile()
        os.dup2(self._file.fileno(), 2)
        self.text = ""
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        sys.stderr.flush()
        os.dup2(self._saved, 2)
        os.close(self._saved)
        self._file.seek(0)
        self.text = self._file.read().decode(errors="replace")
        self._file.close()
        if kind is not None:
            sys.stderr.write(self.text)


def launch_smem(host_ir: str) -> tuple[int | None, ...]:
    """Dynamic shared memory of each launch in the lowered host code, bytes, in program order.

    It is the constant stored in the third field (after grid and block) of the launch configuration; None where the
    stored value isn't a constant.
    """
    found: list[int | None] = []
    config_type = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    stored = re.compile(
        r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
        + config_type
        + r"\s+llvm\.store (%\w+), \1 : i64"
    )
    for function in re.split(r"\n  llvm\.func ", host_ir):
        constants = {
            match[1]: int(match[2])
            for match in re.finditer(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : i64\)", function)
        }
        found.extend(constants.get(match[2]) for match in stored.finditer(function))
    return tuple(found)


def link(objects: list[Path], target: Path) -> None:
    """Link objects to the shared library `target`, dynamically against the installed compiler's runtime and tvm-ffi.

    Raises:
        NotImplementedError: no C compiler, or one of the two libraries is missing.
        RuntimeError: the linker failed; its output is in the message.
    """
    command = [library.c_compiler(), "-shared", "-o", str(target), *map(str, objects)]
    command += [str(library.dsl_runtime()), str(library.tvm_ffi_library())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
