import copy
import pickle

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from culax import GroupedLinear

torch.set_num_threads(1)
E, IN, OUT = 4, 6, 10
COUNTS = (3, 0, 7, 1)
TOKENS = 14  # three capacity rows past the last expert


def end_offsets(counts: tuple[int, ...] = COUNTS) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def layer_and_input(dtype: torch.dtype = torch.float64, **options: bool) -> tuple[GroupedLinear, Tensor]:
    torch.manual_seed(3)
    layer = GroupedLinear(E, IN, OUT, dtype=dtype, **options)
    return layer, torch.randn(TOKENS, IN, dtype=torch.float64).to(dtype).requires_grad_()


def expected_output(layer: GroupedLinear, x: Tensor, offs: Tensor) -> Tensor:
    """Expert by expert, reading the offsets."""
    bounds = [0, *offs.tolist()]
    rows = []
    for e in range(layer.num_experts):
        product = x[bounds[e] : bounds[e + 1]] @ layer.weight[e]
        rows.append(product if layer.bias is None else product + layer.bias[e])
    return torch.cat([*rows, x.new_zeros(x.shape[0] - bounds[-1], layer.out_features)])


def wave(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 1.5, y.numel(), dtype=y.dtype).view(y.shape)).sum()


def expected_gradients(layer: GroupedLinear, x: Tensor, offs: Tensor) -> list[Tensor]:
    wanted = [x, layer.weight] + ([] if layer.bias is None else [layer.bias])
    return list(torch.autograd.grad(wave(expected_output(layer, x, offs)), wanted))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("counts", [COUNTS, (0, 0, 0, 0), (0, 14, 0, 0), (1, 2, 3, 8)], ids=str)
def test_output_and_gradients(bias: bool, accumulate: bool, counts: tuple[int, ...]) -> None:
    layer, x = layer_and_input(bias=bias, accumulate_main_grad=accumulate)
    offs = end_offsets(counts)
    y = layer(x, offs)
    torch.testing.assert_close(y, expected_output(layer, x, offs), rtol=1e-13, atol=1e-14)
    assert (y[sum(counts) :] == 0).all()
    wave(y).backward()
    expected = expected_gradients(layer, x, offs)
    got = [x.grad, layer.main_grad if accumulate else layer.weight.grad] + ([layer.bias.grad] if bias else [])
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    assert (layer.weight.grad is None) == accumulate
    assert getattr(layer.weight, "grad_added_to_main_grad", False) == accumulate


def test_capacity_rows_do_not_leak_nan() -> None:
    layer, x = layer_and_input(bias=True)
    with torch.no_grad():
        x[11:] = float("nan")
    y = layer(x, end_offsets())
    y.backward(torch.ones_like(y).index_fill(0, torch.arange(11, TOKENS), float("nan")))
    assert torch.isfinite(y).all() and (y[11:] == 0).all()
    assert all(torch.isfinite(t).all() for t in (layer.weight.grad, layer.bias.grad, x.grad[:11]))


def test_main_grad_adds_up_in_fp32() -> None:
    """Sixty-four small gradients on a large one: bf16 accumulation would lose every one of them."""
    layer, x = layer_and_input(torch.bfloat16, accumulate_main_grad=True)
    main_grad = layer.main_grad
    assert main_grad is layer.weight.main_grad and main_grad.dtype == torch.float32
    main_grad.fill_(4096.0)
    offs = end_offsets()
    exact = torch.full((E, IN, OUT), 4096.0, dtype=torch.float64)
    for step in range(64):
        y = layer(x.detach().requires_grad_(), offs)
        dy = torch.full_like(y, 0.01 * (step + 1))
        y.backward(dy)
        bounds = [0, *offs.tolist()]
        for e in range(E):
            rows = slice(bounds[e], bounds[e + 1])
            exact[e] += x[rows].detach().double().T @ dy[rows].double()
    assert layer.main_grad is main_grad and layer.weight.grad is None
    torch.testing.assert_close(main_grad.double(), exact, rtol=0, atol=0.02)
    assert (main_grad - 4096.0).abs()[0].max() > 1
    layer.zero_main_grad()
    assert layer.main_grad is main_grad and main_grad.count_nonzero() == 0


