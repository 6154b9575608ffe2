"""`python -m culax`: right results pass, planted faults are told, and the exit status follows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from culax import __main__, doctor, doctor_checks
from culax.doctor_checks import Check

ROOT = Path(__file__).parent.parent
CPU = (torch.device("cpu"), torch.float32)


@pytest.fixture
def eager_on_cpu(monkeypatch):
    monkeypatch.setattr(doctor_checks, "MODES", ("eager",))
    monkeypatch.setattr(doctor_checks, "devices", lambda: [CPU])


def report(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def test_whole_doctor_is_right_in_a_fresh_process():
    paths = os.pathsep.join([str(ROOT / "torch_ext"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    command = [sys.executable, "-m", "culax", "--json"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    ran = {(c["op"], c["mode"]) for c in found["checks"] if c["device"] == "cpu" and c["status"] == "right"}
    ops = ("kda_fwd", "kda_bwd", "grouped_mm", "grouped_wgrad")
    assert ran == {(op, mode) for op in ops for mode in ("eager", "torch.compile")}
    assert all(c["error"] <= c["bound"] and c["ms"] > 0 for c in found["checks"] if c["status"] == "right")
    assert all(c["reason"] for c in found["checks"] if c["status"] == "not run")
    assert {"torch", "op schemas", "kernel loader", "kernel compiler", "built kernels", "cpu"} <= found["facts"].keys()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("subject", doctor_checks.SUBJECTS, ids=lambda subject: subject.__name__)
def test_planted_error_in_one_group_is_wrong(eager_on_cpu, monkeypatch, capsys, subject, direction):
    """A factor 1.001 on one head or expert only, in the forward or in the backward."""
    right = subject.function

    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            factor = torch.ones(x.shape[-2:]).index_fill_(0, torch.tensor([1]), 1.001)
            ctx.save_for_backward(factor)
            return x * factor if direction == "forward" else x.clone()

        @staticmethod
        def backward(ctx, gradient):
            (factor,) = ctx.saved_tensors
            return gradient * factor if direction == "backward" else gradient

    def wrong(self, *inputs):
        first, *others = right(self, *inputs)
        return (Planted.apply(first), *others)

    monkeypatch.setattr(subject, "function", wrong)
    assert doctor.main(["--json"]) == 1
    found = report(capsys)
    assert found["right"] is False
    op = subject.forward_op if direction == "forward" else subject.backward_op
    statuses = {c["op"]: c["status"] for c in found["checks"]}
    assert statuses.pop(op) == "wrong" and set(statuses.values()) == {"right"}


def test_an_op_that_raises_is_failed_with_its_message(eager_on_cpu, monkeypatch, capsys):
    def broken(self, *inputs):
        raise RuntimeError("no such [thing]\nmore")

    monkeypatch.setattr(doctor_checks.Kda, "function", broken)
    assert doctor.main([]) == 1
    shown = capsys.readouterr().out
    assert "RuntimeError: no such [thing]" in shown and "2 of the 4 checks that ran are not right" in shown


def test_values_that_are_not_finite_are_wrong():
    truth = {"y": torch.ones(2, 3, dtype=torch.float64)}
    wrong = torch.ones(2, 3)
    wrong[1, 2] = torch.nan
    assert doctor_checks._worst([wrong], truth, doctor_checks.GroupedLinear.groups) == (torch.inf, "y")


def test_nothing_run_is_not_right():
    skipped = Check("cpu", "float32", "kda_fwd", "CUDA graph", "not run", reason="no device")
    passed = Check("cpu", "float32", "kda_fwd", "eager", "right", 0.0, 1.0)
    assert not doctor.is_right([]) and not doctor.is_right([skipped]) and doctor.is_right([skipped, passed])


def test_missing_packages_are_named():
    assert doctor._package("no-such-package-here", "missing") == "missing"


def test_compile_without_a_compiler_is_not_run(monkeypatch):
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda name: None)
    assert "C++ compiler" in doctor_checks._why_not("torch.compile", CPU[0])
    assert doctor_checks._why_not("eager", CPU[0]) == ""


def test_build_goes_to_the_builder(monkeypatch):
    from culax.runtime import build

    seen = []
    monkeypatch.setattr(build, "main", lambda argv: seen.append(argv) or 7)
    assert __main__.main(["build", "--arch", "sm_90a"]) == 7 and seen == [["--arch", "sm_90a"]]
