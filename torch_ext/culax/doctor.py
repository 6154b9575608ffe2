"""`python -m culax`: what is installed, what runs where on this machine, and whether it is right."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from culax import doctor_checks
from culax.doctor_checks import Check

DESCRIPTION = """\
Run both ops, forward and backward, on every device and in every mode it has, against float64.
The exit status is 0 only if all that ran is right. `python -m culax build --help` is about kernels."""


def facts() -> dict[str, str]:
    """Versions, devices, kernels and schema source, each as a phrase a user can read."""
    import culax

    found = {
        "culax": culax.__version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "op schemas": schema_source(),
        "kernel loader": _package("apache-tvm-ffi", "missing: built kernels cannot be loaded"),
        "kernel compiler": _package(
            "nvidia-cutlass-dsl", "not installed: pip install 'nvidia-cutlass-dsl[cu13]' cuda-bindings"
        ),
        "built kernels": _built_kernels(),
    }
    return found | _devices()


def schema_source() -> str:
    """Where the op schemas come from: the compiled stub, or Python with the reason."""
    from culax import ops

    if ops.schema_source == "compiled stub":
        return "compiled stub: processes without Python can load code that calls the ops"
    note = ops.schema_note or "there is no compiled stub (installed without a C++ compiler, or not built yet)"
    return f"declared by Python: {note}"


def _package(name: str, otherwise: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return otherwise


def _built_kernels() -> str:
    from culax.runtime import manifest

    root = Path(__file__).parent / "_aot"
    counts = {folder.name: len(manifest.read(folder)) for folder in sorted(root.glob("*")) if folder.is_dir()}
    listed = ", ".join(f"{arch}: {n}{_unverified(arch)}" for arch, n in counts.items() if n)
    return listed or "none: python -m culax build --arch sm_90a"


def _unverified(arch: str) -> str:
    """What to say beside an architecture whose kernels have never run."""
    from culax.grouped_wgrad import plan_sm100

    return f" (kernels {plan_sm100.UNVERIFIED})" if arch in plan_sm100.ARCHS else ""


def _devices() -> dict[str, str]:
    from culax.runtime.arch import arch_of

    found = {"cpu": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        arch = arch_of(torch.device("cuda", i)) or "no kernels for this architecture"
        found[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)}, capability {major}.{minor}, {arch}{_unverified(arch)}"
    if not torch.cuda.is_available():
        reason = "torch was built without CUDA" if torch.version.cuda is None else "no device or driver found"
        found["cuda"] = f"none: {reason}"
    return found


def is_right(checks: Sequence[Check]) -> bool:
    """Whether something ran, and all that ran gave the right result."""
    ran = [check for check in checks if check.status != "not run"]
    return bool(ran) and all(check.status == "right" for check in ran)


def facts_table(found: dict[str, str]) -> Table:
    """Two columns: what, and its state."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in found.items():
        table.add_row(name, escape(value))
    return table


def checks_table(checks: Sequence[Check]) -> Table:
    """One row a check, a block a device; reasons are numbered in the last column and spelled out below the table."""
    table = Table(title="checked against float64", box=SIMPLE_HEAD, caption_justify="left", caption_style="")
    for column in ("op", "mode", "result"):
        table.add_column(column, no_wrap=True)
    for column in ("error", "bound", "ms", "note"):
        table.add_column(column, justify="right", no_wrap=True)
    reasons: dict[str, int] = {}
    device = ""
    for check in checks:
        if device != (device := f"{check.device}, {check.dtype}"):
            table.add_section()
            table.add_row(f"[bold]{device}[/]")
        reason = f"the worst error is in {check.worst}" if check.status == "wrong" else check.reason
        note = str(reasons.setdefault(reason, len(reasons) + 1)) if reason else ""
        error = "" if check.error is None else f"{check.error:.1e}"
        bound = "" if check.bound is None else f"{check.bound:.0e}"
        ms = "" if check.ms is None else f"{check.ms:.0f}" if check.ms >= 100 else f"{check.ms:.3g}"
        style = {"right": "green", "not run": "dim"}.get(check.status, "bold red")
        table.add_row(check.op, check.mode, f"[{style}]{check.status}[/]", error, bound, ms, note)
    table.caption = "\n".join(f"{number}: {escape(reason)}" for reason, number in reasons.items())
    return table


def _run_checks() -> list[Check]:
    checks: list[Check] = []
    columns = (TextColumn("checking {task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("ops", total=doctor_checks.count())
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the shapes are too small to share, and threads that wait cost most on a busy machine
        try:
            for pair in doctor_checks.run():
                checks += pair
                bar.update(task, advance=1, description=f"{pair[0].op} on {pair[0].device}")
        finally:
            torch.set_num_threads(threads)
    return checks


def main(argv: Sequence[str]) -> int:
    """Run the command line; return 0 only if all that ran is right."""
    parser = argparse.ArgumentParser(
        prog="python -m culax", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(argv)
    found, checks = facts(), _run_checks()
    right = is_right(checks)
    if options.json:
        print(json.dumps({"facts": found, "checks": [asdict(check) for check in checks], "right": right}, indent=1))
        return int(not right)
    console = Console()
    console.print(facts_table(found))
    console.print(checks_table(checks))
    ran = sum(check.status != "not run" for check in checks)
    if right:
        console.print(f"All {ran} checks that ran are right.", style="green")
    else:
        wrong = sum(check.status in ("wrong", "failed") for check in checks)
        console.print(f"{wrong} of the {ran} checks that ran are not right.", style="bold red")
    return int(not right)
