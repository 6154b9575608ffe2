"""The README's speed tables, generated from `benchmarks/results`: `python -m benchmarks.table --write README.md`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.markers import inserted

MARKERS = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
RESULTS = Path(__file__).resolve().parent / "results"
PEERS = {
    "torch": ("torch",),
    "torch, dequantised first,": ("torch_dequantize",),
    "culax in bf16": ("culax_bf16",),
    "QuACK": ("quack", "quack_dynamic"),
    "FLA": ("fla", "fla_safe_gate"),
    "token recurrence": ("recurrence",),
}
"""Peers, and the implementations each stands for; of several the fastest counts."""


def tables(documents: Sequence[dict[str, Any]]) -> str:
    """One Markdown table a results document: a row a case, our time and share, and every peer's time beside it."""
    return "\n\n".join(_table(document) for document in documents) or "Nothing measured yet."


def _table(document: dict[str, Any]) -> str:
    results = [result for result in document["results"] if _ms(result) is not None]
    hosted = any(_host_us(result) for result in results)
    found = [label for label, names in PEERS.items() if any(r["implementation"] in names for r in results)]
    machine = document["machine"]
    head = f"{machine.get('gpu', machine['cpu'])}, torch {machine['torch']}, commit `{document['commit']}`, "
    lines = [head + document["date"] + ":", ""]
    titles = ["case", "culax ms", "TFLOP/s", "TB/s", "share of the roofline", *["host us"] * hosted]
    titles += [f"{label} ms" for label in found]
    lines += ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    for ours in (result for result in results if result["implementation"] == "culax"):
        ms = _ms(ours)
        cells = [f"`{ours['case']}`", f"{ms:.4g}"]
        cells += [_shown(ours["tflops"], ".3g"), _shown(ours["tb_per_s"], ".3g"), _shown(ours["roofline_share"], ".0%")]
        cells += [_host_us(ours)] * hosted
        for label, names in PEERS.items():
            if label in found:
                times = [_ms(r) for r in results if r["case"] == ours["case"] and r["implementation"] in names]
                cells.append(f"{min(times):.4g} ({min(times) / ms:.2f}x)" if times else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ms(result: dict[str, Any]) -> Any:
    """The time that the comparison is about: kernels summed where they were, else inside a graph, else eager."""
    timing = result["timing"]
    return next((timing[mode] for mode in ("kernels_ms", "graph_ms", "eager_ms") if timing[mode] is not None), None)


def _host_us(result: dict[str, Any]) -> str:
    """What an eager call costs the host: CPU time of its thread, and wall time in brackets; "" where not measured."""
    own, wall = (result["timing"].get(name) for name in ("overhead_cpu_us", "overhead_us"))
    return f"{own:.0f} ({wall:.0f})" if own is not None and wall is not None else ""


def _shown(figure: float | None, style: str) -> str:
    return "" if figure is None else format(figure, style)


def documents(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The documents of benchmarks.run in `folder`, by file name; other files tell of other things than speed."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    return [each for each in found if "results" in each and all("timing" in result for result in each["results"])]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, or write them into a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables between FILE's markers")
    options = parser.parse_args(argv)
    content = tables(documents())
    if options.write is None:
        print(content)
    else:
        options.write.write_text(inserted(options.write.read_text(), MARKERS, content))


if __name__ == "__main__":
    main()
