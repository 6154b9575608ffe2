"""KDA problems for the tests on hardware: inputs, the truth of every stage in float64, and the measure of closeness."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from culax.kda import launch, plan
from culax.reference import kda_chunked
from culax.reference.kda_chunked import Chunks, Local, Prep, ReverseScan, Scan
from culax.reference.kda_layout import ChunkTable
from tests.gpu import kda_stages

DEVICE = "cuda"
CHUNK = 64
BF16 = torch.bfloat16
GATES = ("zero", "mild", "sigmoid", "strong", "five", "twenty")


@dataclass(frozen=True)
class Case:
    """Sizes of a call. offsets: cu_seqlens, or None for `batch` sequences of `tokens`."""

    batch: int
    tokens: int
    heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    gate: str = "sigmoid"
    states: bool = True
    offsets: tuple[int, ...] | None = None

    @property
    def sequences(self) -> int:
        """N."""
        return self.batch if self.offsets is None else len(self.offsets) - 1

    def chunks(self) -> list[list[int]]:
        """(sequence, batch, first token, rows) of every chunk that holds tokens."""
        if self.offsets is None:
            spans = [(n, n, 0, self.tokens) for n in range(self.batch)]
        else:
            spans = [(n, 0, a, b) for n, (a, b) in enumerate(zip(self.offsets, self.offsets[1:]))]
        return [[n, b, t, min(CHUNK, end - t)] for n, b, begin, end in spans for t in range(begin, end, CHUNK)]

    def plan(self) -> plan.Plan:
        """The kernels for the case."""
        offsets = "" if self.offsets is None else "int64"
        return plan.plan_for("sm_90a", self.key_dim, self.value_dim, offsets, self.value_heads > self.heads)

    def kernels(self) -> kda_stages.Kernels:
        """Their callables."""
        return kda_stages.kernels(self.plan())


def gates(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Log-decays from none at all to e^-20 a token."""
    x = torch.randn(shape, device=generator.device, generator=generator)
    return {
        "zero": torch.zeros_like(x),
        "mild": -0.1 * x.abs(),
        "sigmoid": torch.nn.functional.logsigmoid(x).clamp(min=-5),
        "strong": -5 * torch.rand(shape, device=generator.device, generator=generator),
        "five": torch.full_like(x, -5.0),
        "twenty": torch.full_like(x, -20.0),
    }[kind]


def call(case: Case, seed: int = 0, device: str = DEVICE) -> list:
    """kda_bwd's arguments in schema order: normalised q and k, saved Aqk and Akk from the float64 forward."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    rows = (case.batch, case.tokens)
    q, k = (torch.nn.functional.normalize(normal(*rows, case.heads, case.key_dim), dim=-1).to(BF16) for _ in range(2))
    v, do = (normal(*rows, case.value_heads, case.value_dim).to(BF16) for _ in range(2))
    g = gates(case.gate, (*rows, case.value_heads, case.key_dim), generator)
    beta = torch.rand(*rows, case.value_heads, device=device, generator=generator) * 0.5 + 0.5
    h0 = dht = None
    if case.states:
        h0, dht = (normal(case.sequences, case.value_heads, case.key_dim, case.value_dim) for _ in range(2))
    cu_seqlens = None if case.offsets is None else torch.tensor(case.offsets, device=device)
    x, table = kda_chunked.chunk_inputs(*(y.double() for y in (q, k, v, g, beta)), cu_seqlens)
    scale = case.key_dim**-0.5
    saved = kda_chunked.prep(x, scale)
    aqk, akk = (table.scatter(y, BF16) for y in (saved.Aqk, saved.P))
    return [do, dht, q, k, v, g, beta, aqk, akk, h0, cu_seqlens, scale]


def double(arguments: list) -> list:
    """The arguments in float64."""
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]


@dataclass(frozen=True)
class Truth:
    """Every stage in float64 from what the stage before it leaves in memory: tapes are rounded to bf16 in between.

    `given` holds the rounded tapes under the kernels' names (kda_stages.Tapes).
    """

    case: Case
    x: Chunks
    table: ChunkTable
    prep: Prep
    scan: Scan
    reverse_scan: ReverseScan
    local: Local
    given: dict[str, Tensor]


def truth(case: Case, arguments: list) -> Truth:
    """Run the reference's stages on a call."""
    do, dht, q, k, v, g, beta, aqk, akk, h0, cu_seqlens, scale = double(arguments)
    x, table = kda_chunked.chunk_inputs(q, k, v, g, beta, cu_seqlens)
    gather = [table.gather(y, case.value_heads, torch.float64) for y in (aqk, akk, do)]
    prep = kda_chunked.prep(x, scale, *gather[:2])
    tapes = {"minus_w": -prep.W, "u": prep.U, "qg": scale * prep.qg, "kg": prep.kg}
    given = {name: y.to(BF16) for name, y in tapes.items()} | {"decay": prep.exp_last[..., 0].float()}
    w, u, qg, kg = (given[name].double() for name in tapes)
    seen = replace(prep, W=-w, U=u, qg=qg / scale, kg=kg)
    start, end = (kda_chunked.boundary_state(y, k, v, cu_seqlens) for y in (h0, dht))
    scan = kda_chunked.scan(seen, start, table)
    reverse_scan = kda_chunked.reverse_scan(seen, gather[2], end, table, scale)
    given |= {name: getattr(scan, name).to(BF16) for name in ("h", "v_new")}
    given |= {name: getattr(reverse_scan, name).to(BF16) for name in ("dh", "dvn")}
    local = kda_chunked.local(
        x,
        prep,
        replace(scan, h=given["h"].double(), v_new=given["v_new"].double()),
        replace(reverse_scan, dh=given["dh"].double(), dvn=given["dvn"].double()),
        gather[2],
        scale,
    )
    return Truth(case, x, table, prep, scan, reverse_scan, local, given)


