"""The local kernel's work by columns: operands of the off-diagonal blocks, the diagonal blocks, the last sums and the
outputs.

A lane owns the pair of key columns 2 p, 2 p + 1 in the 16 rows of its warp's block (device/gates.py); a block's columns
and the same block of the fragments belong to the same warp.
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
    """This thread's block of rows, pair of columns, gates summed within the block [16, 2], and G before the block
    [2]."""

    block: cutlass.Int32
    pair: cutlass.Int32
    inside: cute.Tensor
    before: cute.Tensor


def _pair(tile: cute.Tensor, row: cutlass.Int32, pair: cutlass.Int32) -> cute.Tensor:
    return cute.local_tile(tile, (1, 2), (row, pair))


def _write_pair(tile: cute.Tensor, row: cutlass.Int32, pair: cutlass.Int32, values: list[cutlass.Float32]) -> None:
    rounded = cute.make_rmem_tensor((1, 2), tile.element_type)
    for c in range(2):
        rounded[0, c] = values[c].to(tile.element_type)
    cute.autovec_copy(rounded, _pair(tile, row, pair))


def _read_pair(tile: cute.Tensor, row: cutlass.Int32, pair: cutlass.Int32) -> list[cutlass.Float32]:
    raw = cute.make_rmem_tensor((1, 2), tile.element_type)
    cute.autovec_copy(_pair(tile, row, pair), raw)
    return [raw[0, c].to(cutlass.Float32) for c in range(2)]


def gate_and_keys(smem: Smem, owner: Owner) -> None:
    """G in fp32 and ke = k 2^G."""
    for r in range(BLOCK):
        row = owner.block * BLOCK + r
        gate = [owner.before[c] + owner.inside[r, c] for c in range(2)]
        k = _read_pair(smem.k, row, owner.pair)
        _write_pair(smem.gate, row, owner.pair, gate)
        _write_pair(smem.ke, row, owner.pair, [k[c] * chunks.exp2(gate[c]) for c in range(2)])


def block_operands(smem: Smem, owner: Owner) -> None:
    """The operands of the off-diagonal blocks: kd = k 2^(b_I - G), qd = q 2^(G - b_(I-1)), kbd = beta k 2^(G -
    b_(I-1))."""
    for r in range(BLOCK):
        row = owner.block * BLOCK + r
        q, k = _read_pair(smem.q, row, owner.pair), _read_pair(smem.k, row, owner.pair)
        down = [chunks.exp2(owner.inside[r, c]) for c in range(2)]
        up = [chunks.exp2(owner.inside[BLOCK - 1, c] - owner.inside[r, c]) for c in range(2)]
        _write_pair(smem.kd, row, owner.pair, [k[c] * up[c] for c in range(2)])
        _write_pair(smem.qd, row, owner.pair, [q[c] * down[c] for c in range(2)])
        _write_pair(smem.kbd, row, owner.pair, [smem.beta[row] * k[c] * down[c] for c in range(2)])


def stage_fragments(smem: Smem, warp: Warp, parts: Fragments) -> None:
    """The warp's [16, 64] fragments into its own part of the stage tiles, from where its lanes read columns."""
    for fragment, tile in ((parts.dq, smem.dq), (parts.x, smem.x), (parts.dks, smem.t)):
        warp_tiles.store_fragment(fragment, warp.keys(tile))
    cute.arch.sync_warp()


def diagonal_block(gmem: Gmem, smem: Smem, task: Task, warp: Warp, owner: Owner) -> tuple[cute.Tensor, cute.Tensor]:
    """B4 within the block, from row to row with exact decays, all at most 1; returns k and t [16, 2], t without i = j.

    dq is complete, and leaves, at its row. In the stage tiles q dq + beta k x takes dq's place (i = j left out, as it
    cancels in dG), and beta x + E_ii q, what dk holds besides t, takes that of x. The sums of k x over the columns go
    to shared memory.
    """
    k, t, since = (cute.make_rmem_tensor((BLOCK, 2), cutlass.Float32) for _ in range(3))
    dq_rows = chunks.chunk_rows(gmem.dq, task.chunk, output_head(gmem, task))
    for i in range(BLOCK):
        row = owner.block * BLOCK + i
        q, k_row, t_row, dq, x = (
            _read_pair(tile, row, owner.pair) for tile in (smem.q, smem.k, smem.t, smem.dq, smem.x)
        )
        beta, on_diagonal = smem.beta[row], smem.e_diagonal[row, i]
        for c in range(2):
            k[i, c], t[i, c] = k_row[c], t_row[c]
        decay = [chunks.exp2(owner.inside[i, c] - owner.inside[i - 1, c]) if i else None for c in range(2)]
        for j in range(i):
            e, dl = smem.e_diagonal[row, j], smem.dl_diagonal[row, j]
            for c in range(2):
                since[j, c] = since[j, c] * decay[c] if j < i - 1 else decay[c]
                decayed = k[j, c] * since[j, c]
                dq[c] = dq[c] + e * decayed
                x[c] = x[c] + dl * decayed
                t[j, c] = t[j, c] + (e * q[c] + dl * beta * k_row[c]) * since[j, c]
        smem.key_row_sums[row, warp.group] = cute.arch.warp_reduction_sum(k_row[0] * x[0] + k_row[1] * x[1])
        _write_pair(smem.dq, row, owner.pair, [q[c] * dq[c] + beta * k_row[c] * x[c] for c in range(2)])
        _write_pair(smem.x, row, owner.pair, [beta * x[c] + on_diagonal * q[c] for c in range(2)])
        _write_valid(dq_rows, row, owner.pair, task.chunk.rows, [dq[c] + on_diagonal * k_row[c] for c in range(2)])
    return k, t


