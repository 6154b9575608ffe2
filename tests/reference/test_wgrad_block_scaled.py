"""Block-scaled and ragged operands of grouped_wgrad's reference: layouts, partial blocks, pads, tails, products."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from culax.reference import grouped_wgrad as reference
from culax.reference.block_scaled import Scales, dequantize
from tests.quantize import quantize_mx, quantize_nv
from tests.reference.wgrad_cases import PATHS, assert_wgrad, ends_of, normal, offsets

FORMATS = ["e4m3", "e5m2", "fp4"]
LAYOUTS = ["padded", "concatenated"]
OPERAND_LAYOUTS = ["2d", "ragged"]
ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# Sizes legal in each layout; the last non-empty expert may be anything (fp4: a multiple of 16).
SIZES = {
    ("padded", "mx"): [1, 7, 0, 8, 31, 33, 63, 64, 65, 127, 129, 0],
    ("padded", "fp4"): [16, 0, 32, 48, 64, 80, 112, 144, 0],
    ("concatenated", "mx"): [0, 128, 256, 0, 128, 65, 0],
    ("concatenated", "fp4"): [0, 64, 128, 0, 192, 48, 0],
}


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    monkeypatch.setattr(reference, "reads_offsets", lambda offs: request.param == "by_expert")
    return request.param


def quantize(x, ends, fmt, layout, operand_layout, pad=0xFF):
    if fmt == "fp4":
        return quantize_nv(x, ends, layout, operand_layout, pad)
    return quantize_mx(x, ends, ELEMENTS[fmt], layout, operand_layout, pad)


def sizes_of(layout, fmt):
    return SIZES[layout, "fp4" if fmt == "fp4" else "mx"]


def spread_out(seed, rows, tokens):
    """Values over many binades, so that blocks need different scales."""
    return normal(seed, rows, tokens) * torch.exp2(4 * normal(seed + 100, rows, tokens))


class Case:
    """Both quantised operands of one call, and what they mean exactly."""

    def __init__(self, sizes, fmt, layout, operand_layout, m=24, n=40, tail=0, pad=0xFF):
        self.ends, self.fmt, self.operand_layout = ends_of(sizes), fmt, operand_layout
        tokens = self.ends[-1] + tail
        self.a = quantize(spread_out(0, m, tokens), self.ends, fmt, layout, operand_layout, pad)
        self.b = quantize(spread_out(1, n, tokens), self.ends, fmt, layout, operand_layout, pad)
        self.scales = Scales(self.a.scale, self.b.scale, self.a.global_scale, self.b.global_scale, layout)

    def run(self, out_dtype=torch.float32, scales=None):
        return reference.grouped_wgrad(
            self.a.values,
            self.b.values.t(),
            offsets(self.ends),
            scales or self.scales,
            self.operand_layout,
            out_dtype,
        )

    def check(self, got, initial=0.0):
        scale = 1.0
        if self.a.global_scale is not None:
            scale = (self.a.global_scale.double() * self.b.global_scale.double()).nan_to_num()[:, None, None]
        assert_wgrad(got, self.a.exact.float(), self.b.exact.float().t(), self.ends, initial, scale)


@pytest.mark.parametrize("rows", [1, 8, 128, 129, 300])
@pytest.mark.parametrize("operand_layout", OPERAND_LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantize_is_exact(fmt, layout, operand_layout, rows):
    ends = ends_of(sizes_of(layout, fmt))
    operand = quantize(spread_out(0, rows, ends[-1] + 48), ends, fmt, layout, operand_layout)
    got = dequantize(operand.values, operand.scale, offsets(ends), layout, operand_layout)
    assert got.dtype is torch.float32
    assert torch.equal(got.to(torch.float64), operand.exact)


def test_dequantize_in_row_slices(monkeypatch):
    ends = ends_of(sizes_of("padded", "e4m3"))
    operand = quantize(spread_out(0, 37, ends[-1]), ends, "e4m3", "padded", "ragged")
    monkeypatch.setattr("culax.reference.block_scaled._SLICE_ELEMENTS", 5 * ends[-1] + 1)
    got = dequantize(operand.values, operand.scale, offsets(ends), "padded", "ragged")
    assert torch.equal(got.to(torch.float64), operand.exact)


@pytest.mark.parametrize("tail", [0, 80])
@pytest.mark.parametrize("operand_layout", OPERAND_LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_products(path, fmt, layout, operand_layout, tail):
    sizes = sizes_of(layout, fmt)
    case = Case(sizes, fmt, layout, operand_layout, tail=tail)
    out = case.run()
    case.check(out)
    assert all(size or not out[expert].any() for expert, size in enumerate(sizes))
    assert case.run(None).dtype is torch.bfloat16
    case.check(case.run(None))


@pytest.mark.parametrize("m, n", [(1, 1), (8, 192), (192, 1), (136, 768)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_shapes(path, fmt, m, n):
    case = Case([16, 0, 48, 80], fmt, "padded", "2d", m=m, n=n)
    case.check(case.run())


@pytest.mark.parametrize("sizes", [[0, 64, 48], [64, 0, 48], [64, 48, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_empty_experts(path, fmt, sizes):
    """Their global scales are NaN and, all empty, no block is real; the capacity tail's elements are NaN."""
    case = Case(sizes, fmt, "padded", "ragged", tail=32)
    out = case.run()
    case.check(out)
    assert all(size or torch.equal(out[e], torch.zeros_like(out[e])) for e, size in enumerate(sizes))


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_tokens(path, fmt):
    case = Case([0, 0], fmt, "padded", "2d")
    empty = replace(case.scales, a=case.scales.a[:, :0].contiguous(), b=case.scales.b[:, :0].contiguous())
    for scales in (case.scales, empty):
        assert torch.equal(case.run(scales=scales), torch.zeros(2, 24, 40))


