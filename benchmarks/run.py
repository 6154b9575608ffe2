"""Measures benchmark cases and writes them as JSON: `python -m benchmarks.run --help`."""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

import culax  # noqa: F401  (registers the ops)
from benchmarks import registry, report, roofline, summary, timing
from benchmarks.case import Call, Case, Gate, Inputs, Outputs, Peer, Prepare, Timing
from benchmarks.verify import verify

DESCRIPTION = """\
Measure the culax ops and their peers, in one process and on the same inputs.

Every implementation first passes the correctness gate of its case against float64; one that fails gets no speed
figure. Times are medians over rotating inputs after warm-ups. Modes:
  eager     wall time of a call, device work included
  graph     time of a call inside a CUDA graph (CUDA)
  kernels   time of the kernels of a call, summed by the profiler (CUDA)
  overhead  host time of an eager call in us, the device running behind, and what of it allocates the outputs: wall
            time, and CPU time of the calling thread, which other work on the host does not lengthen
  memory    memory that a call takes beyond its inputs, at its highest (CUDA)
TFLOP/s and TB/s count only the work that the operation needs; share is the part of the roofline reached, from the
graph time where there is one."""


@dataclass(frozen=True)
class Settings:
    """How to measure: modes, repeats, warm-ups, number of rotating input sets, seconds one timer may take."""

    modes: tuple[str, ...]
    repeats: int = 30
    warmups: int = 5
    sets: int = 3
    budget_s: float = 20.0


@dataclass(frozen=True)
class Result:
    """One implementation of one case. `reason` says why there is no figure, where there is none."""

    case: str
    op: str
    implementation: str
    device: str
    dtype: str
    shape: dict[str, int | str]
    gate: Gate | None
    timing: Timing
    floor_ms: float
    tflops: float | None = None
    tb_per_s: float | None = None
    roofline_share: float | None = None
    reason: str | None = None


def measure_case(case: Case, settings: Settings, only: Sequence[str] = ()) -> list[Result]:
    """Gate every implementation of `case` (those named in `only`, when given), then measure those that passed.

    Times are taken in turn, a call of each implementation after the other: clocks and power limits of a device follow
    the load, and must not favour who runs first.
    """
    inputs = [case.make_inputs(seed) for seed in range(settings.sets)]
    truth = case.truth(inputs[0])
    judged: dict[str, tuple[Gate | None, str | None]] = {}
    bound: dict[str, list[Call]] = {}
    captured: list[str] = []
    for name, implementation in case.implementations().items():
        if only and name not in only:
            continue
        peer = implementation if isinstance(implementation, Peer) else Peer(implementation)
        gate, reason = None, peer.reason
        if peer.prepare is not None:
            gate, reason = _judge(case, peer.prepare, inputs[0], truth)
            if gate is not None and gate.ok:
                bound[name] = [peer.prepare(each) for each in inputs]
                captured += [name] * peer.captured
        judged[name] = gate, reason
    del truth
    gc.collect()
    times = _time(bound, captured, case.device, settings)
    return [_result(case, name, gate, times.get(name, Timing()), reason) for name, (gate, reason) in judged.items()]


def _judge(case: Case, prepare: Prepare, inputs: Inputs, truth: Outputs) -> tuple[Gate | None, str | None]:
    """The gate, and why there is no figure behind it; a peer may raise anything, and the run goes on."""
    try:
        gate = verify(case, prepare, inputs, truth)
    except Exception as error:
        return None, f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if gate.ok:
        return gate, None
    return gate, f"wrong: error {gate.error:.2e} at {gate.worst}, bound {gate.bound:.0e}"


def _result(case: Case, name: str, gate: Gate | None, measured: Timing, reason: str | None) -> Result:
    cost, ceilings = case.cost(), roofline.ceilings(case.device, case.dtype)
    ms = measured.best_ms
    return Result(
        case=case.name,
        op=case.op,
        implementation=name,
        device=case.device,
        dtype=str(case.dtype).removeprefix("torch."),
        shape=case.shape(),
        gate=gate,
        timing=measured,
        floor_ms=roofline.floor_ms(cost, ceilings),
        tflops=cost.flops / ms / 1e9 if ms else None,
        tb_per_s=cost.bytes / ms / 1e9 if ms else None,
        roofline_share=roofline.share(ms, cost, ceilings) if ms else None,
        reason=reason,
    )


