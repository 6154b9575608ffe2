"""Run tests/gpu on this machine's GPU and, if every test passes, record what ran in ``verified.json``.

    python -m tests.gpu.record [--output FILE] [--jobs N]
    python -m tests.gpu.record --mark-unverified REASON     (no GPU: list the kernel sets whose record doesn't hold)

Exit status 0 only if all tests passed; on a failure nothing is recorded.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from culax.runtime import library, manifest, sources
from culax.runtime.arch import arch_of
from culax.runtime.build import AOT
from tests.gpu import matrix, verified
from tests.gpu.verified import CALLED, Record, Verified

README = Path(__file__).resolve().parents[2] / "README.md"


class Outcomes:
    """A pytest plugin that counts tests by outcome, and collects the kernels they called, as ARCH/NAME."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self.called: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == CALLED:
                self.called.update(value)
        if report.failed:
            self.of[report.nodeid] = "failed"
        elif report.skipped or report.when == "call":
            self.of.setdefault(report.nodeid, report.outcome)

    def counts(self) -> Counter[str]:
        return Counter(self.of.values())


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _dsl(arch: str) -> str:
    """Compiler version of the kernels that the run loaded."""
    versions = {entry.dsl for entry in manifest.read(AOT / arch).values()} or {sources.dsl_version() or ""}
    if len(versions) != 1 or not (version := versions.pop()):
        raise RuntimeError(f"kernels of {arch} were built by compilers of several versions: {sorted(versions)}")
    return version


def updated(record: Record, arch: str, run: dict[str, str], outcomes: Outcomes, dsl: str) -> Record:
    """The record after a run on `arch` in which everything passed: sets that were called are verified by it."""
    counts = outcomes.counts()
    known = dict(record.verified)
    unverified = dict(record.unverified)
    for key, variants in verified.kernel_sets([arch]).items():
        used = [variant for variant in variants if f"{arch}/{variant.name}" in outcomes.called]
        if not used:
            continue
        unverified.pop(key, None)
        known[key] = Verified(
            hash=sources.set_hash(variants, dsl),
            variants=len(variants),
            called=len(used),
            passed=counts["passed"],
            skipped=counts["skipped"],
            dsl=dsl,
            **run,
        )
    return verified.mark_unverified(
        Record(known, unverified), verified.kernel_sets(), dsl, "not called by any GPU test"
    )


def _write(record: Record, file: Path) -> None:
    """Write the record; the README's matrix follows the one in this folder."""
    verified.write(record, file)
    if file.resolve() == verified.FILE:
        matrix.main(["--write", str(README)])


def main(argv: list[str] | None = None) -> int:
    """Run the tests and record, or mark what isn't verified."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.record", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=verified.FILE, help="the record to write")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the tests (pytest-xdist)")
    parser.add_argument("--mark-unverified", metavar="REASON", help="run nothing; list sets whose record doesn't hold")
    options = parser.parse_args(argv)
    record = verified.read()
    if options.mark_unverified:
        dsl = sources.dsl_version()
        if dsl is None:
            parser.error("--mark-unverified needs the kernel compiler, to know its version")
        record = verified.mark_unverified(record, verified.kernel_sets(), dsl, options.mark_unverified)
        _write(record, options.output)
        return 0
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    outcomes = Outcomes()
    arguments = [os.path.dirname(__file__), "-p", "no:cacheprovider"]
    if importlib.util.find_spec("pytest_timeout") is None:  # then the project's `timeout` option is unknown
        arguments += ["-o", "addopts=-ra --strict-markers --import-mode=importlib"]
    if options.jobs > 1:
        arguments += ["-n", str(options.jobs)]
    status = pytest.main(arguments, plugins=[outcomes])
    counts = outcomes.counts()
    print(f"tests/gpu: {dict(counts)}")
    arch = arch_of(torch.device("cuda", 0))
    if status or counts["failed"] or not counts["passed"]:
        print("nothing recorded: not every test passed")
        return 1
    if arch is None:
        print("nothing recorded: no kernels exist for this device")
        return 0
    run = {
        "device": torch.cuda.get_device_name(0),
        "driver": _driver(),
        "torch": torch.__version__,
        "tvm_ffi": library.tvm_ffi_version(),
        "date": datetime.date.today().isoformat(),
    }
    record = updated(record, arch, run, outcomes, _dsl(arch))
    _write(record, options.output)
    print(matrix.table(record, verified.kernel_sets()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