def test_mixed_element_formats(path):
    """Gradients in e5m2 beside activations in e4m3."""
    ends = ends_of(sizes_of("padded", "mx"))
    a = quantize(spread_out(0, 24, ends[-1]), ends, "e5m2", "padded", "2d")
    b = quantize(spread_out(1, 40, ends[-1]), ends, "e4m3", "padded", "2d")
    scales = Scales(a.scale, b.scale, None, None, "padded")
    out = reference.grouped_wgrad(a.values, b.values.t(), offsets(ends), scales, "2d", torch.float32)
    assert_wgrad(out, a.exact.float(), b.exact.float().t(), ends)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_pad_bytes_never_reach_a_result(path, fmt, layout):
    """0xFF is NaN in both scale formats, 0x7F in e4m3; zeros and ones would be plausible."""
    results = [Case(sizes_of(layout, fmt), fmt, layout, "2d", pad=pad).run() for pad in (0xFF, 0x7F, 0x00, 0x38)]
    assert not results[0].isnan().any()
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("fmt", FORMATS)
def test_layouts_give_the_same_bits(path, fmt):
    sizes = sizes_of("concatenated", fmt)
    padded, concatenated = (Case(sizes, fmt, layout, "2d") for layout in LAYOUTS)
    used = min(padded.a.scale.numel(), concatenated.a.scale.numel()) - 128 * 4
    assert torch.equal(
        padded.a.scale.view(torch.uint8).flatten()[:used], concatenated.a.scale.view(torch.uint8).flatten()[:used]
    )
    assert torch.equal(padded.run(), concatenated.run())


