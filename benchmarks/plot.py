"""Draws a results file as bars of roofline share: `python -m benchmarks.plot IN.json OUT.png`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw(document: dict[str, Any], target: Path) -> None:
    """Write a PNG with one bar per implementation and case, labelled with its time in ms.

    `document` is what `benchmarks.run --output` wrote. Results without a figure are left out.
    Raises ValueError when none has one.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = [r for r in document["results"] if r["roofline_share"] is not None]
    if not results:
        raise ValueError("document: expected at least one result with a figure, got none")
    cases = list(dict.fromkeys(r["case"] for r in results))
    names = list(dict.fromkeys(r["implementation"] for r in results))
    height = 0.8 / len(names)
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.35 * len(cases) * max(2, len(names))), layout="constrained")
    for i, name in enumerate(names):
        mine = [r for r in results if r["implementation"] == name]
        rows = [cases.index(r["case"]) + (i - (len(names) - 1) / 2) * height for r in mine]
        bars = axes.barh(rows, [100 * r["roofline_share"] for r in mine], height=height, label=name)
        axes.bar_label(bars, [f"{_best_ms(r):.3g} ms" for r in mine], padding=2, fontsize=8)
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 115)
    axes.axvline(100, color="0.6", linewidth=1)
    axes.set_xlabel("share of the roofline (%)")
    machine = document["machine"]
    axes.set_title(f"{machine.get('gpu', machine['cpu'])}, torch {machine['torch']}, {document['commit']}", fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(target, dpi=130)
    plt.close(figure)


def _best_ms(result: dict[str, Any]) -> float:
    timing = result["timing"]
    return timing["graph_ms"] if timing["graph_ms"] is not None else timing["eager_ms"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description="Draw a results file as a PNG.")
    parser.add_argument("results", type=Path, help="JSON written by benchmarks.run --output")
    parser.add_argument("image", type=Path, help="PNG to write")
    args = parser.parse_args(argv)
    draw(json.loads(args.results.read_text()), args.image)
    print(f"wrote {args.image}")


if __name__ == "__main__":
    main()
