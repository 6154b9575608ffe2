"""The few figures that others read, kept in one JSON file and merged key by key, each run adding its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING

from benchmarks.registry import WGRAD_SHAPES
from benchmarks.wgrad import token_counts
from benchmarks.wgrad_scaled import TOKENS

if TYPE_CHECKING:
    from benchmarks.run import Result

Figures = dict[str, float | None]
KDA_FIRST = "kda_bwd_b1_t8192_h32"
KDA_CPU = "kda_cpu_b1_t2048_h4"


def fields(results: Iterable[Result]) -> Figures:
    """Key figures of one run. A figure whose cases were not all measured in the run is left out.

    `*_vs_*` are time ratios, larger is better for culax. A peer that was not there gives null.
    """
    times: dict[tuple[str, str], Result] = {(r.case, r.implementation): r for r in results}
    return {**_wgrad(times), **_scaled(times, "mxfp8"), **_scaled(times, "nvfp4"), **_kda(times)}


def _wgrad(results: dict[tuple[str, str], Result]) -> Figures:
    names = [f"wgrad_bf16_e{e}_m{m}_n{n}_k{k}" for e, m, n, k in WGRAD_SHAPES]
    ours = [_graph_ms(results, name, ("culax",)) for name in names]
    if any(ms is None for ms in ours):
        return {}
    torch_ratios = _ratios(ours, [_graph_ms(results, name, ("torch",)) for name in names])
    quack_ratios = _ratios(ours, [_graph_ms(results, name, ("quack", "quack_dynamic")) for name in names])
    return {
        "wgrad_bf16_geomean_vs_torch": geometric_mean(torch_ratios) if torch_ratios else None,
        "wgrad_bf16_min_vs_torch": min(torch_ratios) if torch_ratios else None,
        "wgrad_bf16_geomean_vs_quack": geometric_mean(quack_ratios) if quack_ratios else None,
    }


def _scaled(results: dict[tuple[str, str], Result], form: str) -> Figures:
    names = [f"wgrad_{form}_e{e}_m{m}_n{n}_k{k}" for e, m, n, k in WGRAD_SHAPES]
    ours = [_graph_ms(results, name, ("culax",)) for name in names]
    if any(ms is None for ms in ours):
        return {}
    ratios = _ratios(ours, [_graph_ms(results, name, ("culax_bf16",)) for name in names])
    flops = (2.0 * m * n * sum(token_counts(e, k, TOKENS)) for e, m, n, k in WGRAD_SHAPES)
    return {
        f"wgrad_{form}_min_vs_bf16": min(ratios) if ratios else None,
        f"wgrad_{form}_max_tflops": max(f / ms / 1e9 for f, ms in zip(flops, ours) if ms is not None),
    }


def _kda(results: dict[tuple[str, str], Result]) -> Figures:
    figures: Figures = {}
    if (ours := _kernels_ms(results, KDA_FIRST, ("culax",))) is not None:
        peer = _kernels_ms(results, KDA_FIRST, ("fla", "fla_safe_gate"))
        figures["kda_bwd_ms"] = ours
        figures["kda_bwd_vs_fla_best"] = None if peer is None else peer / ours
    pair = [results.get((KDA_CPU, name)) for name in ("culax", "recurrence")]
    eager = [None if r is None else r.timing.eager_ms for r in pair]
    if eager[0] and eager[1]:
        figures["kda_cpu_chunked_vs_recurrence"] = eager[1] / eager[0]
    return figures


def _graph_ms(results: dict[tuple[str, str], Result], case: str, names: tuple[str, ...]) -> float | None:
    found = [results[case, name].timing.graph_ms for name in names if (case, name) in results]
    return min((ms for ms in found if ms is not None), default=None)


def _kernels_ms(results: dict[tuple[str, str], Result], case: str, names: tuple[str, ...]) -> float | None:
    found = [results[case, name].timing.kernels_ms for name in names if (case, name) in results]
    return min((ms for ms in found if ms is not None), default=None)


def _ratios(ours: list[float | None], peers: list[float | None]) -> list[float] | None:
    pairs = [(a, b) for a, b in zip(ours, peers) if a is not None and b is not None]
    return [b / a for a, b in pairs] if len(pairs) == len(ours) else None


def merge(path: Path, figures: Figures) -> None:
    """Replace `figures`' keys in the file and keep all others; the file is replaced in one step."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known.update(figures)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    aside.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    aside.replace(path)
