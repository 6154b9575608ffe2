"""States that one warpgroup keeps in registers while its CTA walks over a sequence's chunks, 64 value columns of each.

The state is kept transposed, S^T [64, K] in fp32, as the accumulator of wgmma: its rows are value columns. Rounded to
bf16 it is at once the left operand of the next product, in registers; what goes to memory is transposed back on its way
to shared memory. All products here are ``acc[m, n] += sum_k a[m, k] b[n, k]`` with 64 rows m.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from culax.device.chunks import select
from culax.device.walks import SLICE, WARPGROUP

REGISTERS, IMAGE = warpgroup.OperandSource.RMEM, warpgroup.OperandSource.SMEM
ALONG_K, ALONG_MN = OperandMajorMode.K, OperandMajorMode.MN


@dataclass(frozen=True)
class Place:
    """What a CTA works on: a sequence, one of the `segments` that its chunks fall into, a value head and 64 columns."""

    sequence: cutlass.Int32
    segment: cutlass.Int32
    segments: cutlass.Int32
    value_head: cutlass.Int32
    slice: cutlass.Int32

    @property
    def row(self) -> cutlass.Int32:
        """The segment's place among those of all sequences."""
        return self.sequence * self.segments + self.segment


def place_of_cta(value_heads: cutlass.Int32, slices: int, segments: cutlass.Int32) -> Place:
    """CTA i of a grid of N * segments * HV * slices; the slices of one state are neighbours, as they read the same
    tiles."""
    cta = cute.arch.block_idx()[0]
    row = cta // slices
    segment = row // value_heads
    return Place(segment // segments, segment % segments, segments, row % value_heads, cta % slices)


def span(bounds: cute.Tensor, place: Place) -> tuple[cutlass.Int32, cutlass.Int32]:
    """First chunk of a segment and the one behind its last; segments of a sequence differ by one chunk at most."""
    begin = bounds[place.sequence]
    chunks = bounds[place.sequence + 1] - begin
    first, past = (chunks * segment // place.segments for segment in (place.segment, place.segment + 1))
    return begin + first, begin + past


def product(columns: int, source: object, b_major: OperandMajorMode) -> cute.TiledMma:
    """The warpgroup's product [64, columns]. a lies in registers, or in an image [k, 64]; b along k or along n."""
    a_major = ALONG_K if source is REGISTERS else ALONG_MN
    bf16 = cutlass.BFloat16
    return hopper.make_trivial_tiled_mma(
        bf16, bf16, a_major, b_major, cutlass.Float32, (1, 1, 1), (SLICE, columns), source
    )


def accumulator(columns: int) -> cute.Tensor:
    """fp32 registers of a product [64, columns], not set."""
    mma = product(columns, REGISTERS, ALONG_MN)
    return cute.make_rmem_tensor(mma.partition_shape_C((SLICE, columns)), cutlass.Float32)


def left(mma: cute.TiledMma, tiles: cute.Tensor) -> cute.Tensor:
    """Operand a in shared memory: images as [64, k, stages], transposed."""
    thread = mma.get_slice(0)
    return thread.make_fragment_A(thread.partition_A(tiles))


def right(mma: cute.TiledMma, tiles: cute.Tensor) -> cute.Tensor:
    """Operand b in shared memory: images as [n, k, stages], as they are or transposed."""
    thread = mma.get_slice(0)
    return thread.make_fragment_B(thread.partition_B(tiles))


def issue(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, add: bool = True) -> None:
    """Start acc += a b^T (or acc = a b^T) and commit it as a group; acc and registers of a are not touched until it has
    been waited for."""
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, add)
    warpgroup.fence()
    for k in range(cute.size(b, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def rounded(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator [64, n] in bf16 as the left operand of a product over n: the same elements in the same threads."""
    blocks = cute.size(acc) // 8
    operand = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, blocks)), cutlass.BFloat16)
    cute.make_tensor(operand.iterator, acc.layout).store(acc.load().to(cutlass.BFloat16))
    return operand


def scale_columns(acc: cute.Tensor, factor: cute.Tensor) -> None:
    """Multiply column j of an accumulator [64, n] by ``factor[j]``, here and not where the result is needed.

    Plain multiplications would be moved down to the next product, behind the wait that they are to fill.
    """
    pair = cute.make_rmem_tensor((2,), cutlass.Float32)
    multiply = cute.arch.inline_ptx
    for block in range(cute.size(acc) // 4):
        cute.autovec_copy(cute.local_tile(factor, (2,), (4 * block + cute.arch.lane_idx() % 4,)), pair)
        for i in range(4):
            where = ((i % 2, i // 2, block), 0, 0)
            operands = [acc[where], pair[i % 2]]
            acc[where] = multiply(
                "mul.f32 {$w0}, {$r0}, {$r1};", write_only_types=[cutlass.Float32], read_only_args=operands
            )


def _transposing(operation: type, columns: int) -> tuple[cute.TiledCopy, cute.ThrCopy]:
    """A copy between a bf16 accumulator [64, columns] and shared memory that is contiguous along the 64."""
    atom = cute.make_copy_atom(operation(True, 4), cutlass.BFloat16)
    copy = cute.make_tiled_copy_C(atom, product(columns, REGISTERS, ALONG_MN))
    return copy, copy.get_slice(cute.arch.thread_idx()[0])


def load_transposed(tile: cute.Tensor) -> cute.Tensor:
    """A tile [64, n] (value columns first, contiguous) as an accumulator: ldmatrix, then fp32."""
    columns = cute.size(tile, mode=[1])
    acc = accumulator(columns)
    raw = cute.make_rmem_tensor(acc.layout, cutlass.BFloat16)
    copy, mine = _transposing(warp.LdMatrix8x8x16bOp, columns)
    cute.copy(copy, mine.partition_S(tile), mine.retile(raw))
    acc.store(raw.load().to(cutlass.Float32))
    return acc


def store_transposed(operand: cute.Tensor, tile: cute.Tensor) -> None:
    """Write what `rounded` gave to a tile [64, n] that is contiguous along its first dimension."""
    columns = cute.size(tile, mode=[1])
    values = cute.make_tensor(operand.iterator, accumulator(columns).layout)
    copy, mine = _transposing(warp.StMatrix8x8x16bOp, columns)
    cute.copy(copy, mine.retile(values), mine.partition_D(tile))


def _in_memory(states: cute.Tensor, row: cutlass.Int32, place: Place) -> cute.Tensor:
    """This thread's elements of a transposed state."""
    columns = states.shape[2]
    state = cute.local_tile(states[row, place.value_head, None, None], (columns, SLICE), (0, place.slice))
    return _mine(cute.make_tensor(state.iterator, cute.select(state.layout, mode=[1, 0])))


def _mine(view: cute.Tensor) -> cute.Tensor:
    """This thread's elements of a matrix [64, n] that lies like an accumulator."""
    columns = cute.size(view, mode=[1])
    return product(columns, REGISTERS, ALONG_MN).get_slice(cute.arch.thread_idx()[0]).partition_C(view)


def zeros(columns: int) -> cute.Tensor:
    """An accumulator [64, columns] of zeros."""
    acc = accumulator(columns)
    acc.fill(0.0)
    return acc


@cute.jit
def load_state(state: cute.Tensor, states: cute.Tensor, row: cutlass.Int32, place: Place) -> None:
    """Read the CTA's columns of entry `row` of states [rows, HV, K, V] fp32, transposed, into an accumulator, unless
    the tensor is empty."""
    if states.shape[0] > 0:
        cute.autovec_copy(_in_memory(states, row, place), state)


@cute.jit
def store_state(state: cute.Tensor, states: cute.Tensor, row: cutlass.Int32, place: Place) -> None:
    """Write such an accumulator to entry `row`, unless the tensor is empty."""
    if states.shape[0] > 0:
        cute.autovec_copy(state, _in_memory(states, row, place))


def fill_identity(state: cute.Tensor, place: Place) -> None:
    """The CTA's columns of the identity [K, K], transposed, as an accumulator [64, K]."""
    where = _mine(cute.make_identity_tensor((SLICE, cute.size(state) * WARPGROUP // SLICE)))
    for i in range(cute.size(state)):
        column, key = where[i]
        state[i] = select(key == place.slice * SLICE + column, 1.0, 0.0)


def store_transposed_state(state: cute.Tensor, states: cute.Tensor, row: cutlass.Int32, place: Place) -> None:
    """Write the CTA's columns of a matrix [K, K] as rows of its transpose in [rows, HV, K, K]."""
    matrix = states[row, place.value_head, None, None]
    cute.autovec_copy(state, _mine(cute.local_tile(matrix, (SLICE, states.shape[3]), (place.slice, 0))))
