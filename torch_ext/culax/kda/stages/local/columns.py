"""The local kernel's work by columns: operands of the off-diagonal blocks, the diagonal blocks, the last sums and the
outputs.

A lane owns a key column in the 16 rows of its warp's block (device/gates.py); a block's columns and the same block of
the fragments belong to the same warp.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device import chunks, warp_tiles
from culax.device.sizes import BLOCK, CHUNK
from culax.kda.stages.local.config import LocalConfig
from culax.kda.stages.local.layouts import Smem
from culax.kda.stages.local.roles import Fragments, Gmem, Task, Warp


@dataclass(frozen=True)
class Owner:
    """This thread's block of rows and its key column."""

    block: cutlass.Int32
    column: cutlass.Int32

    def row(self, r: int) -> cutlass.Int32:
        """The chunk's row of the block's row r."""
        return self.block * BLOCK + r

    def read(self, tile: cute.Tensor, r: int) -> cutlass.Float32:
        """The thread's element of the block's row r of a [64, K] tile."""
        return tile[self.row(r), self.column].to(cutlass.Float32)

    def write(self, tile: cute.Tensor, r: int, value: cutlass.Float32) -> None:
        """Round and store that element."""
        tile[self.row(r), self.column] = value.to(tile.element_type)


def gate_and_keys(smem: Smem, owner: Owner, inside: cute.Tensor, before: cutlass.Float32) -> None:
    """G and the gates summed within the block in fp32, and ke = k 2^G.

    The thread reads its sums again where it needs them: keeping them would cost the products registers.
    """
    for r in range(BLOCK):
        owner.write(smem.inside, r, inside[r, 0])
        gate = before + inside[r, 0]
        owner.write(smem.gate, r, gate)
        owner.write(smem.ke, r, owner.read(smem.k, r) * chunks.exp2(gate))


def block_operands(smem: Smem, owner: Owner) -> None:
    """The operands of the off-diagonal blocks: kd = k 2^(b_I - G), qd = q 2^(G - b_(I-1)), kbd = beta k 2^(G -
    b_(I-1))."""
    total = owner.read(smem.inside, BLOCK - 1)
    for r in range(BLOCK):
        k, inside = owner.read(smem.k, r), owner.read(smem.inside, r)
        down = chunks.exp2(inside)
        owner.write(smem.kd, r, k * chunks.exp2(total - inside))
        owner.write(smem.qd, r, owner.read(smem.q, r) * down)
        owner.write(smem.kbd, r, smem.beta[owner.row(r)] * k * down)


def stage_fragments(smem: Smem, warp: Warp, parts: Fragments) -> None:
    """The warp's [16, 32] fragments into its own part of the stage tiles, from where its lanes read columns."""
    for fragment, tile in ((parts.dq, smem.dq), (parts.x, smem.x), (parts.dks, smem.t)):
        warp_tiles.store_fragment(fragment, warp.keys(tile))
    cute.arch.sync_warp()


