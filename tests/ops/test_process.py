"""Threads, fork, and what `import culax` does and does not do, each in a fresh process where that matters."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import culax
from tests.ops import cases

ROOT = Path(__file__).parents[2]
OPS = torch.ops.culax


def run_python(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'torch_ext'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_import_initialises_nothing() -> None:
    out = run_python(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import culax\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(torch.cuda.is_initialized(), sorted(roots & {'cutlass', 'tvm_ffi', 'cuda', 'triton', 'rich'}))"
    )
    assert out == "False []\n"


def test_works_without_kernel_packages() -> None:
    """cutlass and tvm_ffi that can't be imported change nothing on the CPU: forward, backward, compile, explain."""
    out = run_python(
        "import sys\n"
        "sys.modules['cutlass'] = sys.modules['tvm_ffi'] = None\n"
        "import torch, culax\n"
        "from tests.ops import cases\n"
        "case = cases.kda(tokens=5).requiring()\n"
        "case.forward()[0].sum().backward()\n"
        "mat_a, mat_b, offs = cases.wgrad()\n"
        "torch.compile(torch.ops.culax.grouped_wgrad, backend='eager')(mat_a, mat_b, offs)\n"
        "print(culax.warmup('grouped_wgrad', mat_a, mat_b, offs).backend, bool(case.q.grad.any()))\n"
    )
    assert out == "reference True\n"


def test_threads() -> None:
    """Calls from several threads, the first of a signature among them, give what one thread gives."""
    jobs = [cases.kda(tokens=tokens) for tokens in (61, 62, 63, 64) * 2]
    wanted = [job.backward(job.v, job.initial_state) for job in jobs]
    results: list = [None] * len(jobs)
    start = threading.Barrier(len(jobs))

    def work(index: int) -> None:
        start.wait()
        for _ in range(3):
            case = jobs[index].requiring()
            o, final_state, _, _ = case.forward()
            leaves = case.differentiable
            results[index] = torch.autograd.grad(
                (o, final_state), leaves, (case.v.detach(), case.initial_state.detach())
            )

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, true in zip(results, wanted):
        for gradient, expected in zip(result, true):
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_fork() -> None:
    """A child forked after the import and after calls computes the same."""
    out = run_python(
        "import os, torch, culax\n"
        "from tests.ops import cases\n"
        "torch.set_num_threads(1)\n"
        "case = cases.kda(tokens=70)\n"
        "before = case.backward(case.v, None)\n"
        "child = os.fork()\n"
        "same = all(map(torch.equal, case.backward(case.v, None), before))\n"
        "if child == 0:\n"
        "    os._exit(0 if same else 3)\n"
        "print(same, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert out == "True 0\n"


def test_schemas_have_one_source() -> None:
    """What is registered is what schemas.txt says, whichever of stub and Python declared it."""
    assert culax.ops.schema_source in ("compiled stub", "python")
    assert bool(culax.ops.schema_note) == (culax.ops.schema_source == "python")
    lines = (ROOT / "torch_ext/culax/schemas.txt").read_text().splitlines()
    for line in lines:
        name = line.partition("(")[0]
        schema = culax.ops.overload(name)._schema
        assert str(schema) == str(torch._C.parse_schema(f"culax::{line}"))
        if not name.startswith("_"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"culax::{name}", "Autograd")


def test_both_schema_sources_work(tmp_path: Path) -> None:
    """A copy of the package without the stub falls back to Python; a stub made from other schemas is refused."""
    import shutil

    package = tmp_path / "culax"
    shutil.copytree(ROOT / "torch_ext/culax", package, ignore=shutil.ignore_patterns("_stub*", "_aot", "__pycache__"))
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from culax import ops\n"
        "print(ops.schema_source, '|', ops.schema_note)"
    )
    assert run_python(code) == "python | no compiled stub beside the package\n"
    (package / "_stub.abi3.so").write_bytes(b"another library")
    assert run_python(code) == "python | _stub.abi3.so was built from other schemas: build the package again\n"


def test_public_names() -> None:
    assert set(culax.__all__) >= {"chunk_kda", "GroupedLinear", "explain", "warmup", "__version__"}
    assert all(hasattr(culax, name) for name in culax.__all__)
    assert isinstance(culax.__version__, str)


@pytest.mark.parametrize("kind", ["pickle", "deepcopy"])
def test_outputs_can_be_copied(kind: str) -> None:
    import copy
    import pickle

    outputs = cases.kda(tokens=5).forward()
    copied = copy.deepcopy(outputs) if kind == "deepcopy" else pickle.loads(pickle.dumps(outputs))
    assert all(map(torch.equal, copied, outputs))
