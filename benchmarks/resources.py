"""Spilled registers of built kernels, read from the machine code inside their libraries."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

CUDA_MACHINE = 190
_HEADER = struct.Struct("<4s12xHHIQQQIHHHHHH")  # of a 64-bit ELF file


def cubins(library: bytes) -> list[bytes]:
    """The CUDA ELF images that a shared library holds as data."""
    found = []
    position = library.find(b"\x7fELF", 1)
    while position >= 0:
        if position + _HEADER.size <= len(library):
            _, _, machine, _, _, segments, sections, _, _, *sizes = _HEADER.unpack_from(library, position)
            segment_size, segment_count, section_size, section_count, _ = sizes
            end = max(segments + segment_size * segment_count, sections + section_size * section_count)
            if machine == CUDA_MACHINE:
                found.append(library[position : position + end])
        position = library.find(b"\x7fELF", position + 4)
    return found


def spills(library: Path, tool: str) -> dict[str, int]:
    """Bytes of stack and local memory a thread, by kernel, as cuobjdump (`tool`) reports them."""
    found = {}
    for image in cubins(library.read_bytes()):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(image)
            file.flush()
            shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        for name, stack, local in re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", shown):
            found[name] = int(stack) + int(local)
    return found


def spills_of_loaded() -> dict[str, int]:
    """The same for every ahead-of-time kernel this process has loaded; nothing where CUDA's cuobjdump is missing."""
    from culax.runtime import load
    from culax.runtime.build import AOT

    tool = shutil.which("cuobjdump") or "/usr/local/cuda/bin/cuobjdump"
    if not Path(tool).exists():
        return {}
    found: dict[str, int] = {}
    for kernel in load.loaded():
        file = AOT / kernel.variant.arch / f"{kernel.variant.name}.so"
        if file.exists():
            found |= spills(file, tool)
    return found