def _row_before(tile: cute.Tensor, row: cutlass.Int32, count: int) -> list[cutlass.Float32]:
    """The first `count` elements of a row of a [64, 16] tile, read 16 bytes at a time."""
    values: list[cutlass.Float32] = []
    for vector in range(-(-count // 4)):
        four = cute.make_rmem_tensor((1, 4), cutlass.Float32)
        cute.autovec_copy(cute.local_tile(tile, (1, 4), (row, vector)), four)
        values.extend(four[0, i] for i in range(4))
    return values[:count]


def _sum_over_lanes(values: list[cutlass.Float32]) -> cutlass.Float32:
    """Sums over the warp of 16 values a lane: lane l gets the sum of value l / 2.

    At each step a lane hands half of its values to the lane `offset` away and takes over the other half.
    """
    lane = cute.arch.lane_idx()
    for offset in (16, 8, 4, 2):
        half = len(values) // 2
        upper = (lane & offset) != 0
        sent = [chunks.select(upper, values[i], values[i + half]) for i in range(half)]
        kept = [chunks.select(upper, values[i + half], values[i]) for i in range(half)]
        values = [kept[i] + cute.arch.shuffle_sync_bfly(sent[i], offset=offset) for i in range(half)]
    return values[0] + cute.arch.shuffle_sync_bfly(values[0], offset=1)


def diagonal_block(smem: Smem, warp: Warp, owner: Owner, dq_tile: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """B4 within the block, from row to row with exact decays, all at most 1; returns k and t [16], t without i = j.

    dq is complete at its row and goes to its tile. In the stage tiles q dq + beta k x takes dq's place (i = j left out,
    as it cancels in dG), and beta x + E_ii q, what dk holds besides t, takes that of x. The sums of k x over the
    columns go to shared memory.
    """
    k, t, since = (cute.make_rmem_tensor((BLOCK,), cutlass.Float32) for _ in range(3))
    key_sums = []
    before = cutlass.Float32(0.0)
    for i in range(BLOCK):
        row = owner.row(i)
        q, k[i], t[i], dq, x = (owner.read(tile, i) for tile in (smem.q, smem.k, smem.t, smem.dq, smem.x))
        beta_k = smem.beta[row] * k[i]
        e_row, dl_row = _row_before(smem.e_diagonal, row, i + 1), _row_before(smem.dl_diagonal, row, i)
        inside = owner.read(smem.inside, i)
        decay, before = chunks.exp2(inside - before), inside
        for j in range(i):
            since[j] = since[j] * decay if j < i - 1 else decay
            decayed = k[j] * since[j]
            dq = dq + e_row[j] * decayed
            x = x + dl_row[j] * decayed
            t[j] = t[j] + (e_row[j] * q + dl_row[j] * beta_k) * since[j]
        key_sums.append(k[i] * x)
        owner.write(smem.dq, i, q * dq + beta_k * x)
        owner.write(smem.x, i, smem.beta[row] * x + e_row[i] * q)
        owner.write(dq_tile, i, dq + e_row[i] * k[i])
    smem.key_row_sums[owner.row(0) + cute.arch.lane_idx() // 2, warp.group] = _sum_over_lanes(key_sums)
    return k, t


def finish(config: LocalConfig, gmem: Gmem, smem: Smem, task: Task, warp: Warp, owner: Owner, parts: Fragments) -> None:
    """B3 + B4 + B6 put together; writes dq, dk, dg and dbeta."""
    stage_fragments(smem, warp, parts)
    # Results replace what their thread alone reads, and has read: dq and dk the rows of q and k, or as shares in fp32
    # those of t and x; dg what is summed up to it in dq's stage tile.
    dq_tile, dk_tile = (smem.t, smem.x) if config.partial else (smem.q, smem.k)
    k, t = diagonal_block(smem, warp, owner, dq_tile)
    d_gate = cute.make_rmem_tensor((BLOCK,), cutlass.Float32)
    extra = _last_row_terms(smem, owner)
    for r in range(BLOCK):
        # On the last valid row t holds nothing but its own k dks, which cancels against the sum in `extra`.
        is_last = owner.row(r) == task.chunk.rows - 1
        own = chunks.select(is_last, 0.0, t[r])
        d_gate[r] = owner.read(smem.dq, r) - k[r] * own + chunks.select(is_last, extra, 0.0)
        owner.write(dk_tile, r, t[r] + owner.read(smem.x, r))
    _reverse_sum(smem, owner, d_gate)
    for r in range(BLOCK):
        owner.write(smem.dq, r, d_gate[r])
    cute.arch.sync_threads()
    head = task.value_head if config.partial else task.head
    for tile, tensor, row_head in (
        (dq_tile, gmem.dq, head),
        (dk_tile, gmem.dk, head),
        (smem.dq, gmem.dg, task.value_head),
    ):
        chunks.store_rows(tile, chunks.chunk_rows(tensor, task.chunk, row_head), task.chunk.rows, config.threads)
    write_beta(config, gmem, smem, task)


def _last_row_terms(smem: Smem, owner: Owner) -> cutlass.Float32:
    """B3's terms of dG on the last valid row: 2^G_last sum_v(S dS) + sum_t(k dks)."""
    total = chunks.exp2(smem.gate[CHUNK - 1, owner.column]) * smem.state_sums[owner.column]
    for block in range(CHUNK // BLOCK):
        total = total + smem.key_sums[block, owner.column]
    return total


def _reverse_sum(smem: Smem, owner: Owner, d_gate: cute.Tensor) -> None:
    """B6 in place: sums of dG over the rows from each one to the chunk's last."""
    for r in range(BLOCK - 2, -1, -1):
        d_gate[r] = d_gate[r] + d_gate[r + 1]
    # A block's sum goes where only this thread has read: the gates summed in the block's first row.
    owner.write(smem.inside, 0, d_gate[0])
    cute.arch.sync_threads()
    later = cutlass.Float32(0.0)
    for block in range(CHUNK // BLOCK - 1, 0, -1):
        later = later + chunks.select(block > owner.block, smem.inside[block * BLOCK, owner.column], 0.0)
    for r in range(BLOCK):
        d_gate[r] = d_gate[r] + later


@cute.jit
def write_beta(config: cutlass.Constexpr, gmem: Gmem, smem: Smem, task: Task) -> None:
    """dbeta of each valid row from both sums by row. The barrier of `_reverse_sum` lies between them and their
    writers."""
    row = cute.arch.thread_idx()[0]
    if row < task.chunk.rows:
        total = cutlass.Float32(0.0)
        for group in cutlass.range_constexpr(config.groups):
            total = total + smem.value_row_sums[row, group] + smem.key_row_sums[row, group]
        target = chunks.chunk_column(gmem.dbeta, task.chunk, task.value_head)
        target[row] = total.to(gmem.dbeta.element_type)


@cute.jit
def write_zeros(config: cutlass.Constexpr, gmem: Gmem, task: Task) -> None:
    """Zero gradients for the -rows tokens of a stretch outside all sequences."""
    thread = cute.arch.thread_idx()[0]
    head = task.value_head if config.partial else task.head
    for row in cutlass.range(-task.chunk.rows, unroll=1):
        for tensor, column in (
            (gmem.dq, head),
            (gmem.dk, head),
            (gmem.dg, task.value_head),
            (gmem.dv, task.value_head),
        ):
            target = chunks.chunk_rows(tensor, task.chunk, column)
            for step in cutlass.range_constexpr((tensor.shape[3] + config.threads - 1) // config.threads):
                spot = step * config.threads + thread
                if spot < tensor.shape[3]:
                    target[row, spot] = tensor.element_type(0.0)
        if thread == 0:
            chunks.chunk_column(gmem.dbeta, task.chunk, task.value_head)[row] = gmem.dbeta.element_type(0.0)
