"""Backward calls of a known signature: what they hand to the kernels, and what sends them back to the general path."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from culax import calls, dispatch
from culax.kda import api, launch, plan

OPS = torch.ops.culax
B, T, H, HV, K, V = 2, 70, 2, 4, 64, 128
BF16 = torch.bfloat16


class Recorder:
    """Plays the kernel: remembers its arguments and fills output i with i."""

    def __init__(self) -> None:
        self.arguments: tuple = ()
        self.call = self

    def __call__(self, *arguments: Tensor) -> None:
        self.arguments = arguments
        for i, output in enumerate(arguments[13:19]):
            output.fill_(i)


@pytest.fixture(params=[True, False], ids=["guards", "no_guards"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Every call is planned for the kernels, which a recorder plays; CPU tensors stand for a GPU's.

    With torch's tensor guards, and as if this torch had none.
    """
    if not request.param:
        monkeypatch.setattr(calls, "_TensorGuards", None)
    recorder = Recorder()
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(calls, "current_device", lambda: None)
    monkeypatch.setattr(launch, "kernel", lambda _: recorder)
    monkeypatch.setattr(
        dispatch, "choose", lambda problem, _: dispatch.Choice("cutedsl", "", plan.plan(problem, "sm_90a"), "built")
    )
    monkeypatch.setattr(dispatch, "_prepared", {})
    monkeypatch.setattr(api, "_ready", {})
    monkeypatch.setattr(api, "_recent", calls.Recent())
    return recorder


def arguments(
    packed: bool = False, states: bool = True, beta: torch.dtype = torch.float32, offsets: torch.dtype = torch.int32
) -> list:
    batch = 1 if packed else B
    rows = (batch, T)
    do, v = (torch.randn(*rows, HV, V).to(BF16) for _ in range(2))
    q, k = (torch.randn(*rows, H, K).to(BF16) for _ in range(2))
    aqk, akk = (torch.randn(*rows, HV, 64).to(BF16) for _ in range(2))
    initial, dht = (torch.randn(2, HV, K, V) if states else None for _ in range(2))
    cu_seqlens = torch.tensor([0, 5, T], dtype=offsets) if packed else None
    g, b = torch.randn(*rows, HV, K), torch.rand(*rows, HV).to(beta)
    return [do, dht, q, k, v, g, b, aqk, akk, initial, cu_seqlens, 0.5]


KINDS = {
    "equal": {},
    "packed": {"packed": True},
    "packed_int64": {"packed": True, "offsets": torch.int64},
    "no_states": {"states": False},
    "narrow_beta": {"beta": BF16},
}


@pytest.mark.parametrize("kind", KINDS)
def test_both_paths_hand_over_the_same(kind: str, kernel: Recorder, general: list[str]) -> None:
    given = arguments(**KINDS[kind])
    seen = []
    for _ in range(3):
        gradients = OPS.kda_bwd(*given)
        seen.append(kernel.arguments)
        for i, (gradient, like) in enumerate(zip(gradients, (*given[2:7], given[9]))):
            assert gradient.is_contiguous() and gradient.eq(i).all()
            assert like is None or (gradient.shape == like.shape and gradient.dtype == like.dtype)
        assert given[9] is not None or gradients[5].shape == (0, HV, K, V)
    assert len(general) == 1
    for later in seen[1:]:
        for mine, theirs in zip(later, seen[0]):
            if isinstance(mine, Tensor):
                assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
            else:
                assert mine == theirs
        for mine, theirs in zip(later[:12], seen[0][:12]):
            assert torch.equal(mine, theirs)
        assert not {x.data_ptr() for x in later[13:19] if x.numel()} & {
            x.data_ptr() for x in given if torch.is_tensor(x)
        }


