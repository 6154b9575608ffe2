"""The benchmark runner on tiny cases: documents, gates before figures, peers that are missing, summaries, plots."""

import json
import socket
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from benchmarks import plot, registry, run, summary, timing
from benchmarks.case import Gate, Peer, Timing
from benchmarks.run import Result, Settings
from benchmarks.wgrad import WgradCase

ROOT = Path(__file__).parents[2]
TINY = WgradCase("tiny", 3, 8, 8, 16, dtype=torch.float32, device="cpu")
QUICK = Settings(("eager", "overhead"), repeats=2, warmups=1, sets=2)


class Planted(WgradCase):
    """The tiny case with implementations that are wrong, raise, or are missing."""

    def implementations(self):
        def wrong(inputs):
            right = super(Planted, self)._ours(inputs)
            return lambda: {"dw": right()["dw"] * 1.01}

        def raising(inputs):
            raise RuntimeError("cannot run\nsecond line")

        return {"culax": self._ours, "wrong": wrong, "raising": raising, "missing": Peer(None, "not installed")}


def planted_results():
    return {r.implementation: r for r in run.measure_case(Planted("p", 3, 8, 8, 16, torch.float32, "cpu"), QUICK)}


def test_right_implementation_gets_figures():
    result = planted_results()["culax"]
    assert result.gate.ok and result.reason is None
    timing_ = result.timing
    assert timing_.eager_ms > 0 and timing_.graph_ms is None
    assert timing_.overhead_us > timing_.allocation_us > 0
    assert timing_.overhead_cpu_us > timing_.allocation_cpu_us > 0
    cost = TINY.cost()
    assert result.tflops == pytest.approx(cost.flops / result.timing.eager_ms / 1e9)
    assert result.tb_per_s == pytest.approx(cost.bytes / result.timing.eager_ms / 1e9)
    assert result.roofline_share == pytest.approx(result.floor_ms / result.timing.eager_ms)


def test_time_spent_waiting_is_no_cpu_time():
    """What a loaded host adds to the wall time must not count as the call's own."""
    wall, own = timing.overhead_us([lambda: time.sleep(2e-3)], "cpu", 3)
    assert wall > 2000 > 4 * own


@pytest.mark.parametrize(
    ("name", "reason"), [("wrong", "wrong: error"), ("raising", "cannot run"), ("missing", "not installed")]
)
def test_no_figure_without_a_passed_gate(name, reason):
    result = planted_results()[name]
    assert result.timing == Timing() and result.tflops is None and result.roofline_share is None
    assert reason in result.reason and "second line" not in result.reason


def test_exit_status_tells_a_wrong_result(monkeypatch, capsys):
    monkeypatch.setattr(registry, "cases", lambda: [Planted("p", 3, 8, 8, 16, torch.float32, "cpu")])
    quick = ["--device", "cpu", "--repeats", "1", "--warmups", "1", "--sets", "1"]
    assert run.main(quick) == 0
    monkeypatch.setattr(Planted, "_ours", lambda self, inputs: lambda: {"dw": torch.zeros(3, 8, 8)})
    assert run.main(quick) == 1
    assert run.main([*quick, "--case", "absent"]) == 2
    assert "no case matches 'absent'" in capsys.readouterr().err


def test_document_names_the_machine_but_not_the_host(tmp_path):
    result = planted_results()["culax"]
    text = json.dumps(run.document([result], "cpu", "abc"))
    document = json.loads(text)
    assert {"cpu", "torch", "culax"} <= document["machine"].keys() and document["commit"] == "abc"
    assert document["results"][0]["gate"]["ok"] is True and document["ceilings"][0]["flops_per_s"] > 0
    assert socket.gethostname() not in text and str(ROOT) not in text


def test_help_and_list_explain_themselves():
    shown = [
        subprocess.run([sys.executable, "-m", "benchmarks.run", flag], cwd=ROOT, capture_output=True, text=True)
        for flag in ("--help", "--list")
    ]
    assert [s.returncode for s in shown] == [0, 0], shown
    assert "correctness gate" in shown[0].stdout and "--mode" in shown[0].stdout
    assert shown[1].stdout.split()[1::2] == [case.name for case in registry.cases()]


def result(case: str, implementation: str, **timing: float) -> Result:
    gate = Gate(True, 0.0, 1.0, "none")
    return Result(case, "op", implementation, "cuda", "bfloat16", {}, gate, Timing(**timing), 1.0)


