"""grouped_wgrad's reference on plain dtypes, by expert and by chunk, against fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from culax.reference import grouped_wgrad as reference
from tests.reference.wgrad_cases import (
    DTYPES,
    GROUPS,
    PATHS,
    assert_wgrad,
    ends_of,
    normal,
    offsets,
    ranges,
    wgrad_truth,
)

NAN = float("nan")


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Both ways to the sums, through the same entry points."""
    monkeypatch.setattr(reference, "reads_offsets", lambda offs: request.param == "by_expert")
    return request.param


def operands(m, n, tokens, dtype, seed=0):
    """Token-major tensors as a layer has them, seen as mat_a (M, T) and mat_b (T, N)."""
    return normal(seed, tokens, m, dtype=dtype).t(), normal(seed + 1, tokens, n, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_groups(path, group, dtype):
    ends = ends_of(GROUPS[group])
    tokens = ends[-1] if ends else 10
    mat_a, mat_b = operands(24, 40, tokens, dtype)
    out = reference.grouped_wgrad(mat_a, mat_b, offsets(ends), None, "2d", None)
    assert out.dtype == dtype and out.is_contiguous()
    assert_wgrad(out, mat_a, mat_b, ends)
    for expert, size in enumerate(GROUPS[group]):
        assert size or torch.equal(out[expert], torch.zeros_like(out[expert]))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("m, n", [(1, 1), (8, 192), (192, 8), (768, 64), (1, 129)])
def test_shapes_and_output_dtypes(path, m, n, out_dtype):
    ends = ends_of([7, 0, 65, 128])
    mat_a, mat_b = operands(m, n, ends[-1], torch.bfloat16)
    out = reference.grouped_wgrad(mat_a, mat_b, offsets(ends, torch.int64), None, "2d", out_dtype)
    assert out.dtype == out_dtype
    assert_wgrad(out, mat_a, mat_b, ends)


@pytest.mark.parametrize("m, n, tokens", [(0, 8, 20), (8, 0, 20), (8, 8, 0)])
def test_zero_sizes(path, m, n, tokens):
    ends = [0, tokens, tokens]
    mat_a, mat_b = operands(m, n, tokens, torch.float32)
    out = reference.grouped_wgrad(mat_a, mat_b, offsets(ends), None, "2d", None)
    assert out.shape == (3, m, n) and not out.any()


def test_half_types_are_summed_in_fp32(path):
    """4096 products of one: bf16 sums stop at 256, fp16 sums at 2048."""
    ones = torch.ones(1, 4096)
    for dtype in (torch.bfloat16, torch.float16):
        out = reference.grouped_wgrad(ones.to(dtype), ones.t().to(dtype), offsets([4096]), None, "2d", torch.float32)
        assert out.item() == 4096


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tail", [1, 30, 64, 200])
def test_capacity_tail_of_nan_never_leaks(path, tail, dtype):
    ends = ends_of([3, 0, 65, 62])
    mat_a, mat_b = operands(16, 24, ends[-1] + tail, dtype)
    for poison_a, poison_b in ((NAN, NAN), (NAN, 0.0), (0.0, NAN), (float("inf"), 0.0)):
        mat_a[:, ends[-1] :], mat_b[ends[-1] :] = poison_a, poison_b
        out = reference.grouped_wgrad(mat_a, mat_b, offsets(ends), None, "2d", None)
        assert_wgrad(out, mat_a[:, : ends[-1]], mat_b[: ends[-1]], ends)


def test_nan_in_one_expert_leaves_others_bitwise_alone(path):
    ends = ends_of([10, 64, 0, 70, 1])
    mat_a, mat_b = operands(16, 24, ends[-1], torch.bfloat16)
    clean = reference.grouped_wgrad(mat_a, mat_b, offsets(ends), None, "2d", torch.float32)
    for expert, (start, end) in enumerate(ranges(ends)):
        if start == end:
            continue
        dirty = mat_a.clone()
        dirty[3, end - 1] = NAN
        out = reference.grouped_wgrad(dirty, mat_b, offsets(ends), None, "2d", torch.float32)
        assert out[expert, 3].isnan().all()
        out[expert, 3] = clean[expert, 3]
        assert torch.equal(out, clean)


def strided(kind, rows, columns, dtype, seed):
    """A (rows, columns) matrix whose memory is anything but plain."""
    if kind == "row_major":
        return normal(seed, rows, columns, dtype=dtype)
    if kind == "column_major":
        return normal(seed, columns, rows, dtype=dtype).t()
    if kind == "unaligned_slice":
        return normal(seed, rows + 3, columns + 5, dtype=dtype)[1:-2, 3:-2]
    if kind == "every_other":
        return normal(seed, 2 * columns, 3 * rows, dtype=dtype).t()[::3, ::2]
    if kind == "expanded_rows":
        return normal(seed, 1, columns, dtype=dtype).expand(rows, columns)
    assert kind == "expanded_columns"
    return normal(seed, rows, 1, dtype=dtype).expand(rows, columns)


STRIDES = ["row_major", "column_major", "unaligned_slice", "every_other", "expanded_rows", "expanded_columns"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind_b", STRIDES)
@pytest.mark.parametrize("kind_a", STRIDES)
def test_strides(path, kind_a, kind_b, dtype):
    ends = ends_of([9, 66, 0, 5])
    mat_a = strided(kind_a, 12, ends[-1], dtype, 0)
    mat_b = strided(kind_b, ends[-1], 20, dtype, 1)
    assert_wgrad(reference.grouped_wgrad(mat_a, mat_b, offsets(ends), None, "2d", None), mat_a, mat_b, ends)


def ragged(matrix, ends):
    """The (rows, T) matrix expert-major: its experts' contiguous blocks one after another; the tail is kept."""
    parts = [matrix[:, start:end].reshape(-1) for start, end in [*ranges(ends), (ends[-1], matrix.shape[1])]]
    return torch.cat(parts).view(matrix.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tail", [0, 37])
def test_ragged_operands(path, tail, dtype):
    ends = ends_of([7, 0, 65, 64])
    a, b_t = normal(0, 12, ends[-1] + tail, dtype=dtype), normal(1, 20, ends[-1] + tail, dtype=dtype)
    a[:, ends[-1] :], b_t[:, ends[-1] :] = NAN, NAN
    out = reference.grouped_wgrad(ragged(a, ends), ragged(b_t, ends).t(), offsets(ends), None, "ragged", None)
    assert torch.equal(out, reference.grouped_wgrad(a, b_t.t(), offsets(ends), None, "2d", None))
    assert_wgrad(out, a[:, : ends[-1]], b_t.t()[: ends[-1]], ends)


def make_outs(kind, experts, m, n, dtype, fill):
    if kind == "tensor":
        return torch.full((experts, m, n), fill, dtype=dtype)
    if kind == "strided_tensor":
        return torch.full((n, 2 * experts, m + 1), fill, dtype=dtype).permute(1, 2, 0)[::2, 1:]
    if kind == "list":
        return [torch.full((m, n), fill, dtype=dtype) for _ in range(experts)]
    assert kind == "strided_list"
    return [torch.full((n, m + 2), fill, dtype=dtype).t()[2:] for _ in range(experts)]


OUTS = ["tensor", "strided_tensor", "list", "strided_list"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", OUTS)
def test_poisoned_outputs_are_overwritten(path, kind, dtype):
    sizes = [8, 8, 0, 16, 0]
    ends = ends_of(sizes)
    mat_a, mat_b = operands(6, 10, ends[-1], dtype)
    outs = make_outs(kind, 5, 6, 10, dtype, NAN)
    reference.grouped_wgrad_out(outs, mat_a, mat_b, offsets(ends), None, "2d", False)
    got = torch.stack(list(outs))
    assert_wgrad(got, mat_a, mat_b, ends)
    assert not got[2].any() and not got[4].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", OUTS)
def test_accumulate(path, kind, dtype):
    ends = ends_of([8, 65, 0, 16])
    mat_a, mat_b = operands(6, 10, ends[-1], dtype)
    out_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    outs = make_outs(kind, 4, 6, 10, out_dtype, 0.7)
    before = torch.stack(list(outs))
    reference.grouped_wgrad_out(outs, mat_a, mat_b, offsets(ends), None, "2d", True)
    got = torch.stack(list(outs))
    assert_wgrad(got, mat_a, mat_b, ends, initial=before.to(torch.float64))
    assert torch.equal(got[2], before[2])


def test_accumulate_adds_unrounded_sums(path):
    """1 + 2^-12 is not a bf16 number; ten steps of it must arrive whole."""
    mat_a = torch.tensor([[1.0, 2.0**-6]], dtype=torch.bfloat16)
    mat_b = torch.tensor([[1.0], [2.0**-6]], dtype=torch.bfloat16)
    out = torch.zeros(1, 1, 1)
    for _ in range(10):
        reference.grouped_wgrad_out(out, mat_a, mat_b, offsets([2]), None, "2d", True)
    assert out.item() == 10 * (1 + 2.0**-12)


def test_canaries_around_outputs_survive(path):
    ends = ends_of([5, 0, 70])
    mat_a, mat_b = operands(6, 10, ends[-1], torch.bfloat16)
    buffer = torch.full((5, 8, 13), 42.0)
    reference.grouped_wgrad_out(buffer[1:-1, 1:-1, 1:-2], mat_a, mat_b, offsets(ends), None, "2d", False)
    assert_wgrad(buffer[1:-1, 1:-1, 1:-2], mat_a, mat_b, ends)
    buffer[1:-1, 1:-1, 1:-2] = 42.0
    assert (buffer == 42.0).all()


def test_bitwise_repeats(path):
    ends = ends_of([1, 200, 0, 63, 65])
    mat_a, mat_b = operands(48, 56, ends[-1], torch.bfloat16)
    first = reference.grouped_wgrad(mat_a, mat_b, offsets(ends), None, "2d", torch.float32)
    for _ in range(20):
        assert torch.equal(reference.grouped_wgrad(mat_a, mat_b, offsets(ends), None, "2d", torch.float32), first)


@pytest.mark.parametrize("slice_bytes", [1, 20_000, 60_000])
def test_slices_of_the_chunk_table_change_no_bit(monkeypatch, slice_bytes):
    monkeypatch.setattr(reference, "reads_offsets", lambda offs: False)
    ends = ends_of([1, 200, 0, 63, 65, 300])
    mat_a, mat_b = operands(24, 40, ends[-1] + 9, torch.bfloat16)
    whole = reference.grouped_wgrad(mat_a, mat_b, offsets(ends), None, "2d", torch.float32)
    monkeypatch.setattr(reference, "SLICE_BYTES", slice_bytes)
    assert torch.equal(reference.grouped_wgrad(mat_a, mat_b, offsets(ends), None, "2d", torch.float32), whole)


def test_hundreds_of_mostly_empty_experts(path):
    sizes = [0] * 512
    sizes[3], sizes[100], sizes[511] = 65, 1, 64
    ends = ends_of(sizes)
    mat_a, mat_b = operands(8, 16, ends[-1] + 3, torch.bfloat16)
    out = reference.grouped_wgrad(mat_a, mat_b, offsets(ends), None, "2d", torch.float32)
    assert_wgrad(out, mat_a, mat_b, ends)
    assert out.any(-1).any(-1).nonzero().flatten().tolist() == [3, 100, 511]


def test_descending_and_too_large_offsets_are_clamped(path):
    mat_a, mat_b = operands(8, 16, 100, torch.float32)
    out = reference.grouped_wgrad(mat_a, mat_b, offsets([30, 10, 70, 1000, -5]), None, "2d", None)
    assert_wgrad(out, mat_a, mat_b, [30, 30, 70, 100, 100])


def test_inputs_are_left_alone(path):
    ends = ends_of([5, 70])
    mat_a, mat_b = operands(6, 10, ends[-1] + 4, torch.float32)
    offs = offsets(ends)
    copies = [t.clone() for t in (mat_a, mat_b, offs)]
    out = reference.grouped_wgrad(mat_a, mat_b, offs, None, "2d", None)
    out.zero_()
    assert all(torch.equal(t, copy) for t, copy in zip((mat_a, mat_b, offs), copies))


@given(
    st.lists(st.sampled_from([0, 0, 1, 7, 8, 31, 63, 64, 65, 130]), min_size=1, max_size=7),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(0, 70),
    st.sampled_from(DTYPES),
    st.sampled_from(STRIDES),
    st.sampled_from(STRIDES),
)
@settings(max_examples=120, deadline=None)
def test_paths_agree_with_truth(sizes, m, n, tail, dtype, kind_a, kind_b):
    ends = ends_of(sizes)
    mat_a, mat_b = strided(kind_a, m, ends[-1] + tail, dtype, 0), strided(kind_b, ends[-1] + tail, n, dtype, 1)
    for by_expert in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "reads_offsets", lambda offs, answer=by_expert: answer)
            assert_wgrad(reference.grouped_wgrad(mat_a, mat_b, offsets(ends), None, "2d", None), mat_a, mat_b, ends)


@pytest.mark.parametrize("fault", ["last_token_lost", "neighbour_token_taken", "bf16_sum", "swapped_experts"])
def test_the_bound_catches(fault):
    """Faults in a small expert beside one 10^6 times larger, which a tolerance for the whole tensor would hide."""
    ends = ends_of([65, 130])
    mat_a, mat_b = operands(8, 16, ends[-1], torch.float32)
    mat_a[:, : ends[0]] *= 1e-3
    mat_b[: ends[0]] *= 1e-3
    got = wgrad_truth(mat_a, mat_b, ends).to(torch.float32)
    assert_wgrad(got, mat_a, mat_b, ends)
    if fault == "last_token_lost":
        got[0] -= mat_a[:, 64:65] @ mat_b[64:65]
    elif fault == "neighbour_token_taken":
        got[0] += mat_a[:, 65:66] @ mat_b[65:66] * 1e-6
    elif fault == "bf16_sum":
        got[0] = got[0].to(torch.bfloat16)
    else:
        got = got.flip(0)
    with pytest.raises(AssertionError, match=r"experts \[0"):
        assert_wgrad(got, mat_a, mat_b, ends)
