import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import culax
from culax.reference.kda_recurrence import kda_recurrence

torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    name: str
    options: dict[str, Any]
    lengths: tuple[int, ...] = ()
    tokens: int = 70
    heads: tuple[int, int] = (2, 2)
    without: tuple[str, ...] = field(default=())


KIMI = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
CASES = [
    Case("plain", {}),
    Case("scale", {"scale": 0.3}),
    Case("l2norm", {"use_qk_l2norm_in_kernel": True}),
    Case("beta-sigmoid", {"use_beta_sigmoid_in_kernel": True}),
    Case("neg-eigval", {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}),
    Case("gate", {"use_gate_in_kernel": True}),
    Case("gate-no-bias", {"use_gate_in_kernel": True}, without=("dt_bias",)),
    Case("bounded", {"use_gate_in_kernel": True, "lower_bound": -5.0}),
    Case("safe-gate", {"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True}),
    Case("bounded-no-rate", {"use_gate_in_kernel": True, "lower_bound": -2.0}, without=("A_log",)),
    Case("state-v-first", {"state_v_first": True}),
    Case("no-initial-state", {}, without=("initial_state",)),
    Case("gva", {}, heads=(2, 4)),
    Case("varlen", {}, lengths=(0, 1, 64, 5)),
    Case("kimi-gva", {**KIMI, "lower_bound": -5.0, "safe_gate": True, "state_v_first": True}, heads=(1, 3)),
    Case(
        "kimi-gva-varlen",
        {**KIMI, "allow_neg_eigval": True, "state_v_first": True},
        lengths=(3, 0, 66, 1),
        heads=(1, 2),
    ),
]
K, V = 4, 6


def draw_inputs(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    heads, value_heads = case.heads
    batch, tokens = (1, sum(case.lengths)) if case.lengths else (2, case.tokens)
    sequences = len(case.lengths) or batch
    k = draw(batch, tokens, heads, K)
    inputs = {
        "q": draw(batch, tokens, heads, K),
        "k": k if case.options.get("use_qk_l2norm_in_kernel") else k / k.norm(dim=-1, keepdim=True),
        "v": draw(batch, tokens, value_heads, V),
        "g": draw(batch, tokens, value_heads, K) * 2,
        "beta": draw(batch, tokens, value_heads),
        "initial_state": draw(sequences, value_heads, *((V, K) if case.options.get("state_v_first") else (K, V))),
        "A_log": draw(value_heads) * 0.5,
        "dt_bias": draw(value_heads * K),
    }
    if not case.options.get("use_gate_in_kernel"):
        inputs["g"] = -inputs["g"].abs()
        del inputs["A_log"], inputs["dt_bias"]
    if not case.options.get("use_beta_sigmoid_in_kernel"):
        inputs["beta"] = inputs["beta"].sigmoid()
    state = torch.float64 if dtype == torch.float64 else torch.float32
    kept = {"initial_state": state, "A_log": state, "dt_bias": state}
    return {n: t.to(kept.get(n, dtype)).requires_grad_() for n, t in inputs.items() if n not in case.without}


def offsets(case: Case) -> Tensor | None:
    return torch.tensor([0, *case.lengths]).cumsum(0) if case.lengths else None


def truth(case: Case, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The documented formulas, then the token recurrence."""
    o = case.options
    q, k, v, g, beta = (inputs[n] for n in ("q", "k", "v", "g", "beta"))
    A_log, dt_bias, state = (inputs.get(n) for n in ("A_log", "dt_bias", "initial_state"))
    if o.get("use_gate_in_kernel"):
        z = g if dt_bias is None else g + dt_bias.view(-1, K)
        rate = torch.ones(1, 1, dtype=g.dtype) if A_log is None else A_log.exp()[:, None]
        bound = o.get("lower_bound")
        g = -rate * torch.nn.functional.softplus(z) if bound is None else bound * torch.sigmoid(rate * z)
    if o.get("use_qk_l2norm_in_kernel"):
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if o.get("use_beta_sigmoid_in_kernel"):
        beta = torch.sigmoid(beta) * (2 if o.get("allow_neg_eigval") else 1)
    if state is not None and o.get("state_v_first"):
        state = state.transpose(-1, -2)
    out, final = kda_recurrence(q, k, v, g, beta, state, offsets(case), o.get("scale", K**-0.5))
    return out, final.transpose(-1, -2) if o.get("state_v_first") else final


def ours(case: Case, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    out, final = culax.chunk_kda(**inputs, **case.options, cu_seqlens=offsets(case), output_final_state=True)
    assert final is not None
    return out, final


def scalar(outputs: tuple[Tensor, Tensor]) -> Tensor:
    """A loss whose gradient differs from element to element."""
    return sum(
        (t.double() * torch.linspace(-1, 1.5, t.numel(), dtype=torch.float64).view(t.shape)).sum() for t in outputs
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_all_gradients_against_the_recurrence(case: Case) -> None:
    inputs = draw_inputs(case)
    got, expected = ours(case, inputs), truth(case, inputs)
    for name, one, other in zip(("o", "final_state"), got, expected):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    assert got[1].is_contiguous()
    values = list(inputs.values())
    gradients = torch.autograd.grad(scalar(got), values), torch.autograd.grad(scalar(expected), values)
    for name, one, other in zip(inputs, *gradients):
        assert one.abs().max() > 0, name
        # per head, so that a small head can't hide behind a large one
        dims = {"q": 2, "k": 2, "v": 2, "g": 2, "beta": 2, "initial_state": 1, "A_log": 0}
        one, other = (x.view(-1, K) if name == "dt_bias" else x for x in (one, other))
        for head in range(one.shape[dims.get(name, 0)]):
            a, b = (x.select(dims.get(name, 0), head) for x in (one, other))
            torch.testing.assert_close(
                a, b, rtol=0, atol=1e-11 * float(b.abs().max()) + 1e-14, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_stay_near_the_recurrence(dtype: torch.dtype) -> None:
    case = Case("kimi", {**KIMI, "lower_bound": -5.0}, heads=(1, 2))
    inputs = draw_inputs(case, dtype)
    exact = {name: value.detach().double().requires_grad_() for name, value in inputs.items()}
    got, expected = ours(case, inputs), truth(case, exact)
    assert [t.dtype for t in got] == [dtype, torch.float32]
    gradients = torch.autograd.grad(scalar(got), list(inputs.values()))
    wanted = torch.autograd.grad(scalar(expected), list(exact.values()))
    for name, one, other in zip(("o", "final_state", *inputs), (*got, *gradients), (*expected, *wanted)):
        assert name not in inputs or one.dtype == inputs[name].dtype
        error = ((one.double() - other).norm() / other.norm()).detach()
        # In fp32 the cancelling terms of dg show above the rounding of one product; sums over tokens cancel further.
        bound = {"g": 30, "A_log": 30, "dt_bias": 250}.get(name, 3) if dtype == torch.float32 else 1
        assert error < bound * torch.finfo(dtype).eps, (name, float(error))


def test_no_final_state_unless_asked() -> None:
    case = CASES[0]
    out, final = culax.chunk_kda(**draw_inputs(case))
    assert final is None and out.shape == (2, 70, 2, V)


# The public argument list of the peer this function stands in for; the last two arrive there through **kwargs.
PEER_NAMES = """
    q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel
    use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states
    state_v_first cu_seqlens cu_seqlens_cpu cp_context A_log dt_bias
""".split()  # noqa: SIM905
OURS = """
    q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel
    use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound state_v_first cu_seqlens A_log dt_bias others
""".split()  # noqa: SIM905


def test_signature_is_the_documented_one() -> None:
    parameters = inspect.signature(culax.chunk_kda).parameters
    assert list(parameters) == OURS
    assert [parameters[n].kind for n in OURS[:5]] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 5
    assert all(parameters[n].kind is inspect.Parameter.KEYWORD_ONLY for n in OURS[5:-1])
    off = {n for n in OURS[5:-1] if parameters[n].default is False}
    assert {n for n in OURS[5:-1] if parameters[n].default is None} == set(OURS[5:-1]) - off
    assert all(
        "use_" in n or n in {"output_final_state", "allow_neg_eigval", "safe_gate", "state_v_first"} for n in off
    )


def test_a_call_with_every_name_of_the_peer_goes_through() -> None:
    case = CASES[5]
    inputs = draw_inputs(case)
    rest = dict.fromkeys(("cu_seqlens", "cu_seqlens_cpu", "cp_context", "lower_bound"))
    rest |= {"disable_recompute": True, "return_intermediate_states": False, "chunk_size": 64, "scale": K**-0.5}
    rest |= {name: False for name in PEER_NAMES if name not in inputs and name not in rest}
    rest |= {"use_gate_in_kernel": True, "use_graph": True, "max_num_seqs": 8}
    assert set(PEER_NAMES) <= set(inputs) | set(rest)
    out, final = culax.chunk_kda(**inputs, **rest)
    assert final is None
    assert torch.equal(out, culax.chunk_kda(**inputs, use_gate_in_kernel=True)[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cp_context": object()}, NotImplementedError, "`cp_context`"),
        ({"return_intermediate_states": True}, NotImplementedError, "`return_intermediate_states`"),
        ({"head_first": False}, TypeError, "`head_first`"),
        ({"transpose_state_layout": True}, TypeError, "`transpose_state_layout`.*`state_v_first`"),
        ({"chunk_size": 128}, ValueError, "`chunk_size`: expected 32 or 64, got 128"),
        ({"allow_neg_eigval": True}, ValueError, "`allow_neg_eigval`: expected use_beta_sigmoid_in_kernel=True"),
        ({"use_gate_in_kernel": True}, ValueError, r"`A_log`: expected a tensor \[HV\].*got None"),
        ({"use_gate_in_kernel": True, "safe_gate": True}, ValueError, "`lower_bound`: expected a number.*got None"),
        (
            {"use_gate_in_kernel": True, "lower_bound": 0.5},
            ValueError,
            "`lower_bound`: expected a negative number, got 0.5",
        ),
        ({"use_gate_in_kernel": True, "lower_bound": float("nan")}, ValueError, "`lower_bound`.*got nan"),
        ({"use_gate_in_kernel": True, "lower_bound": float("-inf")}, ValueError, "`lower_bound`.*got -inf"),
        (
            {"use_gate_in_kernel": True, "lower_bound": torch.tensor(-5.0)},
            ValueError,
            "`lower_bound`: expected a number",
        ),
        (
            {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "g": torch.zeros(2, 3, 2, K).int()},
            ValueError,
            "`g`.*int32",
        ),
        (
            {"use_beta_sigmoid_in_kernel": True, "beta": torch.zeros(2, 3, 2).int()},
            ValueError,
            "`beta`.*floating.*int32",
        ),
        ({"scale": torch.tensor(0.5)}, ValueError, r"`scale`: expected a number, got a tensor of shape \(\)"),
        (
            {"use_gate_in_kernel": True, "lower_bound": -6.0, "safe_gate": True},
            ValueError,
            "-5 <= lower_bound.*got -6.0",
        ),
        ({"use_gate_in_kernel": True, "A_log": torch.zeros(3)}, ValueError, r"`A_log`: expected HV = 2.*\(3,\)"),
        (
            {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(4)},
            ValueError,
            r"`dt_bias`: expected HV\*K = 2\*4 elements, got shape \(4,\)",
        ),
        (
            {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(4, 2)},
            ValueError,
            r"`dt_bias`: expected HV\*K = 2\*4 elements, got shape \(4, 2\)",
        ),
        (
            {"use_gate_in_kernel": True, "A_log": torch.zeros(2, dtype=torch.int32)},
            ValueError,
            "`A_log`: expected a floating dtype, got torch.int32",
        ),
        (
            {"use_gate_in_kernel": True, "A_log": torch.zeros(2, device="meta")},
            ValueError,
            "`A_log`: expected device cpu .that of `g`., got meta",
        ),
        (
            {"state_v_first": True, "initial_state": torch.zeros(2, 2, K, V)},
            ValueError,
            r"`initial_state`: expected shape \(N, HV, V, K\) = \(2, 2, 6, 4\).*\(2, 2, 4, 6\)",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_options_raise_by_name(options: dict[str, Any], error: type[Exception], message: str) -> None:
    inputs = draw_inputs(Case("plain", {}, without=("initial_state",), tokens=3))
    with pytest.raises(error, match=message):
        culax.chunk_kda(**inputs | options)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"q": torch.zeros(())}, r"`q`: expected 4 dimensions \(B, T, H, K\), got shape \(\)"),
        ({"q": torch.zeros(2, 3, 2, 0)}, r"`q`: expected K of at least 1, got shape \(2, 3, 2, 0\)"),
        ({"v": torch.zeros(2, 3)}, r"`v`: expected 4 dimensions \(B, T, HV, V\), got shape \(2, 3\)"),
        ({"cu_seqlens": torch.tensor(3)}, r"`cu_seqlens`: expected 1 dimension \(N\+1\), got shape \(\)"),
    ],
    ids=["q-scalar", "q-no-keys", "v-rank-2", "cu_seqlens-scalar"],
)
def test_shapes_that_the_options_read_are_checked_before_them(replaced: dict[str, Tensor], message: str) -> None:
    inputs = draw_inputs(Case("plain", {"state_v_first": True}, tokens=3)) | replaced
    with pytest.raises(ValueError, match=message):
        culax.chunk_kda(**inputs, state_v_first=True)


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("A", [-100.0, 100.0])
def test_extreme_rates_give_finite_results(lower_bound: float | None, dtype: torch.dtype, A: float) -> None:
    case = Case("kimi", {**KIMI, "lower_bound": lower_bound}, heads=(1, 2))
    inputs = draw_inputs(case, dtype)
    with torch.no_grad():
        inputs["A_log"].fill_(A)
        inputs["g"].view(-1)[::7] = 0.0
        inputs["dt_bias"].zero_()
    outputs = ours(case, inputs)
    gradients = torch.autograd.grad(scalar(outputs), list(inputs.values()))
    for name, value in zip(("o", "final_state", *inputs), (*outputs, *gradients)):
        assert torch.isfinite(value).all(), name


@pytest.mark.parametrize("case", [CASES[0], CASES[-2], CASES[-1]], ids=lambda case: case.name)
def test_compiled_is_one_graph_and_equal(case: Case) -> None:
    inputs = draw_inputs(case)
    compiled = torch.compile(lambda inputs: ours(case, inputs), fullgraph=True, backend="aot_eager")
    got, expected = compiled(inputs), ours(case, inputs)
    values = list(inputs.values())
    pairs = zip(
        (*got, *torch.autograd.grad(scalar(got), values)), (*expected, *torch.autograd.grad(scalar(expected), values))
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("dynamic", "backend"), [(None, "aot_eager"), (True, "inductor")], ids=["automatic", "dynamic-inductor"]
)
def test_other_lengths_compile_once(dynamic: bool | None, backend: str) -> None:
    """One recompilation at most (to a symbolic length) under the automatic setting, none under dynamic=True."""
    options = {**KIMI, "lower_bound": -5.0, "state_v_first": True}
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    torch._dynamo.reset()
    compiled = torch.compile(culax.chunk_kda, fullgraph=True, backend=counter, dynamic=dynamic)
    for position, tokens in enumerate((70, 65, 129, 90)):
        inputs = draw_inputs(Case("kimi", options, tokens=tokens, heads=(1, 2)), torch.float32)
        with torch._dynamo.config.patch(error_on_recompile=position > 1):
            got = compiled(**inputs, **options, output_final_state=True)
        scalar(got).backward()
        expected = culax.chunk_kda(**inputs, **options, output_final_state=True)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == (1 if dynamic else 2)
