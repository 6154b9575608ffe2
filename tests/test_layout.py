"""House rules a machine can check: lengths, parameters, import contracts, nothing of one machine in the tree."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "torch_ext" / "culax"
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 500, 120, 8
SOURCE = {".py", ".cpp", ".md", ".toml", ".yaml", ".sh", ".txt"}
# Texts to read as a whole, not code: the licence, training text, and schemas.
NOT_CODE = {"LICENSE"}
SKIPPED_FOLDERS = {".git", ".venv", "build", "dist", "__pycache__", ".mypy_cache", ".ruff_cache", ".hypothesis"}


def tracked() -> list[Path]:
    """Files under version control; in an unpacked archive, all files that are not built."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    found = (path for path in ROOT.rglob("*") if path.is_file())
    return [path for path in found if not SKIPPED_FOLDERS & set(path.relative_to(ROOT).parts)]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


PYTHON = [path for path in tracked() if path.suffix == ".py"]


def mirrors_schema(path: Path, name: str) -> bool:
    """Functions whose parameters are given from outside: op implementations, a mirror of another library's call."""
    op_implementations = path.name in {"api.py", "fakes.py", "main_grad.py"} or path.parent.name == "reference"
    validators = path.name == "checks.py" and name.startswith("validate_")
    return op_implementations or validators or name == "chunk_kda"


def is_kernel_entry(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Device code takes its tensors one by one: what is decorated by the kernel language."""
    decorated = any("cute." in ast.unparse(decorator) for decorator in function.decorator_list)
    return decorated and {"stages", "device"} & set(path.parts) != set()


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls", "ctx")])


def long_functions(paths: list[Path]) -> list[str]:
    return [
        f"{shown(path)}:{f.lineno} {f.name} has {length} lines"
        for path in paths
        for f in functions(path)
        if f.end_lineno is not None and (length := f.end_lineno - f.lineno + 1) > MAX_FUNCTION
    ]


def crowded_functions(paths: list[Path]) -> list[str]:
    return [
        f"{shown(path)}:{f.lineno} {f.name} has {count} parameters"
        for path in paths
        for f in functions(path)
        if (count := parameter_count(f)) > MAX_PARAMETERS
        and not mirrors_schema(path, f.name)
        and not is_kernel_entry(path, f)
    ]


def test_files_are_short():
    sources = [path for path in tracked() if path.suffix in SOURCE - {".txt"} and path.name not in NOT_CODE]
    lengths = {shown(path): len(path.read_text().splitlines()) for path in sources}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE} == {}


def test_functions_are_short():
    assert long_functions(PYTHON) == []


def test_functions_take_few_parameters():
    assert crowded_functions(PYTHON) == []


def test_a_long_and_crowded_function_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "planted.py"
    body = "\n".join(f"    x{i} = {i}" for i in range(MAX_FUNCTION))
    path.write_text(f"def planted({', '.join('abcdefghi')}):\n{body}\n")
    assert long_functions([path]) and crowded_functions([path])


def test_every_package_folder_is_a_package():
    folders = {path.parent for path in PYTHON if PACKAGE in path.parents}
    assert [shown(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def lint_imports(config: Path) -> subprocess.CompletedProcess[str]:
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", command, "--no-cache", "--no-logo", str(config)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "torch_ext"), "PATH": ""},
        capture_output=True,
        text=True,
    )


def test_imports_follow_the_contracts():
    result = lint_imports(ROOT / "pyproject.toml")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_contract_that_is_broken_is_noticed(tmp_path):
    config = tmp_path / "contracts.toml"
    config.write_text(
        '[tool.importlinter]\nroot_package = "culax"\n'
        '[[tool.importlinter.contracts]]\nname = "planted"\ntype = "forbidden"\n'
        'source_modules = ["culax.ops"]\nforbidden_modules = ["culax.kda.api"]\n'
    )
    result = lint_imports(config)
    assert result.returncode == 1 and "planted" in result.stdout


# A path below a home or a mount, an address, or a host name: whatever belongs to one machine.
OF_ONE_MACHINE = re.compile(r"(?<![\w./-])/(home|Users|root|work|mnt|opt)/\w|\b\d{1,3}(\.\d{1,3}){3}:\d+|\.internal\b")


def machine_traces(text: str) -> list[str]:
    return [match.group(0) for match in OF_ONE_MACHINE.finditer(text)]


def test_nothing_of_one_machine_is_tracked():
    texts = {path: path.read_text(errors="ignore") for path in tracked() if path.suffix in SOURCE | {".json", ""}}
    traces = {shown(path): found for path, text in texts.items() if (found := machine_traces(text))}
    traces.pop("tests/test_layout.py", None)
    assert traces == {}


@pytest.mark.parametrize("text", ["open('/home/me/x')", "10.0.0.7:8080", "see /opt/cuda/bin"])
def test_a_trace_of_one_machine_is_noticed(text):
    assert machine_traces(text)


def test_nothing_built_is_tracked():
    built = {".so", ".o", ".whl", ".cubin", ".ptx"}
    assert [shown(path) for path in tracked() if path.suffix in built] == []
