"""Elements and scales to bf16, exactly; tokens change places within 16, in A and in B alike.

A product over 16 tokens is one step of the tensor core, which gives the same bits in any order of them. So each thread
takes four neighbouring tokens where WGMMA's register layout has two pairs eight columns apart:

    column of the product    0 1  2 3  4 5   6 7    8 9  10 11  12 13  14 15
    token, MXFP8             0 1  4 5  8 9  12 13   2 3   6 7   10 11  14 15
    token, NVFP4             0 2  4 6  8 10 12 14   1 3   5 7    9 11  13 15
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from culax.grouped_wgrad.stages.gemm_scaled import layouts
from culax.grouped_wgrad.stages.gemm_scaled.config import Config

MX_QUAD = """{{
.reg .b16 l, h, a, b, c, d; .reg .b32 p, q; .reg .f32 x, y, z, t;
mov.b32 {{l, h}}, {{$r0}};
cvt.rn.f16x2.{format}x2 p, l;
cvt.rn.f16x2.{format}x2 q, h;
mov.b32 {{a, b}}, p;
mov.b32 {{c, d}}, q;
cvt.f32.f16 x, a; cvt.f32.f16 y, b; cvt.f32.f16 z, c; cvt.f32.f16 t, d;
cvt.rn.bf16x2.f32 p, y, x;
cvt.rn.bf16x2.f32 q, t, z;
mul.rn.bf16x2 {{$w0}}, p, {{$r1}};
mul.rn.bf16x2 {{$w1}}, q, {{$r1}};
}}"""
"""Four fp8 elements times a factor; every fp8 number is an fp16 number, and a bf16 number. One rounding, at the end."""

NV_QUAD = """{
.reg .b32 y, m, n, s, t;
prmt.b32 y, {$r0}, 0, {$r2};
shl.b32 m, y, 6; shl.b32 n, y, 2; shl.b32 s, y, 12; shl.b32 t, y, 8;
and.b32 m, m, 0x01c001c0; and.b32 n, n, 0x01c001c0;
lop3.b32 s, s, 0x80008000, 0x7e807e80, 0xea; lop3.b32 t, t, 0x80008000, 0x7e807e80, 0xea;
mul.rn.bf16x2 m, m, s; mul.rn.bf16x2 n, n, t;
mul.rn.bf16x2 {$w0}, m, {$r1}; mul.rn.bf16x2 {$w1}, n, {$r1};
}"""
"""Four fp4 elements: exponent and mantissa as those of a bf16 number 2^126 too small, the sign on 2^126."""

NV_FACTOR = """{
.reg .b16 b, l, h; .reg .b32 p; .reg .f32 x;
cvt.u16.u32 b, {$r0};
cvt.rn.f16x2.e4m3x2 p, b;
mov.b32 {l, h}, p;
cvt.f32.f16 x, l;
cvt.rn.bf16x2.f32 {$w0}, x, x;
}"""

NAN = 0x7FFF7FFF


def quad(form: str, word: Int32, select: Int32, factor: Int32):
    """Four tokens times a factor (bf16 twice) -> two pairs of bf16: the first and the second of the table above.

    word holds four fp8 elements, or eight fp4 elements of which prmt's `select` takes two bytes.
    """
    if form == "e2m1":
        return cute.arch.inline_ptx(NV_QUAD, write_only_types=[Int32, Int32], read_only_args=[word, factor, select])
    code = MX_QUAD.format(format=form)
    return cute.arch.inline_ptx(code, write_only_types=[Int32, Int32], read_only_args=[word, factor])


@cute.jit
def factor(config: cutlass.Constexpr[Config], byte: Int32):
    """A scale byte as bf16 twice: e8m0 is the exponent of a power of two (0: a subnormal, 255: NaN), e4m3 a number."""
    result = Int32(0)
    if cutlass.const_expr(config.nv):
        result = cute.arch.inline_ptx(NV_FACTOR, write_only_types=[Int32], read_only_args=[byte])
    else:
        result = byte * 0x00800080
        if byte == 0:
            result = Int32(0x00400040)
        if byte == 255:
            result = Int32(NAN)
    return result


@cute.jit
def write_factors(
    config: cutlass.Constexpr[Config], scales: cute.Tensor, part: Int32, live: tuple[Int32, Int32], factors: cute.Tensor
):
    """One warp: lane l's scales (16 bytes: rows l, l + 32, l + 64, l + 96 of an atom, 4 blocks each) as factors.

    Blocks `part` * blocks.. of the atom go to factors (128 rows, blocks). Those before live[0] or from live[1] on are
    nobody's or another group's and become 0.
    """
    lane = cute.arch.lane_idx()
    for row in cutlass.range_constexpr(4):
        word = scales[row]
        if cutlass.const_expr(not config.nv):
            word = word >> (16 * part)
        for block in cutlass.range_constexpr(config.blocks):
            value = factor(config, (word >> (8 * block)) & 0xFF)
            if (block < live[0]) | (block >= live[1]):
                value = Int32(0)
            factors[lane + 32 * row, block] = value


@cute.jit
def fragment(
    config: cutlass.Constexpr[Config],
    smem,
    first: Int32,
    stage: Int32,
    half: cutlass.Constexpr[int],
    pairs: cute.Tensor,
):
    """A consumer thread's part of A (config.rows rows from `first` on, 32 tokens of the k tile) -> pairs.

    pairs (4, rows / 64, 4) int32. WGMMA wants of a thread, in each 64 rows: rows g and g + 8 of its warp's 16, columns
    2c, 2c + 1 and 8 more.
    """
    thread = cute.arch.thread_idx()[0] % 128
    lane = thread % 32
    g, c = first + thread // 32 * 16 + lane // 4, lane % 4
    words = smem.a_words[None, None, stage]
    select = Int32(0)
    if cutlass.const_expr(config.nv):
        select = 0x4140 + (c % 2) * 0x0202
    for m in cutlass.range_constexpr(config.rows // 64):
        for upper in cutlass.range_constexpr(2):
            row = g + 64 * m + 8 * upper
            for step in cutlass.range_constexpr(2):
                k16 = 2 * half + step
                scale = smem.a_factors[row, k16 * 16 // config.block, stage]
                if cutlass.const_expr(config.nv):
                    word = words[k16 % 2 * 2 + c // 2, layouts.chunk_offset(config, row, k16 // 2)]
                else:
                    word = words[c, layouts.chunk_offset(config, row, k16)]
                first_pair, second_pair = quad(config.a_format, word, select, scale)
                pairs[upper, m, k16] = first_pair
                pairs[upper + 2, m, k16] = second_pair


@cute.jit
def convert_row(config: cutlass.Constexpr[Config], smem, row: Int32, ready_row: Int32, stages: tuple[Int32, Int32]):
    """One thread: a loaded row of B to a row of `ready_b`, all loads first; stages: of the loaded and the ready ring.

    Eight neighbouring threads touch all banks in every load and store.
    """
    loaded, ready = stages
    words = smem.b_words[None, None, loaded]
    target = smem.b_chunks[None, None, ready]
    chunks: cutlass.Constexpr = config.loaded_k // layouts.CHUNK
    raw = cute.make_rmem_tensor((4, chunks), Int32)
    scales = cute.make_rmem_tensor((config.blocks,), Int32)
    for chunk in cutlass.range_constexpr(chunks):
        cute.autovec_copy(words[None, layouts.chunk_offset(config, row, chunk)], raw[None, chunk])
    for block in cutlass.range_constexpr(config.blocks):
        scales[block] = smem.b_factors[row, block, loaded]
    if cutlass.const_expr(config.poison):
        nan = cute.make_rmem_tensor((4,), Int32)
        nan.fill(Int32(NAN))
        for chunk in cutlass.range_constexpr(8):
            cute.autovec_copy(nan, target[None, ready_row * 8 + chunk])
    low, high = (cute.make_rmem_tensor((4,), Int32) for _ in range(2))
    for chunk in cutlass.range_constexpr(chunks):
        for step in cutlass.range_constexpr(config.packed):
            k16 = chunk * config.packed + step
            for c in cutlass.range_constexpr(4):
                if cutlass.const_expr(config.nv):
                    word, select = raw[step * 2 + c // 2, chunk], Int32(0x4140 + (c % 2) * 0x0202)
                else:
                    word, select = raw[c, chunk], Int32(0)
                low[c], high[c] = quad(config.b_format, word, select, scales[k16 * 16 // config.block])
            cute.autovec_copy(low, target[None, ready_row * 8 + ((2 * k16) ^ (row % 8))])
            cute.autovec_copy(high, target[None, ready_row * 8 + ((2 * k16 + 1) ^ (row % 8))])