def _time(bound: dict[str, list[Call]], captured: list[str], device: str, settings: Settings) -> dict[str, Timing]:
    """Medians by implementation, of every mode that was asked for and exists on the device; graphs of `captured`."""
    warmups, repeats, cuda = settings.warmups, settings.repeats, device == "cuda"
    times: dict[str, dict[str, float]] = {name: {} for name in bound}
    if "eager" in settings.modes:
        for name, ms in timing.eager_ms(bound, device, warmups, repeats, settings.budget_s).items():
            times[name]["eager_ms"] = statistics.median(ms)
    if "graph" in settings.modes and cuda:
        for name, ms in timing.graph_ms({name: bound[name] for name in captured}, warmups, repeats).items():
            times[name]["graph_ms"] = statistics.median(ms)
    for name, calls in bound.items():
        if "overhead" in settings.modes:
            for part, meter in (("overhead", timing.overhead_us), ("allocation", timing.allocation_us)):
                times[name][f"{part}_us"], times[name][f"{part}_cpu_us"] = meter(calls, device, repeats)
        if "memory" in settings.modes and cuda:
            times[name]["peak_mib"] = timing.peak_mib(calls)
    if "kernels" in settings.modes and cuda:  # last: a profiler that has run may lengthen later launches
        for name, calls in bound.items():
            times[name]["kernels_ms"] = timing.kernels_ms(calls, warmups)
    return {name: Timing(**found) for name, found in times.items()}


def document(results: list[Result], device: str, commit: str | None) -> dict[str, Any]:
    """The JSON document: machine, commit, date, and the results."""
    return {
        **report.head(device, commit),
        "ceilings": [asdict(c) for c in {roofline.ceilings(device, getattr(torch, r.dtype)) for r in results}],
        "results": [asdict(result) for result in results],
    }


def table(results: list[Result]) -> Table:
    """The results as a table, a row an implementation; columns that nothing was measured for are left out."""
    ours = {r.case: r.timing.best_ms for r in results if r.implementation == "culax"}

    def against(r: Result) -> str | None:
        base, ms = ours.get(r.case), r.timing.best_ms
        return f"{ms / base:.2f}x" if ms and base and r.implementation != "culax" else None

    columns: dict[str, list[str | None]] = {
        "case": [r.case for r in results],
        "by": [r.implementation for r in results],
        "error": [_shown(r.gate.error if r.gate else None, ".1e") for r in results],
        "eager ms": [_shown(r.timing.eager_ms) for r in results],
        "graph ms": [_shown(r.timing.graph_ms) for r in results],
        "kernels ms": [_shown(r.timing.kernels_ms) for r in results],
        "host us": [_shown(r.timing.overhead_us) for r in results],
        "CPU us": [_shown(r.timing.overhead_cpu_us) for r in results],
        "alloc host us": [_shown(r.timing.allocation_us) for r in results],
        "alloc CPU us": [_shown(r.timing.allocation_cpu_us) for r in results],
        "MiB": [_shown(r.timing.peak_mib) for r in results],
        "TFLOP/s": [_shown(r.tflops) for r in results],
        "TB/s": [_shown(r.tb_per_s) for r in results],
        "share": [_shown(r.roofline_share, ".1%") for r in results],
        "time / culax": [against(r) for r in results],
        "note": [r.reason for r in results],
    }
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    shown = Table(title="culax benchmarks", box=SIMPLE_HEAD)
    for name in kept:
        text = name in ("case", "by", "note")
        shown.add_column(name, justify="left" if text else "right", no_wrap=name != "note")
    for row in zip(*kept.values()):
        shown.add_row(*(escape(cell or "") for cell in row))
    return shown


def _shown(figure: float | None, style: str = ".4g") -> str | None:
    return None if figure is None else format(figure, style)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--case", action="append", default=[], metavar="PATTERN", help="shell pattern; repeatable")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument(
        "--impl", action="append", default=[], metavar="NAME", help="only culax, torch, fla ...; repeatable"
    )
    parser.add_argument("--mode", action="append", choices=timing.MODES, help="repeatable; default: eager and graph")
    parser.add_argument("--repeats", type=int, default=30, help="timed calls (default: %(default)s)")
    parser.add_argument("--warmups", type=int, default=5, help="calls before (default: %(default)s)")
    parser.add_argument("--sets", type=int, default=3, help="rotating input sets (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds one timer may take (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--commit", default=None, help="the commit measured, where the sources are no checkout")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="merge the key figures into this JSON file")
    return parser


def _save(args: argparse.Namespace, results: list[Result], device: str) -> None:
    """Write what was asked for from the results so far."""
    if args.output:
        report.save(document(results, device, args.commit), args.output)
    if args.summary:
        summary.merge(args.summary, summary.fields(results))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0 only if every implementation of ours that ran was right."""
    args = _parser().parse_args(argv)
    if args.list:
        for case in registry.cases():
            print(f"{case.device:5} {case.name}")
        return 0
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings(tuple(args.mode or ("eager", "graph")), args.repeats, args.warmups, args.sets, args.budget)
    try:
        chosen = registry.select(args.case, device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    results: list[Result] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(chosen))
        for case in chosen:
            progress.update(task, description=case.name)
            results += measure_case(case, settings, args.impl)
            _save(args, results, device)  # at once: a fault of the device in a later case ends the process
            progress.advance(task)
    # Piped output has no width of its own: take what the table needs.
    Console(width=None if sys.stdout.isatty() else 180).print(table(results))
    ours = [r for r in results if r.implementation == "culax"]
    return int(not ours or any(r.gate is None or not r.gate.ok or r.reason for r in ours))


if __name__ == "__main__":
    sys.exit(main())
