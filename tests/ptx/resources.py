"""What the assembler and the launch say about a built kernel: spills, serialised wgmma, shared memory."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

MOST_SHARED = 232_448  # bytes a block may have on SM90 and SM100
RESERVED_SHARED = 1024  # of the system, beyond those; the assembler counts them as static
MOST_REGISTERS = 65_536  # of one multiprocessor


@dataclass(frozen=True)
class Usage:
    """Of one kernel: registers a thread, stack bytes a thread (spills lie there), static shared and local bytes."""

    kernel: str
    registers: int
    stack: int
    shared: int
    local: int


def cuobjdump() -> Path:
    """The tool of the ``nvidia-cuda-cuobjdump`` package.

    Raises:
        FileNotFoundError: it isn't installed.
    """
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*/bin/cuobjdump")):
            return file
    raise FileNotFoundError("cuobjdump: pip install nvidia-cuda-cuobjdump")


def usage(cubin: Path) -> list[Usage]:
    """Resource usage of every kernel in a cubin."""
    done = subprocess.run([cuobjdump(), "-res-usage", cubin], capture_output=True, text=True, check=True)
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", done.stdout)
    return [Usage(name, *map(int, numbers)) for name, *numbers in found]


def spills(log: str) -> list[str]:
    """Lines of the assembler's report that tell of spilled registers."""
    lines = re.findall(r"[^\n]*bytes spill stores[^\n]*", log)
    if not lines:
        return ["the assembler reported no spill counts"]
    return [line.strip() for line in lines if not re.search(r"\b0 bytes spill stores, 0 bytes spill loads", line)]


def warnings(log: str) -> list[str]:
    """Lines with an assembler warning number, such as (C7510): wgmma were serialised."""
    return [line.strip() for line in log.splitlines() if re.search(r"\(C7\d{3}\)", line)]
