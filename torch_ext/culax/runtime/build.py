"""``python -m culax build``: compile kernel variants ahead of time, in parallel, and link each to a library."""

from __future__ import annotations

import argparse
import fnmatch
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from culax.runtime import library, manifest, sources
from culax.runtime.arch import ARCHS
from culax.runtime.compile import Compiled, link
from culax.runtime.variants import PLAN_MODULES, Variant, enumerate_variants
from culax.runtime.worker import CompileError, Worker

AOT = Path(__file__).resolve().parents[1] / "_aot"


@dataclass(frozen=True)
class Report:
    """What a build did: variants built, variants left as they were, and messages of those that failed, by name."""

    built: tuple[str, ...]
    unchanged: tuple[str, ...]
    failed: dict[str, str]


def _compile_all(
    arch: str, todo: Sequence[Variant], jobs: int, done: Callable[[Variant, Compiled | CompileError], None]
) -> None:
    """Compile `todo` in `jobs` processes; `done` gets each result, one at a time, while the object still exists."""
    pending: queue.SimpleQueue[Variant] = queue.SimpleQueue()
    for variant in todo:
        pending.put(variant)
    one_at_a_time = threading.Lock()
    broken: list[BaseException] = []

    def drain() -> None:
        try:
            while not broken:
                with Worker(arch) as worker:
                    while not broken:
                        variant = pending.get_nowait()
                        try:
                            result: Compiled | CompileError = worker.compile(variant)
                        except CompileError as error:
                            result = error
                        with one_at_a_time:
                            done(variant, result)
                        if isinstance(result, CompileError):
                            break  # the process may be gone or left in a bad state: take a fresh one
        except queue.Empty:
            return
        except BaseException as error:
            broken.append(error)

    threads = [threading.Thread(target=drain, daemon=True) for _ in range(min(jobs, len(todo)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if broken:
        raise broken[0]


def build(
    variants: Iterable[Variant],
    directory: Path,
    *,
    jobs: int = 1,
    keep: Path | None = None,
    prune: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Bring `directory` up to date with `variants`, all of one architecture.

    A variant whose library was built from the current sources is left alone. Each library is written aside and moved
    into place, and the manifest follows after each, so an interrupted build loses only what was in flight. A variant
    whose sources change meanwhile counts as failed. Builders in other processes wait for the folder.

    Args:
        variants: what to build.
        directory: where the libraries and ``manifest.json`` go.
        jobs: compiler processes at a time; each takes about 0.5 GB.
        keep: folder for NAME.ptx, NAME.cubin and NAME.log; a variant that lacks them there is built again.
        prune: drop entries and libraries of variants not among `variants`.
        progress: called with (finished, total, name of the variant just finished).

    Raises:
        NotImplementedError: the kernel compiler, its runtime library, tvm-ffi or a C compiler is missing.
    """
    variants = tuple(variants)
    dsl = sources.dsl_version()
    if dsl is None:
        raise NotImplementedError("compiling kernels needs nvidia-cutlass-dsl: pip install 'nvidia-cutlass-dsl[cu13]'")
    tvm_ffi = library.tvm_ffi_version()
    library.dsl_runtime()
    sources.forget()
    with manifest.lock(directory):
        entries = manifest.read(directory)
        todo = [v for v in variants if not _up_to_date(v, directory, entries, dsl, keep)]
        hashes = {v.name: sources.source_hash(v, dsl) for v in todo}
        built: list[str] = []
        failed: dict[str, str] = {}

        def done(variant: Variant, result: Compiled | CompileError) -> None:
            sources.forget()
            if isinstance(result, CompileError):
                failed[variant.name] = str(result)
            elif sources.source_hash(variant, dsl) != hashes[variant.name]:
                failed[variant.name] = f"{variant.name}: its sources changed while it was compiled; build again"
            else:
                entries[variant.name] = _install(result, directory, dsl, tvm_ffi)
                manifest.write(directory, entries)
                if keep is not None:
                    result.keep(keep)
                built.append(variant.name)
            if progress is not None:
                progress(len(built) + len(failed), len(todo), variant.name)

        if todo:
            _compile_all(todo[0].arch, todo, jobs, done)
        if prune:
            for name in entries.keys() - {variant.name for variant in variants}:
                (directory / entries.pop(name).file).unlink(missing_ok=True)
            manifest.write(directory, entries)
    unchanged = tuple(v.name for v in variants if v not in todo)
    return Report(tuple(built), unchanged, failed)


def _up_to_date(
    variant: Variant, directory: Path, entries: dict[str, manifest.Entry], dsl: str, keep: Path | None
) -> bool:
    if keep is not None and not all((keep / f"{variant.name}.{end}").is_file() for end in ("ptx", "cubin", "log")):
        return False
    entry = entries.get(variant.name)
    return entry is not None and entry.dsl == dsl and isinstance(manifest.find(directory, variant, entries), Path)


def _install(compiled: Compiled, directory: Path, dsl: str, tvm_ffi: str) -> manifest.Entry:
    """Link one object into `directory` and return its entry."""
    variant = compiled.variant
    aside = directory / f".{variant.name}.so.{os.getpid()}"
    try:
        link([compiled.object], aside)
        sha256 = manifest.digest(aside)
        os.replace(aside, directory / f"{variant.name}.so")
    finally:
        aside.unlink(missing_ok=True)
        compiled.object.unlink(missing_ok=True)
    return manifest.Entry(
        op=variant.op,
        entry=variant.entry,
        config=repr(variant.config),
        source_hash=sources.source_hash(variant, dsl),
        dsl=dsl,
        tvm_ffi=tvm_ffi,
        symbol=variant.name,
        file=f"{variant.name}.so",
        sha256=sha256,
        launch_smem=compiled.launch_smem,
        seconds=round(compiled.seconds, 2),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m culax build",
        description="Build kernels ahead of time. No GPU is needed; unchanged ones are kept.",
    )
    parser.add_argument(
        "--arch", action="append", choices=ARCHS, help="architecture; may be repeated, and left out for --list"
    )
    parser.add_argument("--only", metavar="PATTERN", help="only variants whose name matches this shell pattern")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compiler processes at a time")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="also write NAME.ptx, NAME.cubin and NAME.log there")
    parser.add_argument(
        "--faults", action="store_true", help="also what only tests use: single stages, fault-injection builds"
    )
    parser.add_argument("--output", type=Path, default=AOT, help="folder of the libraries (default: in the package)")
    parser.add_argument("--list", action="store_true", help="print the variants' names and build nothing")
    parser.add_argument(
        "--plan", action="append", metavar="MODULE", help="ask this plan module instead of culax's; may be repeated"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Build what the arguments name; return 0 if everything asked for is built, 1 if something failed. Arguments that
    name nothing exit with status 2."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    parser = _parser()
    options = parser.parse_args(argv)
    if not options.arch and not options.list:
        parser.error("say for which --arch")
    console = Console(stderr=True)
    status, found = 0, False
    for arch in dict.fromkeys(options.arch or ARCHS):
        variants = enumerate_variants(arch, options.plan or PLAN_MODULES, faults=options.faults)
        if options.only:
            variants = tuple(v for v in variants if fnmatch.fnmatchcase(v.name, options.only))
        if not variants:
            if not options.arch:
                continue
            print(f"{arch}: no kernels {'of that name' if options.only else 'exist for it'}")
            continue
        found = True
        if options.list:
            print(*(variant.name for variant in variants), sep="\n")
            continue
        start = time.perf_counter()
        columns = (TextColumn(f"{arch} {{task.description}}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        try:
            with Progress(*columns, console=console) as bar:
                task = bar.add_task("building", total=None)

                def show(finished: int, total: int, name: str, bar: Progress = bar, task: object = task) -> None:
                    bar.update(task, completed=finished, total=total, description=name)  # type: ignore[arg-type]

                report = build(
                    variants,
                    options.output / arch,
                    jobs=max(1, options.jobs),
                    keep=options.keep,
                    prune=not options.only,
                    progress=show,
                )
                bar.update(task, total=len(report.built) + len(report.failed), description="done")
        except NotImplementedError as error:
            console.print(f"culax build: {error}", style="red", markup=False, highlight=False)
            return 1
        for message in report.failed.values():
            console.print(message, style="red", markup=False, highlight=False)
        size = sum(file.stat().st_size for file in (options.output / arch).glob("*.so"))
        print(
            f"{arch}: {len(report.built)} built, {len(report.unchanged)} unchanged, {len(report.failed)} failed "
            f"in {time.perf_counter() - start:.1f} s; {size / 1024:.0f} kB in {options.output / arch}"
        )
        status |= bool(report.failed)
    if options.only and not found:
        parser.error(f"--only: no kernel's name matches {options.only}; --list shows the names")
    return status


if __name__ == "__main__":
    sys.exit(main())
