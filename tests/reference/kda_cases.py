"""Inputs, the truth (autograd of the token recurrence in fp64) and bounds per head and per chunk for the KDA tests."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from culax.reference import kda_chunked
from culax.reference.kda_recurrence import kda_recurrence

NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
GATES = {
    "soft": lambda x: -0.1 * x.abs(),
    "logsigmoid": torch.nn.functional.logsigmoid,
    "zero": torch.zeros_like,
    "-0.02": lambda x: torch.full_like(x, -0.02),
    "-5": lambda x: torch.full_like(x, -5.0),
    "-20": lambda x: torch.full_like(x, -20.0),
    "-1000": lambda x: torch.full_like(x, -1000.0),
    "mixed": lambda x: x.new_tensor([0.0, -0.01, -0.3, -5.0, -20.0, -1000.0])[(x.abs() * 1e3).long() % 6],
    "cliff": lambda x: torch.where(torch.arange(x.shape[1])[:, None, None] % 40 == 7, -1e5, -0.01).expand_as(x).to(x),
}


@dataclass(frozen=True)
class Case:
    """Sizes of a call; ``ends`` holds the packed sequences' offsets, or is None for ``batch`` sequences."""

    tokens: int = 130
    ends: tuple[int, ...] | None = None
    batch: int = 1
    heads: int = 1
    value_heads: int = 2
    key_dim: int = 8
    value_dim: int = 6

    @property
    def sequences(self) -> int:
        return self.batch if self.ends is None else len(self.ends) - 1


@dataclass(frozen=True)
class Inputs:
    do: Tensor | None
    dht: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    scale: float = 0.3

    @property
    def forward(self) -> tuple:
        return self.q, self.k, self.v, self.g, self.beta, self.initial_state, self.cu_seqlens, self.scale

    def map(self, change) -> "Inputs":
        """These inputs with ``change`` applied to every floating tensor."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        floating = {n: x for n, x in tensors.items() if isinstance(x, Tensor) and n != "cu_seqlens"}
        return replace(self, **{n: change(x) for n, x in floating.items()})


def make(case: Case, gate: str = "logsigmoid", dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    """Random inputs with unit keys. For half types q, k, v, do are rounded to it and everything else is fp32."""
    c, random = case, torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    keys, rows = (c.batch, c.tokens, c.heads, c.key_dim), (c.batch, c.tokens, c.value_heads)
    state = (c.sequences, c.value_heads, c.key_dim, c.value_dim)
    return Inputs(
        do=normal(*rows, c.value_dim).to(dtype),
        dht=normal(*state).to(wide),
        q=torch.nn.functional.normalize(normal(*keys), dim=-1).to(dtype),
        k=torch.nn.functional.normalize(normal(*keys), dim=-1).to(dtype),
        v=normal(*rows, c.value_dim).to(dtype),
        g=GATES[gate](normal(*rows, c.key_dim)).to(wide),
        beta=normal(*rows).sigmoid().to(wide),
        initial_state=normal(*state).to(wide),
        cu_seqlens=None if c.ends is None else torch.tensor(c.ends),
    )


def truth(x: Inputs) -> dict[str, Tensor]:
    """Outputs and gradients of the token recurrence in fp64, by autograd."""
    leaves = [None if y is None else y.detach().double().requires_grad_() for y in x.forward[:6]]
    o, final_state = kda_recurrence(*leaves, x.cu_seqlens, x.scale)
    # The sums of nothing keep both outputs in the graph where no token reads an input.
    tie = sum(y.sum() for y in leaves if y is not None) * 0
    heads = [(y + tie, dy.double()) for y, dy in ((o, x.do), (final_state, x.dht)) if dy is not None]
    present = [y for y in leaves if y is not None]
    if heads:
        outputs, given = zip(*heads)
        grads = torch.autograd.grad(outputs, present, given, materialize_grads=True, allow_unused=True)
    else:
        grads = [torch.zeros_like(y) for y in present]
    results = [o.detach(), final_state.detach(), *grads]
    if x.initial_state is None:
        results.append(final_state.new_zeros(0, *final_state.shape[1:]))
    return dict(zip(NAMES, results, strict=True))


def chunked(x: Inputs, recompute: bool = False) -> dict[str, Tensor]:
    """Outputs and gradients of the chunked path; with ``recompute`` its backward gets no Aqk and Akk."""
    o, final_state, Aqk, Akk = kda_chunked.forward(*x.forward, True)
    saved = (None, None) if recompute else (Aqk, Akk)
    grads = kda_chunked.backward(x.do, x.dht, *x.forward[:5], *saved, *x.forward[5:])
    return dict(zip(NAMES, (o, final_state, *grads), strict=True))


def groups(name: str, x: Tensor) -> Tensor:
    """[groups, elements]: a head and 64 tokens each; a state per sequence and head."""
    x = x.double()
    if name in ("final_state", "dinitial_state"):
        return x.flatten(2).flatten(0, 1)
    x = x.reshape(*x.shape[:3], -1)
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % 64))
    return x.unflatten(1, (-1, 64)).transpose(2, 3).flatten(3).flatten(0, 2)


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """For each output the largest relative Frobenius error of a group (infinite where got is not finite).

    A group's scale is its own norm, but at least 1e-4 of the largest group's: a group whose every term has decayed away
    is measured against its neighbours.
    """
    worst = {}
    for name, y in want.items():
        assert got[name].shape == y.shape, f"{name}: {tuple(got[name].shape)}, expected {tuple(y.shape)}"
        if y.numel() == 0:
            continue
        difference, norm = groups(name, got[name].double() - y).norm(dim=1), groups(name, y).norm(dim=1)
        bound = norm.clamp(min=max(float(norm.max()) * 1e-4, 1e-280))
        worst[name] = float((difference / bound).nan_to_num(nan=float("inf")).max())
    return worst


def assert_right(x: Inputs, bound: float | dict[str, float] = 1e-12, **how) -> None:
    """Every output and gradient of the chunked path is within ``bound`` of the truth, per head and per chunk."""
    assert_within(errors(chunked(x, **how), truth(x)), bound)


def assert_within(worst: dict[str, float], bound: float | dict[str, float]) -> None:
    limits = bound if isinstance(bound, dict) else dict.fromkeys(worst, bound)
    beyond = {name: f"{e:.1e} > {limits[name]:.1e}" for name, e in worst.items() if not e <= limits[name]}
    assert not beyond, f"errors beyond their bounds: {beyond}"
