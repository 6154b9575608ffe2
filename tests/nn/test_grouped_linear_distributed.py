import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("distributed_worker.py")
# DDP and FSDP2, each with and without main_grad, with and without activation checkpointing.
EXPECTED = [
    f"ok {wrap} accumulate={accumulate} checkpointed={checkpointed}"
    for wrap in ("ddp", "fsdp")
    for accumulate in (False, True)
    for checkpointed in (False, True)
]


def test_two_ranks_under_ddp_and_fsdp(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(REPO / "torch_ext"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, output in zip(ranks, outputs):
        assert process.returncode == 0, output
        assert [line for line in output.splitlines() if line.startswith("ok ")] == EXPECTED