def wgrad_results(implementation: str, times: list[float], form: str = "bf16") -> list[Result]:
    names = [case.name for case in registry.select([f"wgrad_{form}*"], "cuda")]
    return [result(name, implementation, graph_ms=ms) for name, ms in zip(names, times)]


def test_summary_of_wgrad():
    ours = wgrad_results("culax", [1.0] * 7)
    peers = wgrad_results("torch", [1.0] + [2.0] * 6)
    fields = summary.fields([*ours, *peers])
    assert fields["wgrad_bf16_min_vs_torch"] == pytest.approx(1.0)
    assert fields["wgrad_bf16_geomean_vs_torch"] == pytest.approx(2 ** (6 / 7))
    assert fields["wgrad_bf16_geomean_vs_quack"] is None
    either = [*wgrad_results("quack", [3.0] * 7), *wgrad_results("quack_dynamic", [0.5] * 7)]
    assert summary.fields([*ours, *peers, *either])["wgrad_bf16_geomean_vs_quack"] == pytest.approx(0.5)


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
def test_summary_of_block_scaled_wgrad(form):
    ours = wgrad_results("culax", [1.0] * 7, form)
    fields = summary.fields([*ours, *wgrad_results("culax_bf16", [0.5] + [2.0] * 6, form)])
    assert fields[f"wgrad_{form}_min_vs_bf16"] == pytest.approx(0.5)
    flops = max(case.cost().flops for case in registry.select([f"wgrad_{form}*"], "cuda"))
    assert fields[f"wgrad_{form}_max_tflops"] == pytest.approx(flops / 1e9)
    assert len(fields) == 2


def test_summary_leaves_out_what_was_not_measured():
    assert summary.fields(wgrad_results("culax", [1.0] * 6)) == {}
    first, *others = wgrad_results("culax", [1.0] * 7)
    assert summary.fields([replace(first, timing=Timing()), *others]) == {}


def test_summary_of_kda():
    ours = result(summary.KDA_FIRST, "culax", kernels_ms=0.8)
    assert summary.fields([ours]) == {"kda_bwd_ms": 0.8, "kda_bwd_vs_fla_best": None}
    peers = [result(summary.KDA_FIRST, n, kernels_ms=ms) for n, ms in (("fla", 4.0), ("fla_safe_gate", 2.4))]
    assert summary.fields([ours, *peers])["kda_bwd_vs_fla_best"] == pytest.approx(3.0)
    pair = [result(summary.KDA_CPU, n, eager_ms=ms) for n, ms in (("culax", 10.0), ("recurrence", 400.0))]
    assert summary.fields(pair) == {"kda_cpu_chunked_vs_recurrence": pytest.approx(40.0)}


def test_summary_merges_key_by_key(tmp_path):
    path = tmp_path / "results" / "summary.json"
    summary.merge(path, {"a": 1.0, "b": None})
    summary.merge(path, {"b": 2.0})
    assert json.loads(path.read_text()) == {"a": 1.0, "b": 2.0}
    assert list(path.parent.iterdir()) == [path]


def test_plot_draws_a_png(tmp_path):
    pytest.importorskip("matplotlib", reason="plots are an extra")
    document = run.document([planted_results()["culax"]], "cpu", "abc")
    plot.draw(document, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="at least one result"):
        plot.draw(document | {"results": []}, tmp_path / "none.png")


def test_calls_in_turn_start_elsewhere_each_round():
    assert list(islice(timing.in_turn("abc"), 9)) == list("abcbcacab")
    assert list(timing.in_turn([])) == []


def test_no_call_takes_the_input_set_of_the_call_before():
    taken: list[int] = []
    bound = {name: [lambda i=i: taken.append(i) for i in range(3)] for name in ("ours", "theirs")}
    timing.eager_ms(bound, "cpu", 0, 6, 10.0)
    assert len(taken) == 12 and all(a != b for a, b in zip(taken, taken[1:]))


def test_a_peer_that_no_graph_can_hold_is_timed_otherwise():
    results = run.measure_case(Uncaptured("p", 3, 8, 8, 16, torch.float32, "cpu"), QUICK)
    assert all(result.timing.eager_ms > 0 and result.timing.graph_ms is None for result in results)


class Uncaptured(WgradCase):
    """The tiny case with a peer outside graphs."""

    def implementations(self):
        return {"culax": self._ours, "peer": Peer(self._ours, captured=False)}
