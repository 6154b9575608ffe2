"""What the assembler and the launch say about a built kernel: spills, serialised wgmma, shared memory."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.ptx.text import Kernel

MOST_SHARED = 232_448  # bytes a block may have on SM90 and SM100
MOST_REGISTERS = 65_536  # of one multiprocessor


@dataclass(frozen=True)
class Usage:
    """Of one kernel: registers a thread, bytes of stack a thread (spills lie there), static shared memory, local bytes."""

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


def registers_held(kernel: Kernel, compiled: int) -> int:
    """Registers a block holds at most, given the count it was compiled with, after its warpgroups redistribute them."""
    dec = [int(i.args[0]) for i in kernel.instructions if i.op.startswith("setmaxnreg.dec")]
    inc = [int(i.args[0]) for i in kernel.instructions if i.op.startswith("setmaxnreg.inc")]
    if not dec and not inc:
        return kernel.threads * compiled
    groups = kernel.threads // 128
    return 128 * (min(dec, default=0) * 1 + max(inc, default=compiled) * (groups - 1))
