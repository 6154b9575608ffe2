"""Calls of a known signature: one look at shapes, strides, dtypes and devices settles what runs them.

What is left for each call is in `ready.py` of the ops' packages: addresses, and which device is current.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import dispatch

Ready = dict[tuple, Callable[..., Any]]
"""What runs the calls of a signature: None or False where it did not, and the general path takes the call."""

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""torch.cuda.current_device() without asking whether CUDA is initialised: there are tensors on a device."""

_empty_strided_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
"""What code compiled by Inductor allocates with: torch.empty_strided on the current device, past the dispatcher."""


def never(*_: Any) -> None:
    """What runs the calls of an unknown signature, or of one that always needs the general path: nothing."""


def remember(ready: Ready, key: tuple, bind: Callable[..., Callable[..., Any]], *arguments: Any) -> None:
    """Keep what runs the calls of a signature, made by `bind` from the arguments of one of them."""
    if key not in ready:
        if len(ready) >= dispatch.REMEMBERED:
            ready.clear()
        ready[key] = bind(*arguments)


def allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """A function of (shape, strides, dtype) that makes a tensor on `device`, which is current when it is called."""
    if device.type == "cuda" and _empty_strided_cuda is not None:
        return _empty_strided_cuda
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)
