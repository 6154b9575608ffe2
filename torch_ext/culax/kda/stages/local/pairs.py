"""B4's sums over pairs of rows in different eights, by warp-level products; a warp has 16 rows of an accumulator.

A sum holds what it would be at an anchor, G of some row, and starts from what B3 adds to it: do S^T and dX at the
chunk's start, v_new dS^T at its end. From eight to eight the anchor moves on, by a factor of at most 1, to the row at
which the next eight's operand is anchored.

Sums of dG down a chunk cancel only if the same pair has the same factors in all of them, so both factors of a product
are bf16 twice: rounded, and what that left (dL's once: its rounding does not show). 8 rows of an operand, taken in both
tiles, are the 16 steps of a product; the coefficients stand beside themselves. E's tile holds the blocks below the
diagonal, rounded, and at (J, I) what that left of the block (I, J); in the blocks [16, 16] on the diagonal likewise of
the quarter below.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from culax.device.sizes import BLOCK, CHUNK, VECTOR
from culax.kda.stages.local.config import EIGHT, KEYS
from culax.kda.stages.local.layouts import Part, Smem, Split, flat, pair_of, read_pair, write_pair, write_split

EIGHT_VECTORS, BLOCK_VECTORS = EIGHT * KEYS // VECTOR, BLOCK * KEYS // VECTOR
"""Units of 16 bytes of 8 and of 16 rows of an image [64, 64]."""


def _store(tile: cute.Tensor, at: cutlass.Int32, rest: cutlass.Int32, pair: list, split: bool) -> None:
    if split:
        write_split(tile, at, tile, rest, pair)
    else:
        write_pair(tile, at, pair)


@cute.jit
def store_coefficients(
    acc: cute.Tensor, start: cute.Pointer, diagonal: cute.Tensor, part: Part, split: cutlass.Constexpr
) -> None:
    """Keep E (split) or dL: blocks [8, 8] on the diagonal in fp32 (`diagonal` [64, 8]), the others in the tile."""
    tile, blocks = flat(start), flat(diagonal.iterator, CHUNK * EIGHT)
    half_block = EIGHT * (KEYS // 2)
    for n in cutlass.range_constexpr(KEYS // 8):
        other = n // 2
        pairs = [[acc[4 * n + 2 * half], acc[4 * n + 2 * half + 1]] for half in range(2)]
        if other < part.block:
            mirrored = pair_of((other * BLOCK + (part.lane >> 2)) * (KEYS // 2) + part.lane, 2 * part.block + n % 2)
            for half in cutlass.range_constexpr(2):
                _store(tile, part.places[half][n], mirrored + half_block * half, pairs[half], split)
        if other == part.block:
            half = n % 2
            place = (part.row + EIGHT * half) * (EIGHT // 2) + part.within
            write_pair(blocks, place, pairs[half])
            if cutlass.const_expr(half == 0):
                _store(tile, part.places[1][n], part.places[0][n + 1], pairs[1], split)


def _load(start: cute.Pointer, vector: cutlass.Int32, transpose: bool) -> cute.Tensor:
    """Four 8 x 8 matrices to registers [4]: a lane says which 16 bytes are row lane % 8 of matrix lane / 8."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=transpose, num_matrices=4), cutlass.BFloat16)
    row = cute.make_tensor(cute.local_tile(flat(start), (8,), (vector,)).iterator, cute.make_layout((8, 1)))
    registers = cute.make_rmem_tensor((8, 1), cutlass.BFloat16)
    cute.copy(atom, row, registers)
    return cute.recast_tensor(registers, cutlass.Int32)


