"""The resource table of the SM100 kernels, which nobody could run: ``python -m tests.ptx.sm100_table --write``."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from benchmarks.markers import inserted
from culax.grouped_wgrad.plan_sm100 import ARCHS
from culax.grouped_wgrad.stages.gemm_tcgen05.config import Config
from culax.runtime.variants import Variant, enumerate_variants
from tests.ptx import resources
from tests.ptx.conftest import CI, Builds, Built, select

README = Path(__file__).resolve().parents[2] / "torch_ext" / "culax" / "grouped_wgrad" / "README.md"
MARKERS = "<!-- sm100-resources:begin -->", "<!-- sm100-resources:end -->"
HEAD = (
    "| variant | registers: GEMM, writer | spilled bytes | shared memory, bytes | tensor memory, columns |\n"
    "|---|---|---|---|---|"
)


def chosen() -> list[Variant]:
    """The variants that CI compiles."""
    return [variant for arch in ARCHS for variant in select(enumerate_variants(arch), CI)]


def row(built: Built) -> str:
    """One variant: what the assembler and the launch said, and tensor memory by the configuration's arithmetic."""
    config = built.variant.config
    assert isinstance(config, Config)
    registers = {u.kernel: u.registers for u in resources.usage(built.cubin)}
    gemm, writer = (next(r for name, r in registers.items() if part in name) for part in ("gemm_", "write_desc"))
    spilled = sum(int(stores) for stores in re.findall(r"(\d+) bytes spill stores", built.log))
    columns = f"{config.columns}: {config.tile_n} + {config.accumulator_stride}, scales {sum(config.scale_columns)}"
    return f"| {built.variant.name} | {gemm}, {writer} | {spilled} | {built.launch_smem[-1]} | {columns} |"


def table(builds: Builds) -> str:
    """All rows, as Markdown."""
    return "\n".join([HEAD, *(row(builds.get(variant)) for variant in chosen())])


def main(argv: list[str]) -> int:
    """Print the table, or write it into the README of grouped_wgrad."""
    parser = argparse.ArgumentParser(prog="python -m tests.ptx.sm100_table", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it between the README's markers")
    options = parser.parse_args(argv)
    content = table(Builds(chosen()))
    if options.write:
        README.write_text(inserted(README.read_text(), MARKERS, content))
    else:
        print(content)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
