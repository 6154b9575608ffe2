"""The README's support matrix, generated from the record: ``python -m tests.gpu.matrix --write README.md``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.markers import inserted
from culax.runtime.variants import Variant
from tests.gpu import verified
from tests.gpu.verified import Record

MARKERS = "<!-- support-matrix:begin -->", "<!-- support-matrix:end -->"
_ARCHITECTURES = {
    "sm_90a": "Hopper (SM90)",
    "sm_100a": "Blackwell (SM100)",
    "sm_103a": "Blackwell Ultra (SM103)",
}
_OPS = {"grouped_wgrad": "`grouped_wgrad`, `_out`, `_out_list`", "kda": "`kda_bwd`"}


def _row(kernel_set: str, variants: tuple[Variant, ...], state: str, ran_on: str) -> str:
    op, stage = variants[0].op, kernel_set.rpartition(".")[2]
    return f"| {_OPS.get(op, op)} | {stage} | {_ARCHITECTURES[variants[0].arch]} | {state} | {ran_on} |"


def table(record: Record, sets: Mapping[str, tuple[Variant, ...]]) -> str:
    """The matrix as Markdown: one row a kernel set and architecture, with its proof or the reason there is none."""
    if not sets:
        return "No GPU kernel of this version exists yet: every op takes the PyTorch path everywhere."
    lines = ["| op | kernels | architecture | state | run |", "|---|---|---|---|---|"]
    for key in sorted(sets):
        variants = sets[key]
        entry = record.verified.get(key)
        if key in record.unverified or entry is None:
            state, ran_on = "**unverified**", record.unverified.get(key, "no run recorded")
        else:
            state = f"verified, {entry.called} of {entry.variants} variants called"
            ran_on = (
                f"{entry.device}, driver {entry.driver}, torch {entry.torch}, nvidia-cutlass-dsl {entry.dsl}, "
                f"{entry.date}: {entry.passed} tests passed, {entry.skipped} skipped"
            )
        lines.append(_row(key.partition("/")[2], variants, state, ran_on))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the matrix, or write it into a file."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.matrix", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the matrix between FILE's markers")
    options = parser.parse_args(argv)
    content = table(verified.read(), verified.kernel_sets())
    if options.write is None:
        print(content)
    else:
        options.write.write_text(inserted(options.write.read_text(), MARKERS, content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
