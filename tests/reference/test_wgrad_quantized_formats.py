"""Narrow formats bit by bit: codes, scale addresses and dequantisation against torch's own dtypes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from culax.reference import block_scaled
from culax.reference.expert_chunks import expert_ranges
from tests import quantize
from tests.reference.wgrad_cases import ends_of, normal, offsets

CODES = torch.arange(256, dtype=torch.uint8)
MX = [torch.float8_e4m3fn, torch.float8_e5m2]


def same(got, expected):
    """Equal bit for bit where a number, NaN where NaN."""
    numbers = ~expected.isnan()
    assert torch.equal(got.isnan(), ~numbers)
    assert torch.equal(got[numbers], expected[numbers])
    assert torch.equal(got[numbers].signbit(), expected[numbers].signbit())


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fn], ids=str)
def test_every_scale_code(dtype):
    same(block_scaled.decode_scale(CODES, dtype), CODES.view(dtype).to(torch.float32))


def test_e8m0_extremes():
    decoded = block_scaled.decode_scale(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8), torch.float8_e8m0fnu)
    assert decoded[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127] and decoded[4].isnan()


def test_every_fp4_code():
    same(block_scaled.decode_fp4(CODES[:16]), quantize.E2M1)


def test_fp4_packing():
    codes = torch.arange(48, dtype=torch.uint8).view(3, 16) % 16
    packed = quantize.pack_fp4(codes)
    assert packed.dtype is torch.float4_e2m1fn_x2 and packed.shape == (3, 8)
    assert packed.view(torch.uint8)[0, 0] == 0x10, "the even token is the low half byte"
    assert torch.equal(block_scaled.unpack_fp4(packed), codes)
    assert torch.equal(block_scaled.unpack_fp4(packed.t().contiguous().t()), codes)


def test_fp4_quantiser_rounds_to_nearest_even():
    x = torch.cat([torch.arange(-28, 29) / 4.0, normal(0, 500, dtype=torch.float64) * 3])
    got = quantize.E2M1[quantize.fp4_codes(x).long()].double()
    distance = (x.clamp(-6, 6)[:, None] - quantize.E2M1.double()[None, :]).abs()
    assert torch.equal((x.clamp(-6, 6) - got).abs(), distance.amin(1))
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    codes = quantize.fp4_codes(torch.tensor(list(ties)))
    assert quantize.E2M1[codes.long()].tolist() == list(ties.values())


@pytest.mark.parametrize("dtype", MX, ids=str)
def test_mx_quantiser_uses_its_range(dtype):
    """Every block's largest element lies in the top binade of the element format: the OCP scale."""
    x = normal(0, 16, 96, dtype=torch.float64) * torch.exp2(normal(1, 16, 1, dtype=torch.float64) * 20)
    codes, _, exact = quantize.mx_blocks(x, dtype)
    peak = quantize.block_amax(codes.view(dtype).to(torch.float64), 32)
    top = 256.0 if dtype is torch.float8_e4m3fn else 32768.0
    assert (peak >= top).all() and (peak <= torch.finfo(dtype).max).all()
    block = quantize.spread(quantize.block_amax(x, 32), 32, 96)
    mantissa_ulp = 2.0**-4 if dtype is torch.float8_e4m3fn else 2.0**-3
    # Half an ulp of the largest binade; above the format's largest number saturation costs more.
    assert ((exact - x).abs() <= 2 * mantissa_ulp * block).all()


@pytest.mark.parametrize("rows, blocks", [(1, 1), (128, 4), (129, 5), (200, 12), (300, 3)])
def test_addresses_find_the_swizzled_byte(rows, blocks):
    codes = torch.randint(0, 256, (rows, blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    stored = quantize.swizzle(codes, pad=0)
    columns = torch.tensor(quantize.round_up(blocks, 4))
    row, column = torch.arange(rows)[:, None], torch.arange(blocks)
    address = block_scaled.scale_address(torch.tensor(0), columns, row, column)
    assert torch.equal(stored[address], codes)
    assert len(address.unique()) == rows * blocks


def test_the_atom_of_the_documentation():
    """SWIZZLE_32_4_4: element (r, c) of a 128x4 atom at byte (r % 32) * 16 + (r // 32) * 4 + c."""
    for r, c, byte in [(0, 0, 0), (0, 3, 3), (1, 0, 16), (31, 0, 496), (32, 0, 4), (96, 0, 12), (127, 3, 511)]:
        address = block_scaled.scale_address(*(torch.tensor(value) for value in (1024, 4, r, c)))
        assert address == 1024 + byte


@given(st.lists(st.sampled_from([0, 1, 16, 32, 63, 64, 100, 128, 192, 256]), min_size=1, max_size=6), st.booleans())
@settings(max_examples=200, deadline=None)
def test_layouts_agree_iff_all_but_the_last_are_whole_atoms(sizes, mx):
    block = 32 if mx else 16
    ends = ends_of(sizes)
    experts = expert_ranges(offsets(ends), ends[-1])
    padded, concatenated = (
        block_scaled.expert_scale_base(experts, 200, block, layout) for layout in ("padded", "concatenated")
    )
    filled = [size for size in sizes if size]
    used = torch.tensor(sizes) > 0
    agree = torch.equal(padded[used], concatenated[used])
    assert agree == all(size % (4 * block) == 0 for size in filled[:-1])


def test_unknown_layout_raises():
    with pytest.raises(ValueError, match="scale_layout.*swizzled"):
        block_scaled.expert_scale_base(expert_ranges(offsets([32]), 32), 128, 32, "swizzled")


@pytest.mark.parametrize("dtype", MX, ids=str)
def test_every_element_times_every_scale_is_exact(dtype):
    """256 element codes (rows) by 256 scale codes (blocks of 32 tokens), NaN, infinities and subnormals included."""
    values = CODES[:, None].expand(256, 256 * 32).view(dtype)
    scale = quantize.swizzle(CODES.expand(256, 256), 0).view(256, 256).view(torch.float8_e8m0fnu)
    got = block_scaled.dequantize(values, scale, offsets([256 * 32]), "padded", "2d")[:, ::32]
    wanted = CODES.view(dtype).to(torch.float64)[:, None] * CODES.view(torch.float8_e8m0fnu).to(torch.float64)
    same(got, wanted.to(torch.float32))
    fits = wanted.abs() < 2.0**128
    assert torch.equal(got[fits].to(torch.float64), wanted[fits]), "no rounding short of fp32's largest"


def test_every_fp4_element_times_every_scale_is_exact():
    values = quantize.pack_fp4(CODES[:16, None].expand(16, 256 * 16))
    scale = quantize.swizzle(CODES.expand(16, 256), 0).view(128, 256).view(torch.float8_e4m3fn)
    got = block_scaled.dequantize(values, scale, offsets([256 * 16]), "padded", "2d")[:, ::16]
    wanted = quantize.E2M1.double()[:, None] * CODES.view(torch.float8_e4m3fn).to(torch.float64)
    same(got.to(torch.float64), wanted)


@pytest.mark.parametrize("dtype", MX, ids=str)
def test_mx_values_are_bf16_numbers(dtype):
    """What kernels rely on: dequantised elements need 4 significand bits at most, so bf16 holds them exactly."""
    ends = ends_of([40, 65, 128])
    operand = quantize.quantize_mx(normal(0, 24, ends[-1]), ends, dtype, "padded", "2d")
    assert torch.equal(operand.exact.to(torch.bfloat16).to(torch.float64), operand.exact)
