"""What a launch hands to the kernels: inputs copied only where they must be, workspaces sized from shapes."""

import pytest
import torch

from culax.kda import launch, plan
from tests.gpu import kda_stages

B, T, H, HV, K, V = 2, 70, 2, 4, 64, 128


def arguments(**changes):
    bf16 = torch.bfloat16
    values = {
        "do": torch.randn(B, T, HV, V, dtype=bf16),
        "dht": None,
        "q": torch.randn(B, T, H, K, dtype=bf16),
        "k": torch.randn(B, T, H, K, dtype=bf16),
        "v": torch.randn(B, T, HV, V, dtype=bf16),
        "g": torch.randn(B, T, HV, K),
        "beta": torch.rand(B, T, HV),
        "aqk": torch.randn(B, T, HV, 64, dtype=bf16),
        "akk": torch.randn(B, T, HV, 64, dtype=bf16),
        "initial_state": None,
        "cu_seqlens": None,
        "scale": 0.5,
    }
    return tuple((values | changes).values())


def test_inputs_that_kernels_can_read_are_not_copied():
    given = arguments(q=torch.randn(B, H, T, K, dtype=torch.bfloat16).transpose(1, 2))
    inputs, scale = launch.collect(given)
    assert scale == 0.5
    for tensor, mine in zip(given[2:9], (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.aqk, inputs.akk)):
        assert mine is tensor


@pytest.mark.parametrize("case", ["padded", "strided", "shifted", "half-gates"])
def test_other_inputs_are_copied_with_their_values(case):
    bf16 = torch.bfloat16
    given = {
        "padded": {"q": torch.randn(B, T, H, K + 1, dtype=bf16)[..., :K]},
        "strided": {"q": torch.randn(B, T, H, 2 * K, dtype=bf16)[..., ::2]},
        "shifted": {"q": torch.randn(B * T * H * K + 1, dtype=bf16)[1:].view(B, T, H, K)},
        "half-gates": {"g": torch.randn(B, T, HV, K, dtype=bf16)},
    }[case]
    ((name, tensor),) = given.items()
    mine = getattr(launch.collect(arguments(**given))[0], name)
    assert mine.is_contiguous() and mine.data_ptr() % 16 == 0
    assert torch.equal(mine, tensor.to(mine.dtype)) and mine is not tensor


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_of_any_stride_arrive_contiguous(dtype):
    given = list(arguments())
    given[10] = torch.tensor([[0, 9], [5, 9], [T, 9]], dtype=dtype)[:, 0]
    offsets = launch.collect(tuple(given))[0].cu_seqlens
    assert offsets.is_contiguous() and offsets.tolist() == [0, 5, T]
    pair = launch.offsets_pair(offsets, offsets.device)
    assert [x.dtype for x in pair] == [torch.int64, torch.int32]
    assert [x.numel() for x in pair] == ([0, 3] if dtype is torch.int32 else [3, 0])


def test_absent_states_are_empty_and_absent_do_is_one_row_of_zeros():
    inputs, _ = launch.collect(arguments(do=None))
    assert inputs.initial.shape == inputs.dht.shape == (0, HV, K, V)
    assert inputs.do.shape == (B, T, HV, V) and inputs.do.stride() == (0, 0, 0, 1)
    assert inputs.do.untyped_storage().nbytes() == 2 * V and not inputs.do.any()


@pytest.mark.parametrize(
    ("offsets", "chunks", "rows", "bounds"),
    [(None, 4, 4, 3), ([0, 5, 70], 4, 6, 3), ([3], 2, 4, 1)],
    ids=["equal", "packed", "no-sequence"],
)
def test_workspaces_follow_from_shapes(offsets, chunks, rows, bounds):
    given = list(arguments())
    if offsets is not None:
        given[:10] = [None if x is None else x[:1] for x in given[:10]]
        given[10] = torch.tensor(offsets)
    tapes = kda_stages.allocate(launch.collect(tuple(given))[0])
    keys, values, states = (tapes.minus_w, tapes.qg, tapes.kg), (tapes.u, tapes.v_new, tapes.dvn), (tapes.h, tapes.dh)
    for group, size in ((keys, 64 * K), (values, 64 * V), (states, K * V)):
        for tape in group:
            assert tape.shape[:2] == (chunks, HV) and tape[0, 0].numel() == size and tape.data_ptr() % 16 == 0
    assert tapes.decay.shape == (chunks, HV, K) and tapes.decay.dtype == torch.float32
    assert tapes.table.shape == (rows, 4) and tapes.bounds.shape == (bounds,)


@pytest.mark.parametrize(
    ("sequences", "heads", "tokens", "segments"),
    [
        *((None, 8, 65536, 4), (1, 8, 65536, 4), (40, 8, 65536, 1), (None, 64, 4096, 1)),
        *((2, 1, 96 * 64, 3), (2, 1, 95 * 64, 1)),  # partial chunks do not count, of which each sequence may have one
    ],
)
def test_segments_follow_from_shapes_and_take_their_place_in_the_workspace(sequences, heads, tokens, segments):
    chosen = plan.plan_for("sm_90a", 128, 128, "" if sequences is None else "int64", False)
    size, count = launch.sizes(chosen, torch.empty(1, tokens, heads, 128, device="meta"), sequences)
    assert count == segments
    chunks = tokens // 64 + (sequences or 0)
    one = chosen.config.workspace_bytes(chunks, sequences or 1, tokens, heads)
    states = (sequences or 1) * heads * segments
    states_and_transitions = 4 * states * 128 * 128 * 4 if segments > 1 else 0
    assert 2 * size == one + states_and_transitions
