"""The compiled kernel's own argument checks, with tensors that only claim to be on a GPU.

What passes the checks ends in a driver error on a machine without a GPU, so passing and failing are told apart by name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from culax.grouped_wgrad import plan
from culax.runtime import load
from tests.fakecuda import fake_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="made-up addresses must never reach a GPU")

M, N, T, E = 128, 192, 256, 3
WORKSPACE = fake_cuda((E, 1, 16), torch.int64)
POINTERS = torch.zeros(64, dtype=torch.int64)
BUILT = {variant.name: variant for variant in plan.variants("sm_90a")}


def dense(**changes: Any) -> list[Any]:
    """Arguments of the token-major dense bf16 kernel."""
    arguments = {
        "mat_a": fake_cuda((M, T), torch.bfloat16, strides=(1, M)),
        "mat_b": fake_cuda((T, N), torch.bfloat16),
        "offs": fake_cuda((E,), torch.int32),
        "out": fake_cuda((E, M, N), torch.bfloat16),
        "ws": None,
        "sms": 132,
    }
    return list({**arguments, **changes}.values())


def discrete(**changes: Any) -> list[Any]:
    """Arguments of the kernel with one output an expert."""
    return dense(**{"out": POINTERS, "ws": WORKSPACE, **changes})


def call(name: str, arguments: list[Any]) -> Exception:
    with pytest.raises(Exception) as caught:
        load.get(BUILT[name])(*arguments)
    return caught.value


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("wgrad_bf16_bf16_mn_mn_sm90", dense()), ("wgrad_bf16_bf16_mn_mn_list_sm90", discrete())],
    ids=["dense", "list"],
)
def test_right_arguments_reach_the_driver(name: str, arguments: list[Any]) -> None:
    error = call(name, arguments)
    assert "cuda" in str(error).lower() and not isinstance(error, ValueError | TypeError), error


WRONG = {
    "operand_dtype": {"mat_a": fake_cuda((M, T), torch.float16, strides=(1, M))},
    "k_major_operand": {"mat_a": fake_cuda((M, T), torch.bfloat16)},
    "token_mismatch": {"mat_b": fake_cuda((T + 8, N), torch.bfloat16)},
    "unaligned_address": {"mat_a": fake_cuda((M, T), torch.bfloat16, strides=(1, M), address=(1 << 20) + 8)},
    "unaligned_pitch": {"mat_b": fake_cuda((T, N), torch.bfloat16, strides=(N + 4, 1))},
    "offs_of_64_bits": {"offs": fake_cuda((E,), torch.int64)},
    "expert_mismatch": {"out": fake_cuda((E + 1, M, N), torch.bfloat16)},
    "out_shape": {"out": fake_cuda((E, M, N + 8), torch.bfloat16)},
    "out_rows_not_dense": {"out": fake_cuda((E, M, N), torch.bfloat16, strides=(M * N * 2, 2 * N, 2))},
    "out_dtype": {"out": fake_cuda((E, M, N), torch.float32)},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_are_named(changes: dict[str, Any]) -> None:
    error = call("wgrad_bf16_bf16_mn_mn_sm90", dense(**changes))
    assert isinstance(error, ValueError | TypeError), error
    assert "cuda" not in str(error).lower()


@pytest.mark.parametrize(
    "changes",
    [{"ws": fake_cuda((E, 2, 16), torch.int64)}, {"ws": fake_cuda((E, 1, 16), torch.int64, address=(1 << 20) + 64)}],
    ids=["slots", "unaligned_workspace"],
)
def test_wrong_workspaces_are_named(changes: dict[str, Any]) -> None:
    error = call("wgrad_bf16_bf16_mn_mn_list_sm90", discrete(**changes))
    assert isinstance(error, ValueError | TypeError), error
