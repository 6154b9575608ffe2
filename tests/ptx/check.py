"""Check PTX files: ``python -m tests.ptx.check FILE.ptx ...`` prints what doesn't hold and exits 1 if anything."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.ptx import descriptors, groups, rings, tensor_memory
from tests.ptx.findings import Finding, finding
from tests.ptx.text import Kernel, kernels
from tests.ptx.values import Values


def _check_drained(kernel: Kernel, states: list[groups.InFlight[int] | None]) -> list[Finding]:
    """Without TMA stages to follow: no wgmma is in flight at any arrival or block-wide barrier."""
    found = []
    for instruction in kernel.instructions:
        state = states[instruction.index]
        if (
            state is not None
            and state.count
            and (rings.is_arrive(instruction) or instruction.op.startswith("bar.sync"))
        ):
            found.append(finding("drain", kernel, instruction, f"up to {state.count} wgmma groups may be in flight"))
    return found


def check_kernel(kernel: Kernel) -> list[Finding]:
    """Apply every rule that looks at one kernel."""
    values = Values(kernel)
    found = descriptors.check_acquires(kernel, values) + descriptors.check_releases(kernel)
    if tensor_memory.uses_tensor_memory(kernel):
        found += tensor_memory.check_tensor_memory(kernel)
    if rings.multiplies(kernel):
        states = groups.in_flight(kernel)
        found += groups.check_registers(kernel, states)
        found += rings.check_rings(kernel) if rings.uses_rings(kernel) else _check_drained(kernel, states)
    return found


def check_text(source: str) -> list[Finding]:
    """Check all kernels of a PTX file.

    Raises:
        ValueError: the text has no kernel, or something this doesn't understand.
    """
    found_kernels = list(kernels(source))
    if not found_kernels:
        raise ValueError("no kernel in this text")
    found = [problem for kernel in found_kernels for problem in check_kernel(kernel)]
    return found + descriptors.check_written_somewhere(found_kernels)


def main(files: list[str]) -> int:
    """Check `files`; return 1 if anything was found."""
    status = 0
    for file in files:
        found = check_text(Path(file).read_text())
        print(f"{file}: {len(found) or 'nothing'} found", *found, sep="\n  ")
        status |= bool(found)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
