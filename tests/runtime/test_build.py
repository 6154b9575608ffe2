from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from culax.runtime import build, library, manifest, sources
from tests.runtime.conftest import ARCH, HERE, Built


def _names(variants) -> tuple[str, ...]:
    return tuple(variant.name for variant in variants)


def _times(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in folder.glob("*.so")}


def test_manifest_records_what_each_library_was_built_from(built: Built) -> None:
    entries = manifest.read(built.folder / ARCH)
    assert tuple(sorted(entries)) == tuple(sorted(_names(built.variants)))
    for variant in built.variants:
        entry = entries[variant.name]
        assert entry.source_hash == sources.source_hash(variant, entry.dsl)
        assert entry.sha256 == manifest.digest(built.folder / ARCH / entry.file)
        assert (entry.symbol, entry.op, entry.entry) == (variant.name, variant.op, variant.entry)
        assert entry.config == repr(variant.config)
        assert entry.dsl == sources.dsl_version()
        assert entry.tvm_ffi == library.tvm_ffi_version()
        assert entry.launch_smem == (0,)


def test_nothing_is_left_beside_libraries_and_manifest(built: Built) -> None:
    expected = {f"{name}.so" for name in _names(built.variants)} | {"manifest.json", ".lock"}
    assert {file.name for file in (built.folder / ARCH).iterdir()} == expected


def test_a_second_build_changes_nothing(built: Built) -> None:
    before = _times(built.folder / ARCH)
    report = build.build(built.variants, built.folder / ARCH)
    assert report == build.Report((), _names(built.variants), {})
    assert _times(built.folder / ARCH) == before


def test_an_edit_rebuilds_and_until_then_the_old_library_is_not_used(sample, tmp_path: Path) -> None:
    first, second = sample.variants
    folder = tmp_path / "aot"
    assert build.build([first], folder).built == (first.name,)
    sample.edit("device/math.py", "value * factor", "factor * value")
    sources.forget()
    assert manifest.find(folder, first) == "built from other sources"
    report = build.build([first, second], folder)
    assert report.failed == {}
    assert report.built == _names(sample.variants)
    assert isinstance(manifest.find(folder, first), Path)