@pytest.mark.parametrize("operand_layout", OPERAND_LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_operand_layouts_give_the_same_bits(path, fmt, operand_layout):
    sizes = sizes_of("padded", fmt)
    assert torch.equal(Case(sizes, fmt, "padded", operand_layout).run(), Case(sizes, fmt, "padded", "2d").run())


@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_scale_of_a_real_block(path, fmt):
    """It is NaN in its row of its expert, and nowhere else."""
    case = Case([64, 80, 32], fmt, "padded", "2d")
    clean, block = case.run(), 16 if fmt == "fp4" else 32
    atoms_of_first = -(-64 // (4 * block))
    position = atoms_of_first * 512 + 5 * 16 + 1  # expert 1, row 5, block 1
    case.a.scale.view(torch.uint8).view(-1)[position] = 0xFF
    out = case.run()
    assert out[1, 5].isnan().all()
    out[1, 5] = clean[1, 5]
    assert torch.equal(out, clean)
    decoded = dequantize(case.a.values, case.a.scale, offsets(case.ends), "padded", "2d").isnan()
    assert decoded.sum() == block and decoded[5, 64 + block : 64 + 2 * block].all()


def test_nan_global_scale_stays_in_its_expert(path):
    case = Case([64, 80, 32], "fp4", "padded", "2d")
    clean = case.run()
    case.b.global_scale[1] = float("nan")
    out = case.run()
    assert out[1].isnan().all()
    assert torch.equal(out[0], clean[0]) and torch.equal(out[2], clean[2])


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_short_scale_tensor_gives_nan_not_a_plausible_number(path, fmt):
    case = Case([64, 128, 256], fmt, "padded", "2d")
    clean = case.run()
    columns = (64 + 128 + 128) // (16 if fmt == "fp4" else 32)
    short = replace(case.scales, a=case.scales.a.flatten()[: 128 * columns].view(128, columns))
    out = case.run(scales=short)
    assert torch.equal(out[:2], clean[:2])
    assert out[2].isnan().all()


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_outs(path, fmt, accumulate, as_list):
    case = Case([16, 0, 80], fmt, "padded", "ragged")
    before = normal(7, 3, 24, 40) if accumulate else torch.full((3, 24, 40), float("nan"))
    outs = list(before.clone()) if as_list else before.clone()
    values_b = case.b.values.t()
    reference.grouped_wgrad_out(outs, case.a.values, values_b, offsets(case.ends), case.scales, "ragged", accumulate)
    got = torch.stack(list(outs))
    case.check(got, before.double() if accumulate else 0.0)
    assert torch.equal(got[1], before[1] if accumulate else torch.zeros(24, 40))


@pytest.mark.parametrize("fmt", FORMATS)
def test_strided_values(path, fmt):
    """Column-major and sliced operands in the 2-D layout."""
    case = Case([16, 0, 48, 80], fmt, "padded", "2d")
    wide = torch.zeros(26, case.a.values.shape[1] + 6, dtype=torch.uint8)
    wide[1:-1, 3:-3] = case.a.values.view(torch.uint8)
    sliced = wide[1:-1, 3:-3].view(case.a.values.dtype)
    flipped = case.b.values.view(torch.uint8).t().contiguous().view(case.b.values.dtype)
    out = reference.grouped_wgrad(sliced, flipped, offsets(case.ends), case.scales, "2d", torch.float32)
    assert torch.equal(out, case.run())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_bad_offsets_stay_in_bounds(path, fmt, layout):
    """On a device they can't be refused: clamped, and never an address outside the scale tensor."""
    case = Case([128, 128], fmt, layout, "ragged")
    for bad in ([256, 128], [-5, 1 << 30], [16, 16]):
        out = reference.grouped_wgrad(
            case.a.values, case.b.values.t(), offsets(bad), case.scales, "ragged", torch.float32
        )
        assert out.shape == (2, 24, 40)


@given(
    st.sampled_from(FORMATS),
    st.sampled_from(LAYOUTS),
    st.sampled_from(OPERAND_LAYOUTS),
    st.lists(st.integers(0, 12), min_size=1, max_size=6),
    st.integers(1, 140),
    st.integers(0, 4),
)
@settings(max_examples=120, deadline=None)
def test_any_groups_dequantize_exactly(fmt, layout, operand_layout, counts, rows, tail):
    unit = {("padded", "fp4"): 16, ("concatenated", "fp4"): 64, ("concatenated", "mx"): 128}
    step = unit.get((layout, "fp4" if fmt == "fp4" else "mx"), 11)
    sizes = [count * step // (4 if step == 128 else 1) // step * step for count in counts]
    ends = ends_of(sizes)
    operand = quantize(spread_out(0, rows, ends[-1] + 16 * tail), ends, fmt, layout, operand_layout)
    got = dequantize(operand.values, operand.scale, offsets(ends), layout, operand_layout)
    assert torch.equal(got.to(torch.float64), operand.exact)