def test_a_main_grad_of_the_caller_is_used() -> None:
    layer, x = layer_and_input(accumulate_main_grad=True)
    buffer = torch.zeros(2, E, IN, OUT, dtype=torch.float64)
    layer.weight.main_grad = buffer[1]
    wave(layer(x, end_offsets())).backward()
    torch.testing.assert_close(buffer[1], expected_gradients(layer, x, end_offsets())[1], rtol=1e-12, atol=1e-13)
    assert buffer[0].count_nonzero() == 0


@pytest.mark.parametrize(
    ("main_grad", "message"),
    [
        (torch.zeros(E, OUT, IN, dtype=torch.float64), r"`main_grad`: expected shape .*\(4, 6, 10\), got \(4, 10, 6\)"),
        (torch.zeros(E, IN, OUT), "`main_grad`: expected dtype float64, got float32"),
    ],
    ids=["shape", "dtype"],
)
def test_a_wrong_main_grad_raises(main_grad: Tensor, message: str) -> None:
    layer, x = layer_and_input(accumulate_main_grad=True)
    layer.weight.main_grad = main_grad
    with pytest.raises(ValueError, match=message):
        layer(x, end_offsets())


def test_a_computed_weight_raises_where_its_gradient_would_be_lost() -> None:
    layer, x = layer_and_input(accumulate_main_grad=True)
    source = layer.weight.detach().clone().requires_grad_()
    with pytest.raises(ValueError, match="weight: expected a leaf with accumulate_main_grad=True"):
        torch.func.functional_call(layer, {"weight": 2 * source}, (x, end_offsets()))
    plain, _ = layer_and_input()
    torch.func.functional_call(plain, {"weight": 2 * source}, (x, end_offsets())).sum().backward()
    assert source.grad is not None and source.grad.abs().sum() > 0


def test_zero_main_grad_needs_the_option() -> None:
    with pytest.raises(ValueError, match="accumulate_main_grad=True, got False"):
        GroupedLinear(E, IN, OUT).zero_main_grad()


def test_second_derivative_through_main_grad_raises() -> None:
    layer, x = layer_and_input(accumulate_main_grad=True)
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(wave(layer(x, end_offsets()).square()), x, create_graph=True)


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_frozen_weight_or_input(frozen: str) -> None:
    layer, x = layer_and_input(bias=True, accumulate_main_grad=True)
    expected = expected_gradients(layer, x, end_offsets())
    (layer.weight if frozen == "weight" else x).requires_grad_(False)
    wave(layer(x, end_offsets())).backward()
    if frozen == "weight":
        assert layer.main_grad.count_nonzero() == 0
        torch.testing.assert_close(x.grad, expected[0], rtol=1e-12, atol=1e-13)
    else:
        assert x.grad is None
        torch.testing.assert_close(layer.main_grad, expected[1], rtol=1e-12, atol=1e-13)


def test_the_flag_is_set_again_by_a_forward() -> None:
    layer, x = layer_and_input(accumulate_main_grad=True)
    assert layer.weight.grad_added_to_main_grad
    layer.weight.grad_added_to_main_grad = False
    with torch.no_grad():
        assert not layer(x, end_offsets()).requires_grad
    assert not layer.weight.grad_added_to_main_grad
    layer(x, end_offsets())
    assert layer.weight.grad_added_to_main_grad


