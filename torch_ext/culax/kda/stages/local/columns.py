"""The local kernel's work by columns: gates, decayed operands, diagonal blocks, the last sums and the outputs.

A thread owns two neighbouring key columns in 8 rows: warp w has rows 8 w .. 8 w + 7, lane l columns 2 l and 2 l + 1.
`sums` are its gates in log2 units, summed over its rows, inclusive. A block is 16 rows; its upper half are the first 8
of them.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device import chunks
from culax.device.chunks import exp2, select, select_int
from culax.device.sizes import CHUNK, VECTOR
from culax.kda.stages.local import layouts
from culax.kda.stages.local.config import EIGHT, KEYS, P_UNIT, UNIT, V_UNIT, LocalConfig
from culax.kda.stages.local.layouts import Smem, Split, flat, pair_of, read_pair, write_pair, write_split
from culax.kda.stages.local.memory import Gmem, Task, kept, store_tile, write_beta

Pair = list[cutlass.Float32]
PAIR = range(2)


@dataclass(frozen=True)
class Owner:
    """This thread's 8 rows (`eight` of the chunk's), its pair of columns, and the places of its pairs in tiles."""

    eight: cutlass.Int32
    lane: cutlass.Int32
    places: list[cutlass.Int32]

    def row(self, r: int) -> cutlass.Int32:
        """The chunk's row of the owner's row r."""
        return self.eight * EIGHT + r

    def read(self, start: cute.Pointer, r: int) -> Pair:
        """The owner's elements of its row r of a tile [64, 64]."""
        return read_pair(flat(start), self.places[r])

    def write(self, start: cute.Pointer, r: int, values: Pair) -> None:
        """Round and store those elements."""
        write_pair(flat(start), self.places[r], values)

    def write_split(self, split: Split, r: int, values: Pair) -> None:
        """The same in both of its tiles."""
        place = self.places[r]
        write_split(flat(split.start), place, flat(split.rest), place, values)

    def read_sums(self, sums: cute.Tensor, eight: int | cutlass.Int32) -> Pair:
        """The elements of the owner's columns in a row of [n, 64] in fp32."""
        return read_pair(flat(sums.iterator, cute.size(sums)), eight * (KEYS // 2) + self.lane)

    def write_sums(self, sums: cute.Tensor, values: Pair) -> None:
        """Store them in the owner's row of [8, 64]."""
        write_pair(flat(sums.iterator, cute.size(sums)), self.eight * (KEYS // 2) + self.lane, values)


def owner_of_thread() -> Owner:
    """The calling thread's rows and columns."""
    warp, lane = cute.arch.make_warp_uniform(layouts.thread() >> 5), layouts.lane()
    first = warp * (EIGHT * KEYS // 2) + lane
    places = [pair_of(first, r) + r * (KEYS // 2) for r in range(EIGHT)]
    return Owner(warp, lane, places)


def load_gates(gmem: Gmem, task: Task) -> cute.Tensor:
    """Start reading the owner's gates [8, 2]; a row past the valid ones is not read and is 0."""
    owner = owner_of_thread()
    source = task.part(gmem.g, task.value_head)
    gates = cute.make_rmem_tensor(cute.make_layout((EIGHT, 2), stride=(2, 1)), cutlass.Float32)
    valid = task.chunk.rows - owner.row(0)
    for r in range(EIGHT):
        pair = read_pair(source[owner.row(0) + cutlass.min(valid - 1, r), None], owner.lane)
        for c in PAIR:
            gates[r, c] = select(r < valid, pair[c], 0.0) * chunks.LOG2_E
    return gates


def cumulate(gates: cute.Tensor, smem: Smem) -> None:
    """Sums from the owner's first row on, inclusive, in place; the decays over all its rows to shared memory.

    G stays at its last valid value in the rows behind.
    """
    for r in range(1, EIGHT):
        for c in PAIR:
            gates[r, c] = gates[r - 1, c] + gates[r, c]
    owner_of_thread().write_sums(smem.decays, [exp2(gates[EIGHT - 1, c]) for c in PAIR])


@cute.jit
def _decay_over(smem: Smem, owner: Owner, first: cutlass.Int32, past: cutlass.Int32):
    """The decay over some eights of rows, from `first` on, before `past`."""
    left, right = cutlass.Float32(1.0), cutlass.Float32(1.0)
    for eight in cutlass.range(first, past, unroll=1):
        decay = owner.read_sums(smem.decays, eight)
        left, right = left * decay[0], right * decay[1]
    return [left, right]


def state_sums(config: LocalConfig, smem: Smem) -> None:
    """B3's sum over v of S dS for each key column, a quarter of the columns a thread, to key_sums."""
    thread = layouts.thread()
    row, quarter = thread & (CHUNK - 1), thread >> 6
    total = cutlass.Float32(0.0)
    vectors = config.value_dim // VECTOR // 4
    for step in range(vectors):
        vector = quarter * vectors + step
        place = (vector >> 3) * (UNIT // VECTOR) + row * 8 + ((vector ^ row) & 7)
        raw = [cute.make_rmem_tensor((VECTOR // 2,), cutlass.Int32) for _ in range(2)]
        for start, target in zip((smem.h, smem.dh), raw, strict=True):
            pairs = cute.recast_tensor(flat(start, CHUNK * config.value_dim), cutlass.Int32)
            cute.autovec_copy(cute.local_tile(pairs, (VECTOR // 2,), (place,)), target)
        for i in range(VECTOR // 2):
            h, dh = (layouts.unpack(side[i]) for side in raw)
            total = total + h[0] * dh[0] + h[1] * dh[1]
    flat(smem.key_sums.iterator)[thread] = total


@cute.jit
def add_state_sums(smem: Smem) -> None:
    """The quarters of `state_sums` together."""
    thread = cute.arch.thread_idx()[0]
    if thread < KEYS:
        quarters = flat(smem.key_sums.iterator)
        total = quarters[thread]
        for quarter in cutlass.range_constexpr(1, 4):
            total = total + quarters[quarter * KEYS + thread]
        smem.state_sums[thread] = total


def keys_from_start(smem: Smem, sums: cute.Tensor) -> None:
    """ke = -k 2^G."""
    owner = owner_of_thread()
    before = _decay_over(smem, owner, cutlass.Int32(0), owner.eight)
    for r in range(EIGHT):
        k = owner.read(smem.k, r)
        owner.write(smem.ke, r, [k[c] * (exp2(sums[r, c]) * -before[c]) for c in PAIR])


def key_operands(smem: Smem, sums: cute.Tensor, last_row: cutlass.Int32) -> None:
    """kd = k 2^(G of the owner's last row - G); the sums over the owner's rows of k dks, the last valid row left out.

    No exponent is above 0: sums only fall from row to row.
    """
    owner = owner_of_thread()
    last = last_row - owner.row(0)
    totals = [cutlass.Float32(0.0) for _ in PAIR]
    for r in range(EIGHT):
        k, dks = owner.read(smem.k, r), owner.read(smem.dks, r)
        kd = [k[c] * exp2(sums[EIGHT - 1, c] - sums[r, c]) for c in PAIR]
        counts = last != r
        totals = [totals[c] + select(counts, kd[c] * dks[c], 0.0) for c in PAIR]
        owner.write_split(smem.kd, r, kd)
    after = _decay_over(smem, owner, owner.eight + 1, cutlass.Int32(CHUNK // EIGHT))
    owner.write_sums(smem.key_sums, [totals[c] * after[c] for c in PAIR])


def query_operands(smem: Smem, sums: cute.Tensor) -> None:
    """qd = q and kbd = -beta k times 2^(G - G before the owner's rows)."""
    owner = owner_of_thread()
    for r in range(EIGHT):
        beta = -smem.beta[owner.row(r)]
        decay = [exp2(sums[r, c]) for c in PAIR]
        q, k = owner.read(smem.q, r), owner.read(smem.k, r)
        owner.write_split(smem.qd, r, [q[c] * decay[c] for c in PAIR])
        owner.write_split(smem.kbd, r, [k[c] * (beta * decay[c]) for c in PAIR])


def _row_before(tile: cute.Tensor, row: cutlass.Int32, count: int) -> list[cutlass.Float32]:
    """The first `count` elements of a row of a [64, 8] tile, read 16 bytes at a time."""
    values: list[cutlass.Float32] = []
    for vector in range(-(-count // 4)):
        four = cute.make_rmem_tensor((1, 4), cutlass.Float32)
        cute.autovec_copy(cute.local_tile(tile, (1, 4), (row, vector)), four)
        values.extend(four[0, i] for i in range(4))
    return values[:count]


def _halve(lower: cutlass.Float32, upper: cutlass.Float32, offset: int) -> cutlass.Float32:
    """A step of summing values over the warp's lanes: a lane without the bit `offset` hands `upper` to the lane that
    far away and takes over its `lower`, one with it the other way round."""
    has = (cute.arch.lane_idx() & offset) != 0
    sent, kept = select(has, lower, upper), select(has, upper, lower)
    return kept + cute.arch.shuffle_sync_bfly(sent, offset=offset)


def _sum_over_lanes(values: list[cutlass.Float32]) -> cutlass.Float32:
    """The end of summing 8 values a lane over the warp, from the 4 that the first step (of 16) left: lane l gets the
    sum of value l / 4."""
    for offset in (8, 4):
        half = len(values) // 2
        values = [_halve(values[i], values[i + half], offset) for i in range(half)]
    total = values[0]
    for offset in (2, 1):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
    return total


def _aside(smem: Smem, owner: Owner) -> cute.Tensor:
    """Where the owner's sums [8, 2] wait for the diagonal blocks, seen by their thread alone."""
    quarters = CHUNK // EIGHT // 2
    first = (owner.eight & (quarters - 1)) * (EIGHT * KEYS // 2) + owner.lane
    index = select_int(owner.eight < quarters, P_UNIT, V_UNIT) * (UNIT // 4) + first
    every = cute.recast_tensor(flat(smem.e, UNIT * (V_UNIT + 1)), cutlass.Float32)
    pairs = cute.make_tensor(every.iterator, cute.make_layout((UNIT // 4 * (V_UNIT + 1), 2), stride=(2, 1)))
    rows = cute.domain_offset((index, 0), pairs)
    return cute.make_tensor(rows.iterator, cute.make_layout((EIGHT, 2), stride=(KEYS, 1)))


def set_aside(smem: Smem, sums: cute.Tensor) -> None:
    """Write the sums where they take no registers, once the products of columns and the tile that lay there are done
    with."""
    aside = _aside(smem, owner_of_thread())
    for r in range(EIGHT):
        cute.autovec_copy(sums[r, None], aside[r, None])


def diagonal_block(
    smem: Smem, owner: Owner, sums: cute.Tensor, dq_tile: cute.Pointer
) -> tuple[cute.Tensor, cute.Tensor]:
    """B4 within the 8 rows, from row to row with exact decays, all at most 1; returns k and t [8, 2], t without i = j.

    The tiles dq, x, t lack the decay from before (dq, x) or to the end (t) of the owner's rows, and x and dL have
    their signs changed. dq is complete at its row and goes to its tile. In the stage tiles q dq + beta k x takes dq's
    place (i = j left out, as it cancels in dG), and beta x + E_ii q, what dk holds besides t, takes that of x. The sums
    of k x over the columns are added to row_sums.
    """
    layout = cute.make_layout((EIGHT, 2), stride=(2, 1))
    k, t, since = (cute.make_rmem_tensor(layout, cutlass.Float32) for _ in range(3))
    key_sums = []
    before, start = [cutlass.Float32(0.0) for _ in PAIR], [cutlass.Float32(1.0) for _ in PAIR]
    for i in range(EIGHT):
        row = owner.row(i)
        q, keys, dq, x = (owner.read(tile, i) for tile in (smem.q, smem.k, smem.dq, smem.x))
        beta = -smem.beta[row]
        inside = cute.make_rmem_tensor((2,), cutlass.Float32)
        cute.autovec_copy(sums[i, None], inside)
        e_row, dl_row = _row_before(smem.e_diagonal, row, i + 1), _row_before(smem.dl_diagonal, row, i)
        own, key_part, without, total = [], [], [], cutlass.Float32(0.0)
        for c in PAIR:
            decay, before[c] = exp2(inside[c] - before[c]), inside[c]
            beta_k, start[c] = beta * keys[c], start[c] * decay
            k[i, c], t[i, c], since[i, c] = keys[c], cutlass.Float32(0.0), cutlass.Float32(1.0)
            dq_c, x_c = dq[c] * start[c], x[c] * start[c]
            for j in range(i):
                since[j, c] = since[j, c] * decay if j < i - 1 else decay
                decayed = k[j, c] * since[j, c]
                dq_c = dq_c + e_row[j] * decayed
                x_c = x_c + dl_row[j] * decayed
                t[j, c] = t[j, c] + (e_row[j] * q[c] + dl_row[j] * beta_k) * since[j, c]
            total = total - keys[c] * x_c
            without.append(q[c] * dq_c + beta_k * x_c)
            key_part.append(beta * x_c + e_row[i] * q[c])
            own.append(dq_c + e_row[i] * keys[c])
        if i < EIGHT // 2:
            key_sums.append(total)
        else:
            key_sums[i - EIGHT // 2] = _halve(key_sums[i - EIGHT // 2], total, 16)
        owner.write(smem.dq, i, without)
        owner.write(smem.x, i, key_part)
        owner.write(dq_tile, i, own)
    for j in range(EIGHT):
        t_j = owner.read(smem.t, j)
        for c in PAIR:
            t[j, c] = t[j, c] + t_j[c] * since[j, c]
    _add_row_sum(smem, owner.row(0) + owner.lane // 4, _sum_over_lanes(key_sums))
    return k, t


@cute.jit
def _add_row_sum(smem: Smem, row: cutlass.Int32, total: cutlass.Float32) -> None:
    if cute.arch.lane_idx() % 4 == 0:
        smem.row_sums[row] = smem.row_sums[row] + total


def finish(config: LocalConfig, gmem: Gmem, smem: Smem, task: Task) -> None:
    """B3 + B4 + B6 put together; writes dq, dk, dg and dbeta."""
    owner = owner_of_thread()
    # Results replace what their thread alone reads, and has read: dq and dk the rows of q and k, or dk in fp32 those of
    # x; dg what is summed up to it in dq's stage tile. Tiles of the off-diagonal blocks are free.
    dq_tile, dk_tile = (smem.dq_share, smem.x) if config.partial else (smem.q, smem.k)
    k, t = diagonal_block(smem, owner, _aside(smem, owner), dq_tile)
    task = kept(smem, task)
    behind = task.chunk.rows - owner.row(0)
    d_gate = cute.make_rmem_tensor(cute.make_layout((EIGHT, 2), stride=(2, 1)), cutlass.Float32)
    for r in range(EIGHT):
        # On the last valid row t holds nothing but its own k dks, which cancels against the sum over all rows.
        is_last = behind == r + 1
        before, key_part = owner.read(smem.dq, r), owner.read(smem.x, r)
        for c in PAIR:
            d_gate[r, c] = before[c] - k[r, c] * select(is_last, 0.0, t[r, c])
        owner.write(dk_tile, r, [t[r, c] + key_part[c] for c in PAIR])
    _reverse_sum(smem, owner, d_gate)
    for r in range(EIGHT):
        owner.write(smem.dq, r, [d_gate[r, c] for c in PAIR])
    cute.arch.sync_threads()
    head = task.value_head if config.partial else task.head
    for start, tensor, row_head in (
        (dq_tile, gmem.dq, head),
        (dk_tile, gmem.dk, head),
        (smem.dq, gmem.dg, task.value_head),
    ):
        store_tile(start, task.part(tensor, row_head), task.chunk.rows)
    write_beta(config, gmem, smem, task)


def _last_row_terms(smem: Smem, owner: Owner) -> Pair:
    """B3's terms of dG on the last valid row: 2^G_last sum_v(S dS) + sum_t(k dks)."""
    total = read_pair(smem.state_sums, owner.lane)
    for eight in range(CHUNK // EIGHT):
        decay = owner.read_sums(smem.decays, eight)
        total = [total[c] * decay[c] for c in PAIR]
    for eight in range(CHUNK // EIGHT):
        keys = owner.read_sums(smem.key_sums, eight)
        total = [total[c] + keys[c] for c in PAIR]
    return total


@cute.jit
def _add_later(owner: Owner, sums: cute.Tensor, total):
    """Add the rows of [8, 64] behind the owner's."""
    left, right = total[0], total[1]
    for eight in cutlass.range(owner.eight + 1, CHUNK // EIGHT, unroll=1):
        more = owner.read_sums(sums, eight)
        left, right = left + more[0], right + more[1]
    return [left, right]


def _reverse_sum(smem: Smem, owner: Owner, d_gate: cute.Tensor) -> None:
    """B6 in place: sums of dG over the rows from each one to the chunk's last."""
    for r in range(EIGHT - 2, -1, -1):
        for c in PAIR:
            d_gate[r, c] = d_gate[r, c] + d_gate[r + 1, c]
    # The totals go where only their warp has read: its rows of E's diagonal blocks.
    sums = cute.make_tensor(smem.e_diagonal.iterator, cute.make_layout((CHUNK // EIGHT, KEYS), stride=(KEYS, 1)))
    cute.arch.sync_warp()
    owner.write_sums(sums, [d_gate[0, c] for c in PAIR])
    cute.arch.sync_threads()
    # The last valid row's terms are part of every sum that is written.
    later = _add_later(owner, sums, _last_row_terms(smem, owner))
    for r in range(EIGHT):
        for c in PAIR:
            d_gate[r, c] = d_gate[r, c] + later[c]
