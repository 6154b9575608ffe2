"""grouped_mm's reference, by expert and by chunk, against fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from culax.reference import grouped_wgrad as reference
from tests.reference.wgrad_cases import DTYPES, GROUPS, PATHS, assert_mm, ends_of, normal, offsets, ranges

NAN = float("nan")


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    monkeypatch.setattr(reference, "reads_offsets", lambda offs: request.param == "by_expert")
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_groups(path, group, dtype):
    ends = ends_of(GROUPS[group])
    x = normal(0, ends[-1] if ends else 10, 24, dtype=dtype)
    weight = normal(1, len(ends), 24, 40, dtype=dtype)
    assert_mm(reference.grouped_mm(x, weight, offsets(ends)), x, weight, ends)


@pytest.mark.parametrize("tokens, k, n", [(0, 8, 8), (20, 0, 8), (20, 8, 0), (20, 1, 1), (20, 192, 8), (20, 8, 768)])
def test_shapes(path, tokens, k, n):
    ends = [0, tokens // 2, tokens]
    x, weight = normal(0, tokens, k, dtype=torch.bfloat16), normal(1, 3, k, n, dtype=torch.bfloat16)
    assert_mm(reference.grouped_mm(x, weight, offsets(ends, torch.int64)), x, weight, ends)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tail", [1, 64, 200])
def test_capacity_tail_of_nan_gives_zeros(path, tail, dtype):
    ends = ends_of([3, 0, 65, 62])
    x, weight = normal(0, ends[-1] + tail, 16, dtype=dtype), normal(1, 4, 16, 24, dtype=dtype)
    for poison in (NAN, float("inf")):
        x[ends[-1] :] = poison
        assert_mm(reference.grouped_mm(x, weight, offsets(ends)), x, weight, ends)


@pytest.mark.parametrize("empty", ["first", "middle", "last"])
def test_nan_weight_of_an_empty_expert_never_leaks(path, empty):
    sizes = {"first": [0, 40, 70], "middle": [40, 0, 70], "last": [40, 70, 0]}[empty]
    ends = ends_of(sizes)
    x, weight = normal(0, ends[-1] + 5, 16), normal(1, 3, 16, 24)
    weight[sizes.index(0)] = NAN
    assert_mm(reference.grouped_mm(x, weight, offsets(ends)), x, weight, ends)


def test_nan_stays_in_its_row_and_expert(path):
    ends = ends_of([10, 64, 0, 70])
    x, weight = normal(0, ends[-1], 16), normal(1, 4, 16, 24)
    clean = reference.grouped_mm(x, weight, offsets(ends))
    x[12, 3] = NAN
    out = reference.grouped_mm(x, weight, offsets(ends))
    assert out[12].isnan().all()
    out[12] = clean[12]
    assert torch.equal(out, clean)
    x[12, 3], weight[3, 0] = 0.0, NAN
    out = reference.grouped_mm(x, weight, offsets(ends))
    assert out[74:].isnan().all() and not out[:74].isnan().any()


@pytest.mark.parametrize("x_kind", ["sliced", "transposed", "expanded"])
@pytest.mark.parametrize("weight_kind", ["sliced", "transposed", "expanded"])
def test_strides(path, x_kind, weight_kind):
    ends = ends_of([9, 66, 0, 5])
    x = {
        "sliced": normal(0, ends[-1] + 3, 17, dtype=torch.bfloat16)[1:-2, 5:],
        "transposed": normal(0, 12, ends[-1], dtype=torch.bfloat16).t(),
        "expanded": normal(0, 1, 12, dtype=torch.bfloat16).expand(ends[-1], 12),
    }[x_kind]
    weight = {
        "sliced": normal(1, 9, 13, 43, dtype=torch.bfloat16)[1::2, 1:, 3::2],
        "transposed": normal(1, 4, 20, 12, dtype=torch.bfloat16).transpose(1, 2),
        "expanded": normal(1, 12, 20, dtype=torch.bfloat16).expand(4, 12, 20),
    }[weight_kind]
    assert_mm(reference.grouped_mm(x, weight, offsets(ends)), x, weight, ends)


def test_bitwise_repeats(path):
    ends = ends_of([1, 200, 0, 63, 65])
    x, weight = normal(0, ends[-1], 48, dtype=torch.bfloat16), normal(1, 5, 48, 56, dtype=torch.bfloat16)
    first = reference.grouped_mm(x, weight, offsets(ends))
    assert all(torch.equal(reference.grouped_mm(x, weight, offsets(ends)), first) for _ in range(20))


@pytest.mark.parametrize("slice_bytes", [1, 40_000])
def test_slices_of_the_chunk_table_change_no_bit(monkeypatch, slice_bytes):
    monkeypatch.setattr(reference, "reads_offsets", lambda offs: False)
    ends = ends_of([1, 200, 0, 63, 65])
    x, weight = normal(0, ends[-1] + 9, 24), normal(1, 5, 24, 40)
    whole = reference.grouped_mm(x, weight, offsets(ends))
    monkeypatch.setattr(reference, "SLICE_BYTES", slice_bytes)
    assert torch.equal(reference.grouped_mm(x, weight, offsets(ends)), whole)


def test_descending_and_too_large_offsets_are_clamped(path):
    x, weight = normal(0, 100, 8), normal(1, 5, 8, 16)
    assert_mm(reference.grouped_mm(x, weight, offsets([30, 10, 70, 1000, -5])), x, weight, [30, 30, 70, 100, 100])


def test_hundreds_of_mostly_empty_experts(path):
    sizes = [0] * 512
    sizes[3], sizes[100], sizes[511] = 65, 1, 64
    ends = ends_of(sizes)
    x, weight = normal(0, ends[-1] + 3, 8), normal(1, 512, 8, 16)
    assert_mm(reference.grouped_mm(x, weight, offsets(ends)), x, weight, ends)


@given(
    st.lists(st.sampled_from([0, 0, 1, 7, 31, 63, 64, 65, 130]), min_size=1, max_size=7),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(0, 70),
    st.sampled_from(DTYPES),
)
@settings(max_examples=80, deadline=None)
def test_paths_agree_with_truth(sizes, k, n, tail, dtype):
    ends = ends_of(sizes)
    x, weight = normal(0, ends[-1] + tail, k, dtype=dtype), normal(1, len(sizes), k, n, dtype=dtype)
    for by_expert in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "reads_offsets", lambda offs, answer=by_expert: answer)
            assert_mm(reference.grouped_mm(x, weight, offsets(ends)), x, weight, ends)


def test_gradients_are_the_grouped_products():
    """d loss / d weight of grouped_mm is grouped_wgrad(x^T, d out): the two ops are one contract."""
    ends = ends_of([9, 66, 0, 5])
    x, weight = normal(0, ends[-1], 8, dtype=torch.float64), normal(1, 4, 8, 12, dtype=torch.float64)
    grad = normal(2, ends[-1], 12, dtype=torch.float64)
    wanted = weight.clone().requires_grad_()
    dense = torch.cat([x[start:end] @ wanted[expert] for expert, (start, end) in enumerate(ranges(ends))])
    dense.backward(grad)
    got = reference.grouped_wgrad(x.t(), grad, offsets(ends), None, "2d", None)
    torch.testing.assert_close(got, wanted.grad, rtol=1e-12, atol=1e-12)
