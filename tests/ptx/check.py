"""Check PTX files: ``python -m tests.ptx.check FILE.ptx ...`` prints what doesn't hold and exits 1 if anything."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
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
        if any(map(rings.is_send, kernel.instructions)):
            found += tensor_memory.check_generic_stores(kernel, rings.is_send)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: check the files; return 1 if anything was found, 2 if a file can't be checked."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.ptx.check",
        description="Check the PTX of kernels (python -m culax build --keep DIR writes it) against the rules of "
        "tests/ptx/README.md. Exit status: 0 if all hold, 1 if not, 2 if a file can't be checked.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.ptx")
    status = 0
    for file in parser.parse_args(argv).files:
        try:
            found = check_text(file.read_text())
        except (OSError, ValueError) as error:
            print(f"{file}: {error}", file=sys.stderr)
            status = 2
            continue
        print(f"{file}: {len(found) or 'nothing'} found", *found, sep="\n  ")
        status = max(status, int(bool(found)))
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, quietly
    sys.exit(main())
