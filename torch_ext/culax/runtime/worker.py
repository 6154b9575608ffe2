"""Compiler processes: each compiles for one architecture, one variant at a time, away from the caller's process.

A process of its own because the compiler fixes its architecture at import, cannot be used from two threads, and must
neither see the caller's devices nor take the caller down.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from culax.runtime.compile import Compiled, compile_variant
from culax.runtime.variants import Variant

_LINES_OF_TRACEBACK = 30


class CompileError(RuntimeError):
    """A variant didn't compile; the message carries the compiler's words."""


class Worker:
    """A compiler process for `arch`. Use as a context manager; one thread at a time."""

    def __init__(self, arch: str) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="culax-compile-")
        package_root = str(Path(__file__).resolve().parents[2])
        environment = {
            **os.environ,
            "CUTE_DSL_ARCH": arch,
            "CUTE_DSL_DUMP_DIR": self._scratch.name,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(dict.fromkeys([package_root, *(os.path.abspath(path) for path in sys.path)])),
        }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", "culax.runtime.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=self._scratch.name,
            env=environment,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        if any(exception):
            self._process.kill()
        self._process.wait()
        self._errors.close()
        self._scratch.cleanup()

    def compile(self, variant: Variant) -> Compiled:
        """Compile `variant`; the object lies in a folder that lives as long as this worker.

        Raises:
            CompileError: the compiler refused it, or its process died.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            pickle.dump((variant, Path(self._scratch.name)), self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            self._errors.seek(0)
            tail = self._errors.read().decode(errors="replace")[-4000:]
            raise CompileError(f"{variant.name}: the compiler process ended\n{tail}") from None
        if isinstance(answer, str):
            raise CompileError(f"{variant.name}: {answer}")
        return answer


def _serve() -> None:
    """Answer each (variant, directory) on standard input with a Compiled, or with a traceback's text."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the compiler prints must not mix with the answers
    while True:
        try:
            variant, directory = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: Any
        try:
            answer = compile_variant(variant, directory)
        except Exception:
            answer = "\n".join(traceback.format_exc().splitlines()[-_LINES_OF_TRACEBACK:])
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
