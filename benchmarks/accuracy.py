"""Errors of the KDA backward against float64, beside FLA's: `python -m benchmarks.accuracy --help`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

import culax  # noqa: F401  (registers the ops)
from benchmarks import report
from benchmarks.case import Inputs, Outputs, Peer
from benchmarks.kda import KdaCase, chunked
from benchmarks.verify import group_errors

MARKERS = "<!-- accuracy:begin -->", "<!-- accuracy:end -->"
GATES = ("mild", "logsigmoid", "strong")
PLACES = {"all": (), "head": (2,), "chunk": (0, 1), "head and chunk": (0, 1, 2)}
"""Where an error is looked for, and the dimensions of a gradient [B, chunk, head, 64, ...] that tell places apart."""
STATE_PLACES = {"all": (), "head": (1,), "chunk": (0,), "head and chunk": (0, 1)}
"""The same for a state's gradient [N, head, K, V], which has sequences in the place of chunks."""


@dataclass(frozen=True)
class Error:
    """Relative Frobenius error of a gradient: over all of it, and in the worst head, 64-token chunk, and both."""

    gates: str
    implementation: str
    gradient: str
    errors: dict[str, float]


def with_gates(inputs: Inputs, kind: str, seed: int) -> Inputs:
    """The inputs with mild (-0.1 |x|), logsigmoid or strong (uniform in -5 .. 0) gates; all of them at least -5."""
    g = inputs["g"]
    generator = torch.Generator(g.device).manual_seed(1000 + seed)
    x = torch.randn(g.shape, generator=generator, device=g.device, dtype=g.dtype)
    uniform = torch.rand(g.shape, generator=generator, device=g.device, dtype=g.dtype)
    chosen = {"mild": -0.1 * x.abs(), "logsigmoid": F.logsigmoid(x), "strong": -5 * uniform}[kind]
    return {**inputs, "g": chosen.clamp(min=-5)}


def errors_of(outputs: Outputs, truth: Outputs) -> dict[str, dict[str, float]]:
    """By gradient and place: the relative Frobenius error, of the worst head, chunk, or pair of both.

    A group's error is taken relative to its own norm, or to 5 % of the typical group's if that is more.
    """
    found: dict[str, dict[str, float]] = {}
    for name, got in chunked(outputs).items():
        want = chunked({name: truth[name]})[name]
        places = STATE_PLACES if name == "dinitial_state" else PLACES
        found[name] = {place: group_errors(got, want, dims).max().item() for place, dims in places.items()}
    return found


def measure(case: KdaCase, seeds: Sequence[int]) -> tuple[list[Error], dict[str, str]]:
    """Errors of every implementation, the worst of `seeds`, and the reasons why others aren't there.

    Truth is autograd of the token recurrence in float64.
    """
    worst: dict[tuple[str, str, str], dict[str, float]] = {}
    missing: dict[str, str] = {}
    for kind in GATES:
        for seed in seeds:
            inputs = with_gates(case.make_inputs(seed), kind, seed)
            truth = case.recurrence_gradients(inputs)
            for name, implementation in case.implementations().items():
                peer = implementation if isinstance(implementation, Peer) else Peer(implementation)
                if peer.prepare is None:
                    missing[name] = peer.reason or ""
                    continue
                for gradient, places in errors_of(peer.prepare(inputs)(), truth).items():
                    known = worst.setdefault((kind, name, gradient), dict.fromkeys(places, 0.0))
                    known.update((place, max(known[place], error)) for place, error in places.items())
    return [Error(*key, errors) for key, errors in worst.items()], missing


def compared(found: Sequence[Error]) -> dict[str, float]:
    """By place: the largest ratio of our error to the smallest of the peers' at the same gates and gradient."""
    ratios: dict[str, float] = {}
    for ours in (error for error in found if error.implementation == "culax"):
        same = [e for e in found if (e.gates, e.gradient) == (ours.gates, ours.gradient) and e is not ours]
        for place, error in ours.errors.items():
            if same:
                ratio = error / min(peer.errors[place] for peer in same)
                ratios[place] = max(ratios.get(place, 0.0), ratio)
    return ratios


def document(case: KdaCase, found: Sequence[Error], missing: dict[str, str], commit: str | None) -> dict[str, Any]:
    """The JSON document."""
    return {
        **report.head(case.device, commit),
        "shape": case.shape(),
        "missing": missing,
        "largest_ratio_to_best_peer": compared(found),
        "results": [asdict(error) for error in found],
    }


def table(document: dict[str, Any]) -> str:
    """Markdown: a row a kind of gates and gradient; in each cell the errors over all / head / chunk / both, in 1e-3."""
    results = document["results"]
    names = list(dict.fromkeys(r["implementation"] for r in results))
    machine, shape = document["machine"], document["shape"]
    sizes = ", ".join(f"{key} {value}" for key, value in shape.items() if key != "sequences")
    lines = [
        f"{machine.get('gpu', machine['cpu'])}, torch {machine['torch']}, commit `{document['commit']}`, "
        f"{document['date']}; {sizes}. Relative Frobenius errors in 1e-3: of the whole gradient / its worst head / its "
        "worst 64-token chunk / the worst chunk of a head.",
        "",
        "| gates | gradient | " + " | ".join(names) + " |",
        "|---|---|" + "---:|" * len(names),
    ]
    rows = {(r["gates"], r["gradient"]): None for r in results}
    for gates, gradient in rows:
        cells = []
        for name in names:
            cell = (
                r["errors"]
                for r in results
                if (r["gates"], r["gradient"], r["implementation"]) == (gates, gradient, name)
            )
            cells.append(" / ".join(f"{1e3 * error:.2f}" for error in next(cell, {}).values()))
        lines.append(f"| {gates} | {gradient} | " + " | ".join(cells) + " |")
    ratios = document["largest_ratio_to_best_peer"]
    if ratios:
        shown = ", ".join(f"{ratio:.2f} ({place})" for place, ratio in ratios.items())
        lines += ["", f"Largest ratio of culax's error to the smallest of the others': {shown}."]
    lines += [f"{name}: {reason}." for name, reason in document["missing"].items()]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description="Errors of all KDA gradients against float64, ours and FLA's on the same inputs, for mild, "
        "logsigmoid and strong gates: global, and in the worst head, 64-token chunk, and chunk of a head.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    for name, default in (("tokens", 512), ("heads", 4), ("key-dim", 128), ("value-dim", 128), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    report.add_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    args = _parser().parse_args(argv)

    def measured() -> report.Document:
        device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        case = KdaCase("accuracy", 1, args.tokens, args.heads, args.key_dim, args.value_dim, dtype=dtype, device=device)
        found, missing = measure(case, range(args.seeds))
        return document(case, found, missing, args.commit)

    report.deliver(args, measured, table, MARKERS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