@pytest.mark.parametrize("text", ["", "null", "[]", '{"schema": 1}', '{"schema": 1, "variants": [1]}'])
def test_a_manifest_of_another_form_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    assert manifest.read(tmp_path) == {}


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest"])
def test_only_what_is_damaged_is_built_again(built: Built, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = built.folder / ARCH
    first, second = built.variants
    library_file = folder / f"{first.name}.so"
    if damage == "truncate":
        library_file.write_bytes(library_file.read_bytes()[:1000])
    elif damage == "remove":
        library_file.unlink()
    else:
        (folder / "manifest.json").write_text("{")
    asked: list[str] = []
    monkeypatch.setattr(build, "_compile_all", lambda arch, todo, jobs, done: asked.extend(v.name for v in todo))
    build.build(built.variants, folder)
    assert asked == ([first.name, second.name] if damage == "manifest" else [first.name])


def test_pruning_drops_what_is_no_longer_a_variant(built: Built) -> None:
    first, second = built.variants
    report = build.build([first], built.folder / ARCH, prune=True)
    assert report.unchanged == (first.name,)
    assert manifest.read(built.folder / ARCH).keys() == {first.name}
    assert not (built.folder / ARCH / f"{second.name}.so").exists()


def test_without_pruning_the_others_stay(built: Built) -> None:
    build.build(built.variants[:1], built.folder / ARCH)
    assert manifest.read(built.folder / ARCH).keys() == set(_names(built.variants))


def test_a_variant_that_does_not_compile_is_reported_and_the_others_are_built(sample, tmp_path: Path) -> None:
    good = sample.variants[0]
    bad = dataclasses.replace(good, name="bad", config="not a configuration")
    seen: list[tuple[int, int, str]] = []
    report = build.build([bad, good], tmp_path / "aot", keep=tmp_path / "kept", progress=lambda *a: seen.append(a))
    assert report.built == (good.name,)
    assert report.failed.keys() == {"bad"}
    assert "'str' object has no attribute 'threads'" in report.failed["bad"]
    assert seen == [(1, 2, "bad"), (2, 2, good.name)]
    assert {file.name for file in (tmp_path / "kept").iterdir()} == {
        f"{good.name}.{e}" for e in ("ptx", "cubin", "log")
    }
    assert ".target sm_90a" in (tmp_path / "kept" / f"{good.name}.ptx").read_text()
    assert "spill stores" in (tmp_path / "kept" / f"{good.name}.log").read_text()


def test_a_variant_whose_sources_change_meanwhile_is_not_recorded(sample, tmp_path: Path, monkeypatch) -> None:
    def compile_all(arch, todo, jobs, done) -> None:
        sample.edit("stages/scale/kernel.py", "scaled(x[i], s)", "scaled(s, x[i])")
        for variant in todo:
            done(variant, None)

    monkeypatch.setattr(build, "_compile_all", compile_all)
    report = build.build(sample.variants, tmp_path / ARCH)
    assert report.failed.keys() == {variant.name for variant in sample.variants} and not report.built
    assert all("sources changed while it was compiled" in message for message in report.failed.values())
    assert not manifest.read(tmp_path / ARCH)


def test_two_builders_at_once_share_the_work(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "culax.runtime.build", "--arch", ARCH, "--plan", "sample_op.plan"]
    command += ["--output", str(tmp_path / "aot"), "--jobs", "1", "--only", "*_t64"]
    environment = {**os.environ, "PYTHONPATH": f"{Path(build.AOT).parents[1]}{os.pathsep}{HERE}"}
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    said = sorted(out for out, _ in outputs)
    assert said[0].startswith(f"{ARCH}: 0 built, 1 unchanged, 0 failed")
    assert said[1].startswith(f"{ARCH}: 1 built, 0 unchanged, 0 failed")
    assert manifest.read(tmp_path / "aot" / ARCH).keys() == {"sample_scale_t64"}


def test_command_line_lists_and_selects(capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["--arch", ARCH, "--plan", "sample_op.plan", "--list", "--only", "*_t64"]) == 0
    assert capsys.readouterr().out.split() == ["sample_scale_t64"]


def test_command_line_lists_every_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["--list", "--only", "*e4m3_e4m3_bf16_*"]) == 0
    names = capsys.readouterr().out.split()
    assert {name.rpartition("_")[2] for name in names} == {"sm90", "sm100", "sm103"}


def test_command_line_builds_for_a_named_architecture_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        build.main([])
    assert stop.value.code == 2 and "--arch" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--list"], ["--arch", ARCH], ["--arch", ARCH, "--list"]], ids=" ".join)
def test_command_line_refuses_a_pattern_that_names_nothing(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        build.main([*more, "--only", "wgrad_fp61*"])
    assert stop.value.code == 2 and "wgrad_fp61*" in capsys.readouterr().err


def test_output_that_nobody_reads_is_no_error() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(build.AOT).parents[1])}
    command = [sys.executable, "-m", "culax", "build", "--list"]
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen(command, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert process.communicate(timeout=60)[1] == ""


def test_command_line_refuses_an_unknown_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        build.main(["--arch", "sm_80"])
    assert stop.value.code == 2
    assert "sm_90a" in capsys.readouterr().err


def test_without_the_compiler_the_command_says_what_to_install(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sources, "dsl_version", lambda: None)
    assert build.main(["--arch", ARCH, "--plan", "sample_op.plan", "--output", str(tmp_path)]) == 1
    assert "pip install 'nvidia-cutlass-dsl[cu13]'" in " ".join(capsys.readouterr().err.split())


def test_without_a_c_compiler_the_message_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    from culax.runtime.compile import link

    with pytest.raises(NotImplementedError, match="install gcc, or set CC"):
        link([], tmp_path / "x.so")
