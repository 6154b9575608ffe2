"""The workspace of a backward call, cut into the tensors that its stages share."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from culax.kda.stages.backward.config import ALIGNMENT, BackwardConfig, vector_bytes


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call: chunks, sequences, table rows, rows (batch times tokens), value heads, segments a sequence."""

    chunks: Int32
    sequences: Int32
    table: Int32
    rows: Int32
    value_heads: Int32
    segments: Int32


@dataclass(frozen=True)
class Workspace:
    """What the stages hand on; shares are vectors, none without a group sum. The last four are for several segments."""

    minus_w: cute.Tensor
    u: cute.Tensor
    qg: cute.Tensor
    kg: cute.Tensor
    h: cute.Tensor
    v_new: cute.Tensor
    dh: cute.Tensor
    dvn: cute.Tensor
    decay: cute.Tensor
    shares: tuple[cute.Tensor, ...]
    table: cute.Tensor
    tokens_of: cute.Tensor
    bounds: cute.Tensor
    starts: cute.Tensor
    ends: cute.Tensor
    transitions: cute.Tensor
    transposed: cute.Tensor


class _Cutter:
    """Hands out a buffer from its start."""

    def __init__(self, buffer: cute.Tensor) -> None:
        self._address = buffer.iterator.toint()

    def take(self, dtype, layout: cute.Layout, size) -> cute.Tensor:
        """The next `size` bytes as a tensor."""
        pointer = cute.make_ptr(dtype, self._address, cute.AddressSpace.gmem, assumed_align=ALIGNMENT)
        self._address = self._address + size
        return cute.make_tensor(pointer, layout)


def cut(config: BackwardConfig, buffer: cute.Tensor, sizes: Sizes) -> Workspace:
    """The parts in the order of BackwardConfig.workspace_bytes, with the layouts of device/fakes.py."""
    cutter, heads = _Cutter(buffer), sizes.value_heads
    entries, key_dim = Int64(sizes.chunks) * heads, config.prep.key_dim

    def tape(name: str) -> cute.Tensor:
        size = config.tape_bytes(name) // 2
        pitch = cute.assume(Int64(heads) * size, divby=size)
        layout = cute.make_layout((sizes.chunks, heads, size), stride=(pitch, size, 1))
        return cutter.take(cutlass.BFloat16, layout, entries * (2 * size))

    tapes = {name: tape(name) for name in config.tapes}
    per_head = cute.make_layout((sizes.chunks, heads, key_dim), stride=(Int64(heads) * key_dim, key_dim, 1))
    decay = cutter.take(cutlass.Float32, per_head, entries * config.tape_bytes("decay"))
    shares = ()
    if config.group_sum is not None:
        size = Int64(sizes.rows) * heads * key_dim
        shares = tuple(cutter.take(cutlass.Float32, cute.make_layout((size,)), 4 * size) for _ in range(2))
    rows = cute.make_layout((sizes.table, 4), stride=(4, 1))
    table = cutter.take(cutlass.Int32, rows, Int64(sizes.table) * ALIGNMENT)
    vector = cute.make_layout((sizes.sequences + 1,))
    first, second = (cutter.take(cutlass.Int32, vector, Int64(vector_bytes(sizes.sequences))) for _ in range(2))

    def matrices(columns: int) -> cute.Tensor:
        size = key_dim * columns
        stride = (Int64(heads) * size, size, columns, 1)
        layout = cute.make_layout((sizes.sequences * sizes.segments, heads, key_dim, columns), stride=stride)
        return cutter.take(cutlass.Float32, layout, Int64(sizes.sequences) * sizes.segments * heads * (4 * size))

    value_dim = config.prep.value_dim
    widths = {"starts": value_dim, "ends": value_dim, "transitions": key_dim, "transposed": key_dim}
    for_segments = {name: matrices(columns) for name, columns in widths.items()}
    parts = {"decay": decay, "shares": shares, "table": table, "tokens_of": first, "bounds": second}
    return Workspace(**tapes, **parts, **for_segments)