def test_autocast_casts_operands_and_adds_in_fp32() -> None:
    layer, x = layer_and_input(torch.float32, bias=True, accumulate_main_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, end_offsets())
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.main_grad.dtype == torch.float32 and layer.bias.grad.dtype == torch.float32
    expected = torch.autograd.grad(expected_output(layer, x, end_offsets()).sum(), layer.weight)[0]
    assert (layer.main_grad - expected).norm() < 4e-3 * expected.norm()
    assert layer.weight.grad is None


# One entry a way of running the layer's forward.
def compiled(layer: GroupedLinear, backend: str, dynamic: bool | None = None) -> GroupedLinear:
    return torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)


@pytest.mark.parametrize("accumulate", [False, True], ids=["grad", "main_grad"])
def test_autocast_around_the_backward_alone_changes_nothing(accumulate: bool) -> None:
    layer, x = layer_and_input(torch.float32, accumulate_main_grad=accumulate, bias=True)
    y = layer(x, end_offsets())
    dy = torch.randn_like(y)
    with torch.autocast("cpu", torch.bfloat16):
        y.backward(dy)
    found = layer.weight.main_grad if accumulate else layer.weight.grad
    start = 0
    for e, end in enumerate(end_offsets().tolist()):
        rows = slice(start, end)
        truth = dy[rows].double() @ layer.weight[e].double().t()
        torch.testing.assert_close(x.grad[rows].double(), truth, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found[e].double(), x[rows].double().t() @ dy[rows].double(), rtol=1e-6, atol=1e-6)
        start = end


def test_private_ops_pass_opcheck() -> None:
    layer, x = layer_and_input(accumulate_main_grad=True)
    weight, main_grad, offs = layer.weight.detach().clone().requires_grad_(), layer.main_grad, end_offsets()
    torch.library.opcheck(torch.ops.culax._grouped_mm_main_grad.default, (x, weight, offs, main_grad))
    dy = torch.randn(TOKENS, OUT, dtype=torch.float64)
    torch.library.opcheck(torch.ops.culax._grouped_wgrad_main_grad.default, (main_grad, x.detach(), dy, offs))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["grad", "main_grad"])
def test_compiled_forward_and_backward(backend: str, bias: bool, accumulate: bool) -> None:
    layer, x = layer_and_input(bias=bias, accumulate_main_grad=accumulate)
    torch._dynamo.reset()
    f = compiled(layer, backend)
    for repeat in (1, 2):
        x.grad = None
        wave(f(x, end_offsets())).backward()
        expected = expected_gradients(layer, x, end_offsets())
        torch.testing.assert_close(x.grad, expected[0], rtol=1e-12, atol=1e-13)
        got = layer.main_grad if accumulate else layer.weight.grad
        torch.testing.assert_close(got, repeat * expected[1], rtol=1e-12, atol=1e-13)
        if bias:
            torch.testing.assert_close(layer.bias.grad, repeat * expected[2], rtol=1e-12, atol=1e-13)
    assert (layer.weight.grad is None) == accumulate
    assert getattr(layer.weight, "grad_added_to_main_grad", False) == accumulate


def test_two_compiled_forwards_before_their_backwards() -> None:
    """As in a pipeline schedule: the first backward's addition must not spoil the second forward's saved tensors."""
    layer, x = layer_and_input(accumulate_main_grad=True)
    torch._dynamo.reset()
    f = compiled(layer, "inductor")
    first, second = wave(f(x, end_offsets())), wave(f(2 * x, end_offsets()))
    first.backward()
    second.backward()
    torch.testing.assert_close(
        layer.main_grad, 3 * expected_gradients(layer, x, end_offsets())[1], rtol=1e-12, atol=1e-13
    )


def test_other_token_counts_compile_once() -> None:
    layer, _ = layer_and_input(torch.float32, bias=True, accumulate_main_grad=True)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    f = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (14, 9, 32):
        x = torch.randn(tokens, IN)
        offs = end_offsets((2, 0, tokens - 5, 3))
        with torch._dynamo.config.patch(error_on_recompile=tokens != 14):
            y = f(x, offs)
        y.sum().backward()
        torch.testing.assert_close(y, expected_output(layer, x, offs))
    assert counter.frame_count == 1