@pytest.mark.parametrize("kernel", [True], ids=["guards"], indirect=True)
def test_recent_signatures_are_told_apart_without_putting_them_together(
    kernel: Recorder, general: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [arguments(**KINDS[kind]) for kind in KINDS]
    for given in kinds * 2:
        OPS.kda_bwd(*given)
    assert len(general) == len(kinds)
    monkeypatch.setattr(api.checks, "signature", lambda _: pytest.fail("a signature was put together"))
    for given in kinds[-calls.Recent.KEPT :]:
        gradients = OPS.kda_bwd(*given)
        assert [x.shape for x in gradients[:5]] == [x.shape for x in given[2:7]]
        assert gradients[4].dtype is given[6].dtype and kernel.arguments[1].shape[0] == (0 if given[1] is None else 2)


@pytest.mark.parametrize("packed", [False, True])
def test_the_workspace_is_as_large_as_the_layout_says(packed: bool, kernel: Recorder) -> None:
    OPS.kda_bwd(*arguments(packed=packed))
    batch, sequences = (1, 2) if packed else (B, B)
    chunks = 2 + sequences if packed else 2 * B
    config = plan.plan_for("sm_90a", K, V, "int64" if packed else "", True).config
    tapes = sum(config.tape_bytes(name) for name in (*config.tapes, "decay"))
    assert tapes >= 2 * 3 * 64 * K + 2 * 64 * V + 2 * (2 * K * V + 2 * 64 * V) + 4 * K
    shares, numbers = 2 * 4 * batch * T * HV * K, 16 * (chunks + 2) + 2 * 16
    assert 2 * kernel.arguments[12].numel() == chunks * HV * tapes + shares + numbers


@pytest.mark.parametrize("position", [0, 1, 9, 10], ids=["do", "dht", "initial_state", "cu_seqlens"])
def test_what_was_absent_is_not_overlooked(position: int, kernel: Recorder, general: list[str]) -> None:
    given = arguments(packed=True)
    less = [*given[:position], None, *given[position + 1 :]]
    if position == 10:  # one sequence then
        less[1], less[9] = (state[:1] for state in (given[1], given[9]))
    for call in (less, given, less):
        gradients = OPS.kda_bwd(*call)
        do, dht, initial, long_offsets, offsets = (kernel.arguments[i] for i in (0, 1, 9, 10, 11))
        assert torch.equal(do, torch.zeros_like(given[0]) if call[0] is None else call[0])
        for mine, state in ((dht, call[1]), (initial, call[9]), (gradients[5], call[9])):
            assert mine.shape[0] == (0 if state is None else state.shape[0])
        assert not long_offsets.numel() and offsets.numel() == (0 if call[10] is None else 3)
    assert len(general) == (3 if position == 0 else 2)


def shifted(tensor: Tensor) -> Tensor:
    """The same values at an address 8 bytes past one that is aligned to 16."""
    past = 8 // tensor.element_size()
    flat = torch.empty(tensor.numel() + past, dtype=tensor.dtype)
    flat[past:] = tensor.reshape(-1)
    return flat[past:].view(tensor.shape)


CHANGES: dict[str, Callable[[list], list]] = {
    "misaligned": lambda x: [*x[:3], shifted(x[3]), *x[4:]],
    "misaligned_state": lambda x: [*x[:9], shifted(x[9]), *x[10:]],
    "strided": lambda x: [*x[:2], torch.cat((x[2], x[2]), -1)[..., ::2], *x[3:]],
    "no_do": lambda x: [None, *x[1:]],
    "half_gates": lambda x: [*x[:5], x[5].to(BF16), *x[6:]],
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_must_be_copied_takes_the_general_path(change: str, kernel: Recorder, general: list[str]) -> None:
    OPS.kda_bwd(*arguments())
    changed = CHANGES[change](arguments())
    for _ in range(2):
        OPS.kda_bwd(*changed)
        for mine, given in zip(kernel.arguments[:10], changed):
            assert mine.data_ptr() % 16 == 0
            assert given is None or torch.equal(mine, given.to(mine.dtype))
    assert len(general) == 3


def test_another_current_device_takes_the_general_path(kernel: Recorder, general: list[str], monkeypatch) -> None:
    given = arguments()
    OPS.kda_bwd(*given)
    monkeypatch.setattr(calls, "current_device", lambda: 1)
    OPS.kda_bwd(*given)
    assert len(general) == 2


def test_memory_that_deterministic_torch_fills_comes_from_the_general_path(
    kernel: Recorder, general: list[str], poisoned_memory: None
) -> None:
    given = arguments()
    for _ in range(2):
        OPS.kda_bwd(*given)
    assert len(general) == 2


def test_bad_arguments_of_a_known_signature_still_raise(kernel: Recorder) -> None:
    given = arguments()
    OPS.kda_bwd(*given)
    with pytest.raises(ValueError, match="`scale`: expected a finite number"):
        OPS.kda_bwd(*given[:-1], float("nan"))
    with pytest.raises(ValueError, match="`k`: expected dtype"):
        OPS.kda_bwd(*given[:3], given[3].float(), *given[4:])
