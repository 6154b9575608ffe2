"""Cases and bounds shared by the tests of the grouped products' reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
PATHS = ["by_expert", "by_chunk"]
EDGE_SIZES = [1, 7, 8, 63, 64, 65, 127, 129]
GROUPS = {
    "edges": EDGE_SIZES,
    "first_empty": [0, 40, 24],
    "middle_empty": [8, 8, 0, 16],
    "last_empty": [64, 65, 0],
    "all_empty": [0, 0, 0],
    "many_empty": [0, 0, 3, 0, 0, 0, 130, 0],
    "one": [100],
    "no_experts": [],
}


def ends_of(sizes: Sequence[int]) -> list[int]:
    return torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()


def offsets(ends: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(ends, dtype=dtype)


def ranges(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1]], ends))


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def wgrad_truth(a: Tensor, b: Tensor, ends: Sequence[int]) -> Tensor:
    """dW [E, M, N] in fp64 from a (M, T), b (T, N)."""
    a, b = a.to(torch.float64), b.to(torch.float64)
    parts = [a[:, start:end] @ b[start:end] for start, end in ranges(ends)]
    return torch.stack(parts) if parts else torch.zeros(0, a.shape[0], b.shape[1], dtype=torch.float64)


def assert_wgrad(
    got: Tensor, a: Tensor, b: Tensor, ends: Sequence[int], initial: Tensor | float = 0.0, scale: Tensor | float = 1.0
) -> None:
    """Every element of got within the rounding error of its own sum: k u |a| |b| for sums of k terms, one rounding.

    The bound is an element's own, so a small expert can't hide behind a large one's tolerance. initial: what got held
    before an accumulating call. scale: factors of the experts' sums, [E, 1, 1].
    """
    truth = wgrad_truth(a, b, ends) * scale + initial
    assert got.shape == truth.shape
    if not got.numel():
        return
    magnitude = wgrad_truth(a.abs(), b.abs(), ends) * scale
    terms = torch.tensor([end - start + 4 for start, end in ranges(ends)], dtype=torch.float64)[:, None, None]
    accumulator = unit_roundoff(torch.float64 if a.dtype is torch.float64 else torch.float32)
    out = torch.finfo(got.dtype)
    bound = 1.01 * (terms * accumulator * magnitude + unit_roundoff(got.dtype) * truth.abs())
    bound = bound + out.smallest_normal * out.eps
    if a.dtype is torch.float64:  # the truth is rounded like the result
        bound = 2 * bound
    error = (got.to(torch.float64) - truth).abs()
    wrong = ~(error <= bound)
    peak = truth.abs().amax((1, 2)).clamp(min=out.smallest_normal)
    worst = error.amax((1, 2)) / peak
    assert not wrong.any(), (
        f"experts {wrong.any(-1).any(-1).nonzero().flatten().tolist()}: error / peak |dW[e]| {worst}"
    )


def assert_mm(got: Tensor, x: Tensor, weight: Tensor, ends: Sequence[int]) -> None:
    """Rows of got within the rounding error of their own sums; rows past the last expert exactly zero."""
    last = ends[-1] if ends else 0
    assert got.shape == (x.shape[0], weight.shape[2]) and got.dtype == x.dtype and got.is_contiguous()
    assert torch.equal(got[last:], torch.zeros_like(got[last:]))
    accumulator = unit_roundoff(torch.float64 if x.dtype is torch.float64 else torch.float32)
    out = torch.finfo(got.dtype)
    for expert, (start, end) in enumerate(ranges(ends)):
        rows, matrix = x[start:end].to(torch.float64), weight[expert].to(torch.float64)
        truth, magnitude = rows @ matrix, rows.abs() @ matrix.abs()
        bound = (x.shape[1] + 4) * accumulator * magnitude + unit_roundoff(got.dtype) * truth.abs()
        bound = 2 * bound + out.smallest_normal * out.eps
        assert ((got[start:end].to(torch.float64) - truth).abs() <= bound).all(), f"expert {expert}"
