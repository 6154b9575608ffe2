"""What the commands of this folder have in common: the head of a JSON document, and where documents and tables go."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import roofline
from benchmarks.markers import inserted

Document = dict[str, Any]


def head(device: str, commit: str | None) -> Document:
    """Machine, commit (that of the checkout if None) and date."""
    return {
        "machine": roofline.machine(device),
        "commit": commit or roofline.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def save(content: Document, file: Path) -> None:
    """Write a document as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that `deliver` reads, and the commit."""
    parser.add_argument("--commit", default=None, help="the commit measured, where the sources are no checkout")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write what was measured as JSON")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="measure nothing, read this JSON")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between FILE's markers")


def deliver(
    args: argparse.Namespace,
    measure: Callable[[], Document],
    table: Callable[[Document], str],
    markers: tuple[str, str],
) -> None:
    """Measure, or read what was measured; write the document and its table where the options say, and print it."""
    content = measure() if args.source is None else json.loads(args.source.read_text())
    if args.output:
        save(content, args.output)
    shown = table(content)
    if args.write:
        args.write.write_text(inserted(args.write.read_text(), markers, shown))
    print(shown)
