"""Errors by gradient and place: a planted one shows where it is, figures are compared with the best peer's."""

import json

import pytest
import torch

from benchmarks import accuracy
from benchmarks.accuracy import Error
from benchmarks.kda import KdaCase

CASE = KdaCase("tiny", 1, 140, 2, 16, 16, dtype=torch.float32, device="cpu")


def test_a_wrong_chunk_of_one_head_shows_in_its_places():
    inputs = accuracy.with_gates(CASE.make_inputs(0), "strong", 0)
    truth = CASE.recurrence_gradients(inputs)
    wrong = {name: x.clone() for name, x in truth.items()}
    wrong["dq"][:, 64:128, 1] *= 1.1
    wrong["dinitial_state"][:, 1] *= 1.1
    errors = accuracy.errors_of(wrong, truth)
    for name in ("dq", "dinitial_state"):
        assert errors[name]["head and chunk"] == pytest.approx(0.1)
        assert 0.01 < errors[name]["all"] < errors[name]["head"] <= errors[name]["head and chunk"] * 1.0001
    assert not any(errors["dk"].values())


@pytest.mark.parametrize("kind", accuracy.GATES)
def test_gates_are_what_every_implementation_takes(kind):
    g = accuracy.with_gates(CASE.make_inputs(0), kind, 0)["g"]
    assert g.dtype == torch.float32 and -5 <= g.min() < g.max() <= 0
    assert not torch.equal(g, accuracy.with_gates(CASE.make_inputs(0), kind, 1)["g"])


def test_ratio_is_to_the_best_peer():
    found = [Error("mild", name, "dq", {"all": x}) for name, x in (("culax", 3e-3), ("fla", 2e-3), ("other", 4e-3))]
    assert accuracy.compared(found) == {"all": pytest.approx(1.5)}
    assert accuracy.compared(found[:1]) == {}


def test_command_writes_a_document_and_a_table(tmp_path, capsys):
    file, page = tmp_path / "errors.json", tmp_path / "page.md"
    page.write_text("before\n{}\n{}\nafter\n".format(*accuracy.MARKERS))
    sizes = ["--tokens", "70", "--heads", "1", "--key-dim", "8", "--value-dim", "8", "--seeds", "1", "--commit", "abc"]
    assert accuracy.main(["--device", "cpu", *sizes, "--output", str(file)]) == 0
    document = json.loads(file.read_text())
    assert len(document["results"]) == 3 * 6 and document["commit"] == "abc"
    assert all(error < 1e-5 for result in document["results"] for error in result["errors"].values())
    assert accuracy.main(["--from", str(file), "--write", str(page)]) == 0
    assert page.read_text().startswith("before\n") and "| strong | dbeta |" in page.read_text()
    assert "| mild | dq |" in capsys.readouterr().out