def to_image(tiles: Tensor) -> Tensor:
    """Tape entries [..., R * D] in the format of device/images.py from tiles [..., R, D]."""
    rows, columns = tiles.shape[-2:]
    vectors = tiles.reshape(*tiles.shape[:-2], rows, columns // 64, 8, 8).movedim(-3, -4)
    row = torch.arange(rows, device=tiles.device)[:, None]
    return vectors[..., row, torch.arange(8, device=tiles.device) ^ (row % 8), :].flatten(-4)


def from_image(entries: Tensor, rows: int, columns: int) -> Tensor:
    """Tiles [..., R, D] of tape entries [..., R * D]."""
    vectors = entries.reshape(*entries.shape[:-1], columns // 64, rows, 8, 8)
    row = torch.arange(rows, device=entries.device)[:, None]
    straight = vectors[..., row, torch.arange(8, device=entries.device) ^ (row % 8), :]
    return straight.movedim(-4, -3).reshape(*entries.shape[:-1], rows, columns)


def poisoned_tapes(inputs: launch.Inputs) -> kda_stages.Tapes:
    """Workspaces full of NaN, padding included."""
    tapes = kda_stages.allocate(inputs)
    for field in fields(tapes):
        tape = getattr(tapes, field.name)
        whole = tape if tape._base is None else tape._base
        whole.fill_(float("nan") if whole.is_floating_point() else -7)
    return tapes


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An output full of NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def given_tapes(truth_: Truth, tapes: kda_stages.Tapes, names: tuple[str, ...]) -> None:
    """Fill some tapes with the truth's."""
    for name in names:
        tape, tiles = getattr(tapes, name), truth_.given[name]
        tape.copy_(tiles if name == "decay" else to_image(tiles))


def read_tape(tape: Tensor, like: Tensor) -> Tensor:
    """A tape's tiles [chunks, heads, R, D], of the shape of `like`."""
    return from_image(tape, *like.shape[-2:])


def assert_close(
    name: str, got: Tensor, want: Tensor, bound: float, tile_bound: float, scale: Tensor | None = None
) -> None:
    """Relative Frobenius error over everything, and over each tile (all but the first two dimensions).

    A tile's error is taken relative to its own norm, or to 3 % of the typical tile's if that is more. `scale` replaces
    the expected values as what errors are relative to (where these are sums that cancel).
    """
    assert got.shape == want.shape, name
    if not want.numel():
        return
    got, want = got.double(), want.double()
    scale = want if scale is None else scale.double()
    error = (got - want).norm() / scale.norm().clamp(min=1e-30)
    assert error <= bound, f"{name}: error {error:.2e} over all, bound {bound:.1e}"
    errors, norms = ((y).flatten(0, 1).flatten(1).norm(dim=1) for y in (got - want, scale))
    typical = norms.square().mean().sqrt()
    relative = errors / torch.maximum(norms, 0.03 * typical).clamp(min=1e-30)
    worst = int(relative.nan_to_num(float("inf")).argmax())
    tile = divmod(worst, want.shape[1])
    assert relative[worst] <= tile_bound, f"{name}: error {relative[worst]:.2e} in tile {tile}, bound {tile_bound:.1e}"
