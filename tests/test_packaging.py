"""The wheel: what is in it, with a compiler and without, installed beside a torch that is already there."""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SITE_PACKAGES = Path(torch.__file__).parents[1]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc_stub", "torch_ext")
ASIDE = shutil.ignore_patterns("__pycache__", "_aot", "*.so", "*.egg-info")

# A process with torch's libraries and no Python: it loads the stub and calls an op through the dispatcher.
PROBE = r"""
#include <dlfcn.h>
#include <cstdint>
#include <cstdio>
template <class F> F* find(const char* name) { return reinterpret_cast<F*>(dlsym(RTLD_DEFAULT, name)); }
using Empty = int32_t(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, void**);
using Call = int32_t(const char*, const char*, uint64_t*);
void call(const char* when) {
  int64_t size[] = {1, 1, 1};
  uint64_t stack[3];
  for (auto& slot : stack) {
    void* tensor = nullptr;
    int32_t fp32 = find<int32_t()>("aoti_torch_dtype_float32")();
    find<Empty>("aoti_torch_empty_strided")(3, size, size, fp32, 0, 0, &tensor);
    slot = reinterpret_cast<uint64_t>(tensor);
  }
  int32_t failed = find<Call>("aoti_torch_call_dispatcher")("culax::grouped_mm", "", stack);
  const char* error = failed ? find<const char*()>("torch_exception_get_what_without_backtrace")() : "none";
  std::fprintf(stderr, "%s: %s\n", when, error);
}
int main(int, char** argv) {
  if (!dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) return std::fprintf(stderr, "%s\n", dlerror()), 2;
  if (find<int()>("Py_IsInitialized")) return std::fprintf(stderr, "this process has Python\n"), 3;
  call("before");
  void* stub = dlopen(argv[2], RTLD_NOW);
  if (!stub) return std::fprintf(stderr, "%s\n", dlerror()), 4;
  call("after");
  std::fputs(reinterpret_cast<const char* (*)()>(dlsym(stub, "culax_schemas"))(), stdout);
}
"""


def build_wheel(folder: Path, **environment: str) -> Path:
    source = folder / "source"
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=ASIDE)
        else:
            source.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    run([*command, "-w", str(folder), str(source)], PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin", **environment)
    return next(folder.glob("*.whl"))


def run(command: list[str], cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Installed:
    """A fresh environment that sees this one's torch, but not its culax, with the wheel installed into it."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder, with_pip=False)
        self.python = str(folder / "bin" / "python")
        self.site_packages = next(folder.glob("lib/python*/site-packages"))
        (self.site_packages / "outer.pth").write_text(f"{SITE_PACKAGES}\n")
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-deps", "--no-index"]
        run([*pip, "--ignore-installed", str(wheel)], PATH="/usr/bin:/bin")
        self.package = self.site_packages / "culax"

    def evaluate(self, code: str) -> list[str]:
        return run([self.python, "-c", code], cwd=self.site_packages.parent, OMP_NUM_THREADS="1").splitlines()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("environment"), wheel)


def test_wheel_holds_the_package_and_nothing_else(wheel):
    assert wheel.name.split("-", 2)[2].startswith("cp310-abi3-linux")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert {"culax/schemas.txt", "culax/py.typed", "culax/_stub.abi3.so"} <= package
    modules = {str(path.relative_to(ROOT / "torch_ext")) for path in (ROOT / "torch_ext").rglob("*.py")}
    assert {name for name in package if name.endswith(".py")} == modules
    assert {Path(name).suffix for name in package} <= {".py", ".typed", ".txt", ".md", ".so"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_metadata_states_the_dependencies(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    needed = [line.split(": ", 1)[1] for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    always = {requirement.split(">")[0] for requirement in needed if "extra ==" not in requirement}
    assert always == {"torch", "apache-tvm-ffi", "rich"}
    assert "Requires-Python: >=3.10" in metadata


def test_installed_wheel_runs_from_the_compiled_stub(installed):
    code = (
        "import culax, torch; print(culax.__file__); print(culax.__version__); print(culax.ops.schema_source);"
        "x = torch.ones(3, 2); w = torch.ones(1, 2, 2); offs = torch.tensor([2], dtype=torch.int32);"
        "print(torch.ops.culax.grouped_mm(x, w, offs).sum().item())"
    )
    file, version, source, total = installed.evaluate(code)
    assert Path(file).parent == installed.package
    assert (version, source, total) == ("0.1.0", "compiled stub", "8.0")


def test_stub_declares_the_ops_in_a_process_without_python(installed, tmp_path):
    (tmp_path / "probe.cpp").write_text(PROBE)
    run(["g++", "-std=c++17", "-o", str(tmp_path / "probe"), str(tmp_path / "probe.cpp"), "-ldl"], PATH="/usr/bin:/bin")
    library = SITE_PACKAGES / "torch" / "lib" / "libtorch_cpu.so"
    stub = next(installed.package.glob("_stub*.so"))
    done = subprocess.run([tmp_path / "probe", library, stub], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "torch_ext" / "culax" / "schemas.txt").read_text()
    before, after = done.stderr.split("after:")
    assert "Could not find schema for culax::grouped_mm" in before
    assert "Could not run 'culax::grouped_mm' with arguments from the 'CPU' backend" in after


def test_without_a_compiler_the_package_works_and_says_so(tmp_path):
    wheel = build_wheel(tmp_path, CC="false", CXX="false", LDSHARED="false", LDCXXSHARED="false")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    installed = Installed(tmp_path / "environment", wheel)
    said = installed.evaluate("from culax import doctor; print(doctor.facts()['op schemas'])")
    assert said == ["declared by Python: no compiled stub beside the package"]


def test_a_stub_of_other_schemas_is_refused(installed, tmp_path):
    shutil.copytree(installed.package, tmp_path / "culax")
    with (tmp_path / "culax" / "schemas.txt").open("a") as schemas:
        schemas.write("_planted(Tensor x) -> Tensor\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import culax; print(culax.ops.schema_source)"
    assert installed.evaluate(code) == ["python"]