def test_compiled_without_main_grad_says_what_to_do() -> None:
    layer, x = layer_and_input(accumulate_main_grad=True)
    del layer.weight.main_grad
    torch._dynamo.reset()
    with pytest.raises(Exception, match="zero_main_grad"):
        compiled(layer, "aot_eager")(x, end_offsets())
    wave(layer(x, end_offsets())).backward()  # eager makes it on the way
    torch.testing.assert_close(layer.main_grad, expected_gradients(layer, x, end_offsets())[1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["grad", "main_grad"])
def test_activation_checkpointing(reentrant: bool, accumulate: bool) -> None:
    layer, x = layer_and_input(bias=True, accumulate_main_grad=accumulate)
    for _ in range(2):
        wave(checkpoint(layer, x, end_offsets(), use_reentrant=reentrant)).backward()
    expected = expected_gradients(layer, x, end_offsets())
    got = (x.grad, layer.main_grad if accumulate else layer.weight.grad, layer.bias.grad)
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, 2 * other, rtol=1e-12, atol=1e-13)
    assert (layer.weight.grad is None) == accumulate


def test_compiled_activation_checkpointing() -> None:
    layer, x = layer_and_input(accumulate_main_grad=True)
    torch._dynamo.reset()
    f = torch.compile(
        lambda x, offs: checkpoint(layer, x, offs, use_reentrant=False), fullgraph=True, backend="aot_eager"
    )
    wave(f(x, end_offsets())).backward()
    torch.testing.assert_close(layer.main_grad, expected_gradients(layer, x, end_offsets())[1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("accumulate", [False, True], ids=["grad", "main_grad"])
def test_deepcopy_pickle_and_state_dict(accumulate: bool) -> None:
    layer, x = layer_and_input(bias=True, accumulate_main_grad=accumulate)
    wave(layer(x, end_offsets())).backward()
    assert set(layer.state_dict()) == {"weight", "bias"}
    fresh = GroupedLinear(E, IN, OUT, bias=True, dtype=torch.float64, accumulate_main_grad=accumulate)
    fresh.load_state_dict(layer.state_dict())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        assert hasattr(other.weight, "main_grad") == accumulate  # before a first forward, so that it may be compiled
        assert torch.equal(other(x, end_offsets()), layer(x, end_offsets())) and other.weight is not layer.weight
        if accumulate:
            assert other.main_grad is not layer.main_grad
            other.zero_main_grad()
            wave(other(x, end_offsets())).backward()
            torch.testing.assert_close(other.main_grad, layer.main_grad, rtol=1e-12, atol=1e-13)
            assert other.weight.grad is None


def test_main_grad_follows_dtype_and_device() -> None:
    layer, _ = layer_and_input(torch.float32, accumulate_main_grad=True)
    layer.main_grad.fill_(3.0)
    assert layer.to(torch.bfloat16).main_grad.dtype == torch.float32
    assert layer.double().main_grad.dtype == torch.float64 and (layer.main_grad == 3).all()
    empty = GroupedLinear(E, IN, OUT, device="meta", accumulate_main_grad=True)
    assert empty.main_grad.is_meta
    empty.to_empty(device="cpu")
    assert empty.main_grad.device.type == "cpu" and empty.main_grad is empty.weight.main_grad
    assert empty.main_grad.count_nonzero() == 0


def test_initial_weights_and_repr() -> None:
    layer, _ = layer_and_input(bias=True)
    bound = IN**-0.5
    assert layer.weight.abs().max() <= bound and layer.bias.abs().max() <= bound
    assert layer.weight.abs().max() > 0.8 * bound
    assert "num_experts=4, in_features=6, out_features=10, bias=True, accumulate_main_grad=False" in repr(layer)
