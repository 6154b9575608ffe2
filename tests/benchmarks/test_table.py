"""The README's speed tables: what they show, and that they follow the results in the repository."""

from pathlib import Path

from benchmarks import table

README = Path(__file__).parents[2] / "README.md"


def result(case, implementation, **timing):
    times = {"eager_ms": None, "graph_ms": None, "kernels_ms": None} | timing
    return {
        "case": case,
        "implementation": implementation,
        "timing": times,
        "tflops": 5.0,
        "tb_per_s": None,
        "roofline_share": 0.5,
    }


def document(*results):
    return {"machine": {"cpu": "c", "gpu": "G", "torch": "2"}, "commit": "abc", "date": "d", "results": list(results)}


def test_the_fastest_of_a_peer_counts_and_times_are_of_one_kind():
    rows = [result("a", "culax", eager_ms=9.0, graph_ms=2.0), result("a", "quack", graph_ms=4.0)]
    rows += [result("a", "quack_dynamic", graph_ms=3.0), result("a", "torch"), result("b", "culax", kernels_ms=1.0)]
    lines = table.tables([document(*rows)]).splitlines()
    assert lines[0] == "G, torch 2, commit `abc`, d:"
    assert lines[2] == "| case | culax ms | TFLOP/s | TB/s | share of the roofline | QuACK ms |"
    assert lines[4:] == ["| `a` | 2 | 5 |  | 50% | 3 (1.50x) |", "| `b` | 1 | 5 |  | 50% |  |"]


def test_host_time_is_shown_where_it_was_measured():
    rows = [
        result("a", "culax", eager_ms=9.0, overhead_us=61.6, overhead_cpu_us=45.2),
        result("b", "culax", eager_ms=1.0),
    ]
    lines = table.tables([document(*rows)]).splitlines()
    assert lines[2] == "| case | culax ms | TFLOP/s | TB/s | share of the roofline | host us |"
    assert lines[4:] == ["| `a` | 9 | 5 |  | 50% | 45 (62) |", "| `b` | 1 | 5 |  | 50% |  |"]


def test_readme_shows_the_results_in_the_repository():
    text = README.read_text()
    assert table.inserted(text, table.MARKERS, table.tables(table.documents())) == text
