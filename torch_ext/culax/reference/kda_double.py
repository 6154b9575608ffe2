"""Second derivative of Kimi Delta Attention: the vector-Jacobian product of the chunked backward."""

import torch
from torch import Tensor

from .kda_chunked import backward


def double_backward(
    gdq: Tensor | None,
    gdk: Tensor | None,
    gdv: Tensor | None,
    gdg: Tensor | None,
    gdbeta: Tensor | None,
    gdinitial_state: Tensor | None,
    do: Tensor | None,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor | None, ...]:
    """Gradients of `kda_chunked.backward`, with Aqk and Akk recomputed, by autograd through it.

    Args:
        gdq .. gdinitial_state: gradients of backward's outputs, each of its output's shape and dtype; None is zero.
        The rest: as in `kda_chunked.backward`.

    Returns:
        (gdo, gdht, gq, gk, gv, gg, gbeta, ginitial_state), each of its input's shape and dtype, None where it is None.
    """
    with torch.enable_grad():
        leaves = [
            None if x is None else x.detach().requires_grad_() for x in (do, dht, q, k, v, g, beta, initial_state)
        ]
        do_, dht_, q_, k_, v_, g_, beta_, state_ = leaves
        assert q_ is not None and k_ is not None and v_ is not None and g_ is not None and beta_ is not None
        outputs = backward(do_, dht_, q_, k_, v_, g_, beta_, None, None, state_, cu_seqlens, scale)
        wanted = [
            (y, gy)
            for y, gy in zip(outputs, (gdq, gdk, gdv, gdg, gdbeta, gdinitial_state), strict=True)
            if gy is not None and y.requires_grad
        ]
        present = [x for x in leaves if x is not None]
        if wanted:
            ys, gys = zip(*wanted, strict=True)
            grads = iter(torch.autograd.grad(ys, present, gys, materialize_grads=True))
        else:
            grads = iter([torch.zeros_like(x) for x in present])
    return tuple(None if x is None else next(grads) for x in leaves)
