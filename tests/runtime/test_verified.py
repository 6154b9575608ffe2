"""The record of what ran on hardware holds for today's sources, and the README says the same."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from culax.runtime import sources
from culax.runtime.variants import Variant
from tests.gpu import matrix, record, verified
from tests.gpu.verified import CALLED, Record, Verified

DSL = "4.8.1"
KEY = "sm_90a/made.up.stages.scale"
RUN = {"device": "GPU", "driver": "1", "torch": "2", "tvm_ffi": "3", "date": "2026-01-01"}


def _sets(sample) -> dict:
    sources.forget()
    return {KEY: sample.variants}


def _entry(sample) -> Verified:
    sources.forget()
    return Verified(sources.set_hash(sample.variants, DSL), 2, 1, dsl=DSL, passed=5, skipped=0, **RUN)


def test_every_kernel_set_is_verified_as_it_is_or_listed_with_a_reason() -> None:
    dsl = sources.dsl_version()
    assert dsl is not None
    sources.forget()
    assert verified.problems(verified.read(), verified.kernel_sets(), dsl) == []


def test_readme_shows_the_record() -> None:
    text = record.README.read_text()
    assert matrix.inserted(text, matrix.MARKERS, matrix.table(verified.read(), verified.kernel_sets())) == text, (
        "run python -m tests.gpu.matrix --write README.md"
    )


def test_a_record_holds_until_a_source_changes(sample) -> None:
    known = Record({KEY: _entry(sample)})
    assert verified.problems(known, _sets(sample), DSL) == []
    sample.edit("device/math.py", "value * factor", "factor * value")
    assert verified.problems(known, _sets(sample), DSL) == [
        f"{KEY} was verified with other sources, or another compiler: run make gpu-test"
    ]


def test_a_record_holds_for_its_compiler_and_its_variants_only(sample) -> None:
    known = Record({KEY: _entry(sample)})
    assert len(verified.problems(known, _sets(sample), "4.8.2")) == 1
    assert len(verified.problems(known, {KEY: sample.variants[:1]}, DSL)) == 1


def test_what_is_not_verified_needs_a_reason(sample) -> None:
    assert verified.problems(Record(), _sets(sample), DSL) == [f"{KEY} is neither verified nor listed as unverified"]
    assert verified.problems(Record(unverified={KEY: "no hardware"}), _sets(sample), DSL) == []
    assert verified.problems(Record(unverified={KEY: " "}), _sets(sample), DSL) == [
        f"{KEY} is listed as unverified without a reason"
    ]


def test_sets_that_are_gone_must_leave_the_record(sample) -> None:
    gone = Record({"sm_90a/gone": _entry(sample)}, {KEY: "no hardware", "sm_90a/lost": "no hardware"})
    assert verified.problems(gone, _sets(sample), DSL) == [
        "sm_90a/gone is in the record but not a kernel set",
        "sm_90a/lost is in the record but not a kernel set",
    ]
    assert verified.mark_unverified(gone, _sets(sample), DSL, "changed") == Record({}, {KEY: "no hardware"})


def test_marking_lists_what_changed_and_clears_what_holds(sample) -> None:
    known = Record({KEY: _entry(sample)}, {KEY: "changed"})
    assert verified.mark_unverified(known, _sets(sample), DSL, "new").unverified == {}
    sample.edit("device/math.py", "value * factor", "factor * value")
    assert verified.mark_unverified(known, _sets(sample), DSL, "new").unverified == {KEY: "changed"}
    assert verified.mark_unverified(Record(known.verified), _sets(sample), DSL, "new").unverified == {KEY: "new"}


def test_record_is_written_and_read_back(sample, tmp_path: Path) -> None:
    known = Record({KEY: _entry(sample)}, {"b": "reason", "a": "reason"})
    verified.write(known, tmp_path / "record.json")
    assert verified.read(tmp_path / "record.json") == known
    assert list(json.loads((tmp_path / "record.json").read_text())["unverified"]) == ["a", "b"]


def _report(nodeid: str, when: str, outcome: str, called: tuple[str, ...] = ()) -> pytest.TestReport:
    properties = [(CALLED, list(called))]
    return pytest.TestReport(nodeid, ("f", 0, nodeid), {}, outcome, None, when, user_properties=properties)  # type: ignore[arg-type]


def test_outcomes_count_each_test_once_and_a_failure_anywhere() -> None:
    outcomes = record.Outcomes()
    for when in ("setup", "call", "teardown"):
        outcomes.pytest_runtest_logreport(_report("passes", when, "passed"))
        outcomes.pytest_runtest_logreport(
            _report("fails in the end", when, "failed" if when == "teardown" else "passed")
        )
    outcomes.pytest_runtest_logreport(_report("skips", "setup", "skipped"))
    outcomes.pytest_runtest_logreport(_report("errors", "setup", "failed"))
    assert outcomes.counts() == Counter(passed=1, failed=2, skipped=1)


def _passed(count: int, variant: Variant, outcomes: record.Outcomes | None = None) -> record.Outcomes:
    """Outcomes of a run whose last test called `variant`."""
    outcomes = outcomes or record.Outcomes()
    for number in range(count):
        called = (f"{variant.arch}/{variant.name}",) if number == count - 1 else ()
        outcomes.pytest_runtest_logreport(_report(f"test {number}", "call", "passed", called))
    return outcomes


def test_a_run_verifies_the_sets_it_called(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = _passed(5, sample.variants[0])
    cold = {f"{KEY}_cold": (dataclasses.replace(sample.variants[1], name="cold"),)}
    monkeypatch.setattr(verified, "kernel_sets", lambda archs=(): {**_sets(sample), **cold})
    known = record.updated(Record(unverified={KEY: "changed"}), "sm_90a", RUN, outcomes, DSL)
    assert known == Record({KEY: _entry(sample)}, {f"{KEY}_cold": "not called by any GPU test"})


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(1, "failed"), (1, "passed"), (5, ""), (0, "skipped")],
    ids=["fail", "error", "none", "skip"],
)
def test_a_run_that_did_not_pass_records_nothing(tmp_path, monkeypatch, capsys, status: int, outcome: str) -> None:
    def run(arguments: list[str], plugins: list[record.Outcomes]) -> int:
        if outcome:
            plugins[0].pytest_runtest_logreport(_report("test", "call", outcome))
        return status

    monkeypatch.setattr(record.pytest, "main", run)
    monkeypatch.setattr(record.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "arch_of", lambda device: "sm_90a")
    assert record.main(["--output", str(tmp_path / "record.json")]) == 1
    assert not (tmp_path / "record.json").exists()
    assert "nothing recorded" in capsys.readouterr().out


def test_a_run_that_passed_is_recorded_with_what_it_ran_on(sample, tmp_path, monkeypatch) -> None:
    def run(arguments: list[str], plugins: list[record.Outcomes]) -> int:
        _passed(5, sample.variants[0], plugins[0])
        return 0

    monkeypatch.setattr(record.pytest, "main", run)
    monkeypatch.setattr(record.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record.torch.cuda, "get_device_name", lambda index: "GPU")
    monkeypatch.setattr(record, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(record, "_driver", lambda: "1")
    monkeypatch.setattr(record, "_dsl", lambda arch: DSL)
    monkeypatch.setattr(record.library, "tvm_ffi_version", lambda: "3")
    monkeypatch.setattr(verified, "kernel_sets", lambda archs=(): _sets(sample))
    assert record.main(["--output", str(tmp_path / "record.json")]) == 0
    entry = verified.read(tmp_path / "record.json").verified[KEY]
    today = record.datetime.date.today().isoformat()
    assert entry == dataclasses.replace(_entry(sample), torch=record.torch.__version__, date=today)


def test_matrix_has_a_row_for_every_set_with_its_proof_or_reason(sample) -> None:
    other = {
        "sm_100a/made.up.stages.gemm": (dataclasses.replace(sample.variants[0], op="grouped_wgrad", arch="sm_100a"),)
    }
    known = Record({KEY: _entry(sample)}, {"sm_100a/made.up.stages.gemm": "no such GPU at hand"})
    lines = matrix.table(known, {**_sets(sample), **other}).splitlines()
    assert lines[2] == (
        "| `grouped_wgrad`, `_out`, `_out_list` | gemm | Blackwell (SM100) | **unverified** | no such GPU at hand |"
    )
    assert lines[3].startswith("| sample | scale | Hopper (SM90) | verified, 1 of 2 variants called | GPU, driver 1, ")
    assert lines[3].endswith("2026-01-01: 5 tests passed, 0 skipped |")
    assert len(lines) == 4


def test_matrix_goes_between_the_markers_and_nowhere_else() -> None:
    begin, end = matrix.MARKERS
    text = f"before\n{begin}\nold\n{end}\nafter\n"
    assert matrix.inserted(text, matrix.MARKERS, "new") == f"before\n{begin}\nnew\n{end}\nafter\n"
    with pytest.raises(ValueError, match="expected"):
        matrix.inserted("no markers", matrix.MARKERS, "new")
