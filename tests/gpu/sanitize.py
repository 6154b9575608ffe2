"""Run compute-sanitizer over small tests of every kernel on this machine's GPU.

    python -m tests.gpu.sanitize [--only PATTERN] [--jobs 3] [--limit 150] [--total 195] [--output FILE]

Each run is one tool on one selection of tests, in a process of its own. memcheck and racecheck look at culax's kernels
alone, which is what makes them end; initcheck must see torch's writes too. Exit status 0 only if every run ended with
its tests passed and nothing reported. What racecheck cannot follow, and so reports, is in kda/README.md and
grouped_wgrad/README.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KDA, WGRAD, SCALED = (f"tests/gpu/test_{name}.py" for name in ("kda_stages", "wgrad_kernel", "wgrad_scaled"))
ONE_HEAD, ONE_CTA = "one_head_rings_go_round", "one_head_alone_in_its_cluster"
SMALL = "rings_go_round"
PLAIN_NAMES = "(bf16_bf16_mn_mn_list_sm90 or bf16_fp32_ragged_list_add_sm90 or bf16_bf16_k_k_sm90)"
SCALED_NAMES = "(mx_e4m3_e4m3_bf16_2d_list_sm90 or mx_e5m2_e4m3_fp32_ragged_list_add_sm90 or nvfp4_bf16_2d_sm90)"


@dataclass(frozen=True)
class Run:
    """One tool on the tests of a file that a pytest expression selects."""

    tool: str
    name: str
    file: str
    tests: str

    @property
    def key(self) -> str:
        """What --only matches."""
        return f"{self.tool}-{self.name}"


@dataclass(frozen=True)
class Result:
    """How a run ended. `state` is "clean", "reported", "tests failed" or "did not end"; `summary` the tool's line."""

    tool: str
    name: str
    state: str
    seconds: float
    summary: str
    tests: str


def runs() -> list[Run]:
    """Every run, those that may take longest first."""
    stages = {
        "scans": f"test_scans and ({ONE_HEAD}-1 or {ONE_HEAD}-2)",
        "summaries_join": f"(test_summaries and {ONE_HEAD}-3) or (test_join and 128-128-True)",
        "prep": f"test_prep and {ONE_HEAD}",
        "local": f"test_local and {ONE_CTA}",
    }
    found = [Run("racecheck", name, KDA, tests) for name, tests in stages.items()]
    small = "test_group_sum or (test_chunk_table and packed_grouped_k64)"
    found.append(Run("racecheck", "chunk_table_group_sum", KDA, small))
    for tool in ("racecheck", "memcheck", "initcheck"):
        found.append(Run(tool, "gemm_scaled", SCALED, f"against_float64 and {SMALL} and {SCALED_NAMES}"))
        found.append(Run(tool, "gemm", WGRAD, f"against_float64 and {SMALL} and {PLAIN_NAMES}"))
        if tool != "racecheck":
            packed = "(packed_grouped_k64 and not v128)"
            found.append(Run(tool, "kda", KDA, f"{ONE_HEAD} or test_group_sum or {packed}"))
    return found


def filters(help_text: str, tool: str) -> list[str]:
    """Options that keep a tool to culax's kernels, where it has them and does not need to see the others."""
    if tool == "initcheck":
        return []
    option = next((name for name in ("--kernel-name", "--kernel-regex") if f"{name} " in help_text), None)
    return [] if option is None else [option, "kns=kernel_cutlass"]


def judged(run: Run, status: int | None, text: str, seconds: float) -> Result:
    """The result of a run that printed `text`; status None: it was stopped."""
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", text)
    tests = re.findall(r"(?m)^=*\s*(\d+ (?:passed|failed).*?)\s*=*$", text)
    counted = re.search(r"SUMMARY: (\d+) ", summary[-1]) if summary else None
    if status is None or counted is None:
        state = "did not end"
    elif int(counted[1]):
        state = "reported"
    else:
        state = "clean" if status == 0 and tests and "passed" in tests[-1] else "tests failed"
    last = summary[-1] if summary else ""
    return Result(run.tool, run.name, state, round(seconds, 1), last, tests[-1] if tests else "")


def _sanitize(run: Run, options: argparse.Namespace, help_text: str, end: float) -> Result:
    left = min(options.limit, end - time.monotonic())
    start = time.monotonic()
    status, log = None, options.logs / f"{run.key}.txt"
    if left > 5:
        command = [options.sanitizer, "--tool", run.tool, "--print-limit", "40", *filters(help_text, run.tool)]
        command += [sys.executable, "-u", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-o", "addopts=--import-mode=importlib", run.file, "-k", run.tests]
        with log.open("w") as output:
            stopping = ["timeout", "-k", "5", str(int(left))]
            done = subprocess.run([*stopping, *command], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        status = None if done.returncode in (124, 137) else done.returncode
    result = judged(run, status, log.read_text(errors="replace") if log.exists() else "", time.monotonic() - start)
    print(
        f"{result.tool:9} {result.name:21} {result.state:12} {result.seconds:6.1f} s  {result.summary}  {result.tests}"
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="runs, as TOOL-NAME; * is any")
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=150, help="seconds of one run (default: %(default)s)")
    parser.add_argument(
        "--total", type=float, default=195, help="seconds after which none goes on (default: %(default)s)"
    )
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program (default: %(default)s)")
    parser.add_argument("--logs", type=Path, help="folder for what the runs print (default: a temporary one)")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    options = parser.parse_args(argv)
    if shutil.which(options.sanitizer) is None:
        parser.error(f"there is no {options.sanitizer} (it comes with the CUDA toolkit)")
    options.logs = options.logs or Path(tempfile.mkdtemp(prefix="sanitize"))
    options.logs.mkdir(parents=True, exist_ok=True)
    help_text = subprocess.run([options.sanitizer, "--help"], capture_output=True, text=True).stdout
    patterns = options.only or ["*"]
    chosen = [run for run in runs() if any(fnmatch.fnmatchcase(run.key, pattern) for pattern in patterns)]
    end = time.monotonic() + options.total
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda run: _sanitize(run, options, help_text, end), chosen))
    if options.output:
        options.output.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return int(not results or any(result.state != "clean" for result in results))


if __name__ == "__main__":
    sys.exit(main())
