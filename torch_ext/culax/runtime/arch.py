"""From a torch device to the architecture name that kernels are compiled for."""

from __future__ import annotations

from functools import cache

import torch

_ARCH_OF_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
ARCHS = tuple(_ARCH_OF_CAPABILITY.values())


@cache
def _arch_of_index(index: int) -> str | None:
    return _ARCH_OF_CAPABILITY.get(torch.cuda.get_device_capability(index))


def arch_of(device: torch.device) -> str | None:
    """Return ``"sm_90a"``, ``"sm_100a"`` or ``"sm_103a"`` for a CUDA device kernels can be built for, else None.

    Architecture-specific code runs only on the compute capability it was compiled for, so the match is exact.
    """
    if device.type != "cuda":
        return None
    return _arch_of_index(torch.cuda.current_device() if device.index is None else device.index)
