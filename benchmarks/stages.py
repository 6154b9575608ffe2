"""Where the KDA backward's time goes, kernel by kernel: `python -m benchmarks.stages --help`."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import report, resources, roofline
from benchmarks.case import Call, Cost
from benchmarks.kda import CHUNK, KdaCase
from benchmarks.registry import select

MARKERS = "<!-- kda-stages:begin -->", "<!-- kda-stages:end -->"
CALLS = 20


@dataclass(frozen=True)
class Launch:
    """One kernel's launches in a profile: median time in us, launches a call, and what a block takes."""

    name: str
    microseconds: float
    per_call: float
    threads: int
    registers: int
    shared: int


@dataclass(frozen=True)
class Stage:
    """A stage of one call; its figures of resources are those of its longest kernel. Costs are None where unknown.

    spills: bytes a thread; shared: bytes a block; occupancy: the share of a multiprocessor's 64 warps that fit.
    """

    stage: str
    ms: float
    tflops: float | None
    tb_per_s: float | None
    floor_ms: float | None
    roofline_share: float | None
    threads: int
    registers: int
    spills: int | None
    shared: int
    occupancy: float


def costs(case: KdaCase) -> dict[str, Cost]:
    """Work of each stage: its matrix products, what it reads and writes once. Together they are the case's products."""
    c, k, v = CHUNK, case.key_dim, case.value_dim
    chunks = case.batch * -(-case.tokens // c) * case.heads
    states = 4 * case.states * case.heads * k * v
    products = {
        "prep": c * c * (k + v),
        "scans": c * c * v + 5 * c * k * v,
        "local": 3 * c * k * v + 3 * c * c * v + 6 * c * c * k + 2 * c * c * c,
    }
    tokens, tapes = c * (4 * k + 4), 2 * c
    moved = {  # gates and beta; then bf16 vectors of K, V and C elements a token; then bytes a chunk
        "prep": tokens + tapes * (2 * k + v + c) + tapes * (3 * k + v) + 4 * k,
        "scans": tapes * (5 * k + 2 * v + c) + 8 * k + 4 * k * v + tapes * 2 * v,
        "local": 2 * tokens + tapes * (2 * k + 4 * v + c) + 4 * k * v + tapes * (2 * k + v),
    }
    given = {"scans": 3 * states}
    return {
        name: Cost(2.0 * chunks * products[name], float(chunks * moved[name] + given.get(name, 0))) for name in products
    }


def stage_of(kernel: str) -> str:
    """The stage that a kernel belongs to, from the name of its function; "other" for kernels that aren't ours."""
    found = re.match(r"kernel_cutlass_(\w+?)_kernel_", kernel)
    if found is None:
        return "other"
    return "chunk_table" if found[1] in ("sum", "fill_packed", "fill_equal") else found[1]


def occupancy(threads: int, registers: int, shared: int) -> float:
    """Share of an SM90 multiprocessor's warps that fit at once; `shared` includes the system's 1,024 bytes a block."""
    warps = -(-threads // 32)
    each = -(-registers * 32 // 256) * 256 * warps
    blocks = min(64 // warps, 65_536 // max(each, 1), 233_472 // max(shared, 1024), 32)
    return blocks * warps / 64


def launches(calls: Sequence[Call]) -> list[Launch]:
    """Profile CALLS calls, the input sets in turn, after as many to warm up."""
    from torch.profiler import ProfilerActivity, profile

    for i in range(CALLS):
        calls[i % len(calls)]()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for i in range(CALLS):
            calls[i % len(calls)]()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return from_trace(events, CALLS)


def from_trace(events: Sequence[Mapping[str, Any]], calls: int) -> list[Launch]:
    """The kernels of a profiler's trace of `calls` calls."""
    kernels: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy"):
            kernels[event["name"]].append(event)
    found = []
    for name, same in kernels.items():
        facts = same[0]["args"]
        x, y, z = facts.get("block", (0, 0, 0))
        found.append(
            Launch(
                name=name,
                microseconds=statistics.median(event["dur"] for event in same),
                per_call=len(same) / calls,
                threads=x * y * z,
                registers=facts.get("registers per thread", 0),
                shared=facts.get("shared memory", 0),
            )
        )
    return found


def stages(found: Sequence[Launch], work: Mapping[str, Cost], spills: Mapping[str, int]) -> list[Stage]:
    """One row a stage, the longest first. `spills` are bytes a thread by kernel."""
    groups: dict[str, list[Launch]] = defaultdict(list)
    for launch in found:
        groups[stage_of(launch.name)].append(launch)
    rows = []
    ceilings = roofline.Ceilings("", *roofline.KNOWN_GPUS["H200"], "")
    for name, same in groups.items():
        ms = sum(launch.microseconds * launch.per_call for launch in same) / 1e3
        longest = max(same, key=lambda launch: launch.microseconds)
        cost = work.get(name)
        floor = None if cost is None else roofline.floor_ms(cost, ceilings)
        rows.append(
            Stage(
                stage=name,
                ms=ms,
                tflops=None if cost is None else cost.flops / ms / 1e9,
                tb_per_s=None if cost is None else cost.bytes / ms / 1e9,
                floor_ms=floor,
                roofline_share=None if floor is None else floor / ms,
                threads=longest.threads,
                registers=longest.registers,
                spills=spills.get(longest.name),
                shared=longest.shared,
                occupancy=occupancy(longest.threads, longest.registers, longest.shared) if longest.threads else 0.0,
            )
        )
    return sorted(rows, key=lambda row: -row.ms)


def measure(case: KdaCase, sets: int = 3) -> list[Stage]:
    """Profile our backward of a case. Ceilings are the H200's."""
    calls = [case.ours(case.make_inputs(seed)) for seed in range(sets)]
    return stages(launches(calls), costs(case), resources.spills_of_loaded())


def table(document: Mapping[str, Any]) -> str:
    """Markdown: a table a case, a row a stage, with the sum of all in the last."""
    machine = document["machine"]
    parts = [f"{machine['gpu']}, torch {machine['torch']}, commit `{document['commit']}`, {document['date']}."]
    titles = (
        "stage",
        "ms",
        "TFLOP/s",
        "TB/s",
        "floor ms",
        "share",
        "threads",
        "registers",
        "spills",
        "shared",
        "warps",
    )
    for case in document["cases"]:
        lines = [f"`{case['case']}`:", "", "| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
        for row in case["stages"]:
            spilled = "" if row["spills"] is None else f"{row['spills']} B"
            cells = [row["stage"], f"{row['ms']:.3f}", _shown(row["tflops"], ".0f"), _shown(row["tb_per_s"], ".2f")]
            cells += [_shown(row["floor_ms"], ".3f"), _shown(row["roofline_share"], ".0%"), str(row["threads"])]
            cells += [str(row["registers"]), spilled, f"{row['shared']:,} B", f"{row['occupancy']:.0%}"]
            lines.append("| " + " | ".join(cells) + " |")
        total = sum(row["ms"] for row in case["stages"])
        lines.append("| all | " + f"{total:.3f}" + " |" * (len(titles) - 1))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _shown(figure: float | None, style: str) -> str:
    return "" if figure is None else format(figure, style)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stages",
        description="Time, work and resources of every kernel of the KDA backward on a CUDA device.",
    )
    parser.add_argument("--case", action="append", default=[], metavar="PATTERN", help="default: the first KDA case")
    report.add_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    args = _parser().parse_args(argv)

    def measured() -> report.Document:
        import culax  # noqa: F401  (registers the ops)

        chosen = [case for case in select(args.case or ["kda_bwd_b1_t8192_h32"], "cuda") if isinstance(case, KdaCase)]
        cases = [{"case": case.name, "stages": [asdict(row) for row in measure(case)]} for case in chosen]
        return {**report.head("cuda", args.commit), "cases": cases}

    report.deliver(args, measured, table, MARKERS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
