"""Calls of a known signature: one look at shapes, strides, dtypes and devices settles what runs them.

What is left for each call is in `ready.py` of the ops' packages: addresses, and which device is current.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
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

_TensorGuards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
"""What Dynamo guards compiled code with: type, dtype, device, dispatch keys, requires_grad, sizes, strides."""


def never(*_: Any) -> None:
    """What runs the calls of an unknown signature, or of one that always needs the general path: nothing."""


def may_run(index: int | None) -> bool:
    """Whether device `index` is current, and new memory may be left as it is (deterministic torch fills it)."""
    return current_device() == index and not torch.are_deterministic_algorithms_enabled()


def remember(
    ready: Ready, key: tuple, bind: Callable[..., Callable[..., Any]], *arguments: Any
) -> Callable[..., Any] | None:
    """Keep what runs the calls of a signature, made by `bind` from the arguments of one of them; None if it is kept."""
    if key in ready:
        return None
    call = bind(*arguments)
    dispatch.keep(ready, key, call)
    return call


class Recent:
    """Runs the calls of the last few signatures that were remembered, each told from a call's tensors by one C call.

    For ops of many tensors, whose signature takes longer to put together: 11 tensors 0.7 us instead of 6.
    """

    KEPT = 4

    def __init__(self) -> None:
        self._known: list[tuple] = []

    def __call__(self, arguments: tuple) -> Any:
        """What a signature's function returns for `arguments`; None where none is known. The last is a number."""
        for same, present, absent, number, call in self._known:
            if (
                number == arguments[-1]
                and same(*present(arguments))
                and all(arguments[position] is None for position in absent)
            ):
                return call(arguments)
        return None

    def remember(self, arguments: tuple, call: Callable[[tuple], Any]) -> None:
        """Keep `call` for the arguments' signature."""
        if _TensorGuards is None or call is never:
            return
        *others, number = arguments
        tensors = {position: value for position, value in enumerate(others) if value is not None}
        absent = [position for position, value in enumerate(others) if value is None]
        guards = _TensorGuards(
            *tensors.values(),
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors.values()],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors.values()],
        )
        self._known = [(guards.check, itemgetter(*tensors), absent, number, call), *self._known[: self.KEPT - 1]]


def allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """A function of (shape, strides, dtype) that makes a tensor on `device`, which is current when it is called."""
    if device.type == "cuda" and _empty_strided_cuda is not None:
        return _empty_strided_cuda
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)