def finish(config: LocalConfig, gmem: Gmem, smem: Smem, task: Task, warp: Warp, owner: Owner, parts: Fragments) -> None:
    """B3 + B4 + B6 put together; writes dq, dk, dg and dbeta."""
    stage_fragments(smem, warp, parts)
    k, t = diagonal_block(gmem, smem, task, warp, owner)
    rows, last_row = task.chunk.rows, task.chunk.rows - 1
    dk_rows = chunks.chunk_rows(gmem.dk, task.chunk, output_head(gmem, task))
    d_gate = cute.make_rmem_tensor((BLOCK, 2), cutlass.Float32)
    extra = _last_row_terms(smem, owner)
    for r in range(BLOCK):
        row = owner.block * BLOCK + r
        gate_part, key_part = (_read_pair(tile, row, owner.pair) for tile in (smem.dq, smem.x))
        for c in range(2):
            # On the last valid row t holds nothing but its own k dks, which cancels against the sum in `extra`.
            own = chunks.select(row == last_row, 0.0, t[r, c])
            d_gate[r, c] = gate_part[c] - k[r, c] * own + chunks.select(row == last_row, extra[c], 0.0)
        _write_valid(dk_rows, row, owner.pair, rows, [t[r, c] + key_part[c] for c in range(2)])
    _reverse_sum(smem, owner, d_gate)
    dg_rows = chunks.chunk_rows(gmem.dg, task.chunk, task.value_head)
    for r in range(BLOCK):
        _write_valid(dg_rows, owner.block * BLOCK + r, owner.pair, rows, [d_gate[r, c] for c in range(2)])
    write_beta(config, gmem, smem, task)


def _last_row_terms(smem: Smem, owner: Owner) -> list[cutlass.Float32]:
    """B3's terms of dG on the last valid row: 2^G_last sum_v(S dS) + sum_t(k dks)."""
    column = 2 * owner.pair
    terms = []
    for c in range(2):
        total = chunks.exp2(smem.gate[CHUNK - 1, column + c]) * smem.state_sums[column + c]
        for block in range(CHUNK // BLOCK):
            total = total + smem.key_sums[block, column + c]
        terms.append(total)
    return terms


def _reverse_sum(smem: Smem, owner: Owner, d_gate: cute.Tensor) -> None:
    """B6 in place: sums of dG over the rows from each one to the chunk's last."""
    for r in range(BLOCK - 2, -1, -1):
        for c in range(2):
            d_gate[r, c] = d_gate[r, c] + d_gate[r + 1, c]
    _write_pair(smem.gate_sums, owner.block, owner.pair, [d_gate[0, c] for c in range(2)])
    cute.arch.sync_threads()
    for c in range(2):
        later = cutlass.Float32(0.0)
        for block in range(CHUNK // BLOCK - 1, 0, -1):
            later = later + chunks.select(block > owner.block, smem.gate_sums[block, 2 * owner.pair + c], 0.0)
        for r in range(BLOCK):
            d_gate[r, c] = d_gate[r, c] + later


@cute.jit
def _write_valid(
    tile: cute.Tensor, row: cutlass.Int32, pair: cutlass.Int32, valid: cutlass.Int32, values: list[cutlass.Float32]
) -> None:
    if row < valid:
        _write_pair(tile, row, pair, values)


def output_head(gmem: Gmem, task: Task) -> cutlass.Int32:
    """Where dq and dk go: the query head, or the value head's own share in fp32."""
    return task.head if gmem.dq.element_type is cutlass.BFloat16 else task.value_head


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
        target[row] = total


@cute.jit
def write_zeros(config: cutlass.Constexpr, gmem: Gmem, task: Task) -> None:
    """Zero gradients for the -rows tokens of a stretch outside all sequences."""
    thread = cute.arch.thread_idx()[0]
    head = output_head(gmem, task)
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
            chunks.chunk_column(gmem.dbeta, task.chunk, task.value_head)[row] = cutlass.Float32(0.0)
