import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import train_tiny_lm
from examples.train_tiny_lm import Settings, train

REPO = Path(__file__).parents[2]
# The default model, cut to what two cores train in seconds.
SMALL = Settings(steps=40, batch=2, length=96, width=64, heads=1, blocks=1, expert_width=64, experts=4)
BOUND = 1e-3


@pytest.fixture(scope="module")
def eager() -> list[float]:
    torch.set_num_threads(1)
    return train(SMALL, "cpu", "eager")[0]


def test_loss_falls_clearly(eager: list[float]) -> None:
    """From the uniform guess to well below it; the text's own character frequencies give 3.0."""
    _, vocabulary = train_tiny_lm.load_text()
    assert eager[0] == pytest.approx(math.log(vocabulary), abs=0.5)
    assert sum(eager[-5:]) / 5 < eager[0] - 1.0


def test_compiled_curve_is_the_eager_one(eager: list[float]) -> None:
    compiled, _ = train(SMALL, "cpu", "compile")
    assert max(abs(a - b) for a, b in zip(eager, compiled, strict=True)) < BOUND
    assert compiled[0] == pytest.approx(eager[0], rel=1e-5)


def test_a_seed_fixes_the_curve_and_another_changes_it(eager: list[float]) -> None:
    short = Settings(**{**SMALL.__dict__, "steps": 3})
    first, _ = train(short, "cpu", "eager")
    assert first == train(short, "cpu", "eager")[0]
    other, _ = train(Settings(**{**short.__dict__, "seed": 1}), "cpu", "eager")
    assert max(abs(a - b) for a, b in zip(first, other)) > BOUND


def test_every_parameter_learns() -> None:
    torch.manual_seed(0)
    text, vocabulary = train_tiny_lm.load_text()
    model = train_tiny_lm.TinyLM(vocabulary, SMALL)
    train_tiny_lm.gradient_step(model, "eager", text[:194].view(2, 97))(text[:194].view(2, 97))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.count_nonzero() > 0, name


def test_experts_are_mixed_as_a_loop_over_tokens_would() -> None:
    torch.manual_seed(0)
    experts = train_tiny_lm.MixtureOfExperts(SMALL).double()
    x = torch.randn(1, 7, SMALL.width, dtype=torch.float64)
    mixed, balance = experts(x)
    probabilities = experts.router(x[0]).float().softmax(-1)
    expected = torch.zeros_like(x[0])
    for token, row in enumerate(x[0]):
        best = probabilities[token].topk(SMALL.chosen)
        for weight, expert in zip(best.values / best.values.sum(), best.indices):
            hidden, gate = (row @ experts.up.weight[expert]).chunk(2)
            expected[token] += weight.double() * (
                (torch.nn.functional.silu(gate) * hidden) @ experts.down.weight[expert]
            )
    torch.testing.assert_close(mixed[0], expected, rtol=1e-6, atol=1e-8)
    assert balance > 0


def test_command_line_prints_and_draws(tmp_path: Path) -> None:
    plot = tmp_path / "curves" / "loss.png"
    command = [sys.executable, "examples/train_tiny_lm.py", "--steps", "2", "--device", "cpu", "--plot", str(plot)]
    environment = os.environ | {"PYTHONPATH": "torch_ext", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout and "loss 4." in done.stdout and f"loss plot: {plot}" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1"], "--steps: expected at least 2, got 1"),
        (["--device", "cpu", "--cuda-graphs"], "--cuda-graphs needs a CUDA device"),
        (["--compile", "--cuda-graphs"], "not allowed with argument"),
    ],
    ids=["steps", "graphs-on-cpu", "two-modes"],
)
def test_bad_command_lines(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_tiny_lm.py", *arguments])
    with pytest.raises(SystemExit):
        train_tiny_lm.parse()
    assert message in capsys.readouterr().err