def _vector(row: cutlass.Int32, column: int | cutlass.Int32) -> cutlass.Int32:
    """Where columns 8 `column` .. of a row lie in an image [64, 64], in units of 16 bytes."""
    return (row * (KEYS // 8) + (row & 7)) ^ column


def _earlier(start: cute.Pointer, part: Part, block: int | cutlass.Int32, column: int | cutlass.Int32) -> cute.Tensor:
    """16 rows of E or dL from a block's first on, 8 columns from 8 `column` on twice side by side: a left operand [16,
    16]."""
    return _load(start, block * BLOCK_VECTORS + _vector(part.lane & 15, column), transpose=False)


def _later(start: cute.Pointer, part: Part, eight: int | cutlass.Int32, block: int | cutlass.Int32) -> cute.Tensor:
    """An eight of rows of E or dL, 16 columns from a block's first on, transposed, twice side by side: a left operand
    [16, 16]."""
    column = 2 * block + ((part.lane >> 3) & 1)
    return _load(start, eight * EIGHT_VECTORS + _vector(part.lane & 7, column), transpose=True)


@dataclass(frozen=True)
class Term:
    """A product to add to a sum: a left operand [16, 16] in registers, and the decayed one whose 8 rows it meets."""

    total: cute.Tensor
    left: cute.Tensor
    operand: Split


def _advance(
    smem: Smem, part: Part, eight: int | cutlass.Int32, terms: list[Term], halves: tuple[int, ...] = (0, 1)
) -> None:
    """Move the anchor of sums over an eight of rows and add the products with that eight, in some halves of the block's
    rows; 16 columns at a time."""
    decays = flat(smem.decays.iterator, CHUNK // EIGHT * KEYS)
    sums, operands = _distinct([term.total for term in terms]), _distinct([term.operand for term in terms])
    lefts = [_kept_halves(term.left, halves) for term in terms]
    for n in range(KEYS // BLOCK):
        rights = {id(operand): _right(operand, part, eight, n) for operand in operands}
        for group in (2 * n, 2 * n + 1):
            factor = read_pair(decays, eight * (KEYS // 2) + 4 * group + part.within)
            for total in sums:
                for i in (4 * group + 2 * half + c for half in halves for c in range(2)):
                    total[i] = total[i] * factor[i % 2]
        for term, left in zip(terms, lefts, strict=True):
            for side in range(2):
                _multiply(term.total, 2 * n + side, left, rights[id(term.operand)], side)


def _distinct(items: list) -> list:
    """Each object once."""
    return list({id(item): item for item in items}.values())


def _right(operand: Split, part: Part, eight: int | cutlass.Int32, n: int) -> cute.Tensor:
    """8 rows of both tiles of a decayed operand, one behind the other, as a right operand: registers [4] for columns
    16 n to 16 n + 15."""
    first = eight * EIGHT_VECTORS + ((part.lane >> 3) & 1) * (operand.apart // VECTOR)
    return _load(operand.start, first + _vector(part.lane & 7, 2 * n + (part.lane >> 4)), transpose=True)


def _kept_halves(left: cute.Tensor, halves: tuple[int, ...]) -> cute.Tensor:
    """A left operand with zeros in the other half of its rows."""
    kept = cute.make_rmem_tensor((4,), cutlass.Int32)
    for i in range(4):
        kept[i] = left[i] if i % 2 in halves else cutlass.Int32(0)
    return kept


def _multiply(total: cute.Tensor, group: int, left: cute.Tensor, right: cute.Tensor, side: int) -> None:
    """Add a product to 8 columns of a warp's part of an accumulator."""
    mma = cute.make_tiled_mma(warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (BLOCK, 8, BLOCK)))
    pair = cute.make_rmem_tensor((2,), cutlass.Int32)
    pair[0], pair[1] = right[2 * side], right[2 * side + 1]
    a, b = (
        cute.make_tensor(cute.recast_tensor(bits, cutlass.BFloat16).iterator, cute.make_layout(shape))
        for bits, shape in (
            (left, mma.partition_shape_A((BLOCK, BLOCK))),
            (pair, mma.partition_shape_B((8, BLOCK))),
        )
    )
    shape = mma.partition_shape_C((BLOCK, 8))
    c = cute.make_tensor(total.iterator + 4 * group, cute.make_layout(shape))
    cute.gemm(mma, c, a[None, None, 0], b[None, None, 0], c)


@cute.jit
def earlier_blocks(smem: Smem, part: Part, dq: cute.Tensor, x: cute.Tensor) -> None:
    """dqi and a from earlier rows, added to B3's parts, all but the last factor 2^(G - G before the 8 rows); x and dL
    have their signs changed."""
    mine = part.block
    for other in cutlass.range_constexpr(CHUNK // BLOCK - 1):
        if other < mine:
            for half in range(2):
                eight = 2 * other + half
                rounded, rest = _earlier(smem.e, part, mine, eight), _earlier(smem.e, part, other, 2 * mine + half)
                a = Term(x, _earlier(smem.dl, part, mine, eight), smem.kd)
                _advance(smem, part, eight, [Term(dq, rounded, smem.kd), Term(dq, rest, smem.kd), a])
    rest = _load(smem.e, mine * BLOCK_VECTORS + _vector(part.lane & 7, 2 * mine + 1), transpose=False)
    within = [Term(dq, _earlier(smem.e, part, mine, 2 * mine), smem.kd), Term(dq, rest, smem.kd)]
    within.append(Term(x, _earlier(smem.dl, part, mine, 2 * mine), smem.kd))
    _advance(smem, part, 2 * mine, within, halves=(1,))


@cute.jit
def later_blocks(smem: Smem, part: Part, t: cute.Tensor) -> None:
    """t from later rows, added to dks, all but the last factor 2^(G of the 8 rows' last - G)."""
    mine = part.block
    for back in cutlass.range_constexpr(CHUNK // BLOCK - 1):
        other = CHUNK // BLOCK - 1 - back
        if other > mine:
            for half in (1, 0):
                eight = 2 * other + half
                rounded, rest = _later(smem.e, part, eight, mine), _later(smem.e, part, 2 * mine + half, other)
                last = Term(t, _later(smem.dl, part, eight, mine), smem.kbd)
                _advance(smem, part, eight, [Term(t, rounded, smem.qd), Term(t, rest, smem.qd), last])
    eight = 2 * mine + 1
    rest = _load(smem.e, 2 * mine * EIGHT_VECTORS + _vector(part.lane & 7, eight), transpose=True)
    within = [Term(t, _later(smem.e, part, eight, mine), smem.qd), Term(t, rest, smem.qd)]
    within.append(Term(t, _later(smem.dl, part, eight, mine), smem.kbd))
    _advance(smem, part, eight, within, halves=(0,))
