"""How compute-sanitizer's runs are judged by what they print, and what they select."""

from __future__ import annotations

import subprocess
import sys

import pytest
from _pytest.mark.expression import Expression

from tests.gpu import sanitize
from tests.gpu.sanitize import Run

RUN = Run("racecheck", "scans", sanitize.KDA, "test_scans")
PASSED = "1 passed, 75 deselected in 4.66s\n"
CLEAN = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
HAZARD = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"


@pytest.mark.parametrize(
    ("status", "text", "state"),
    [
        (0, PASSED + CLEAN, "clean"),
        (0, PASSED + "========= ERROR SUMMARY: 0 errors\n", "clean"),
        (0, PASSED + HAZARD, "reported"),
        (0, PASSED + "========= ERROR SUMMARY: 3 errors\n", "reported"),
        (1, "==== 1 failed, 2 passed in 3.1s ====\n" + CLEAN, "tests failed"),
        (5, "76 deselected in 1.2s\n" + CLEAN, "tests failed"),
        (None, PASSED, "did not end"),
        (1, "Error: no device\n", "did not end"),
    ],
)
def test_states(status: int | None, text: str, state: str) -> None:
    assert sanitize.judged(RUN, status, text, 1.0).state == state


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_filters(tool: str) -> None:
    """initcheck must see who else writes; the others look at culax's kernels, with whatever option there is."""
    text = "  --kernel-name arg   which kernels\n"
    expected = [] if tool == "initcheck" else ["--kernel-name", "kns=kernel_cutlass"]
    assert sanitize.filters(text, tool) == expected
    assert sanitize.filters("--tool arg", tool) == []


def test_no_selection_is_empty() -> None:
    """A test that was renamed must not drop out of the runs unseen."""
    runs = sanitize.runs()
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command += sorted({run.file for run in runs})
    names = subprocess.run(command, cwd=sanitize.ROOT, capture_output=True, text=True).stdout.split()
    for run in runs:
        selected = Expression.compile(run.tests)
        of_file = (name for name in names if name.startswith(run.file))
        assert any(selected.evaluate(lambda word, name=name, **_: word in name) for name in of_file), run.key


def test_every_kernel_is_run_by_every_tool() -> None:
    keys = {run.key for run in sanitize.runs()}
    assert len(keys) == len(sanitize.runs())
    assert {key.partition("-")[0] for key in keys} == {"memcheck", "racecheck", "initcheck"}
    assert {"racecheck-scans", "racecheck-local", "racecheck-gemm_scaled", "initcheck-kda", "memcheck-gemm"} <= keys
