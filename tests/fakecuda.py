"""Tensors that claim to lie on a CUDA device, so that a compiled kernel's argument checks run without one.

A call whose arguments pass ends in a CUDA driver error on such a machine, after the checks and before any launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

_CUDA = 2  # kDLCUDA
# DLPack type codes and bits.
_DTYPES = {
    torch.float64: (2, 64),
    torch.float32: (2, 32),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int64: (0, 64),
    torch.int32: (0, 32),
    torch.uint8: (1, 8),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e5m2: (12, 8),
    torch.float8_e8m0fnu: (14, 8),
}


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _DType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _DELETER))
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_alive: list[Any] = []  # what the consumers' capsules point to; never freed, a test's worth of it is small


@_DELETER
def _keep(_: Any) -> None:
    return


class _Exporter:
    def __init__(self, tensor: _Tensor) -> None:
        self._managed = _Managed(tensor, None, _keep)
        _alive.append(self._managed)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self._managed.tensor.device.index

    def __dlpack__(self, **_: Any) -> Any:
        return _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)


def fake_cuda(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    strides: Sequence[int] | None = None,
    address: int = 1 << 20,
    device: int = 0,
) -> Any:
    """Return a tvm-ffi tensor of `shape`, `dtype` and `strides` (elements; default contiguous) at a made-up address."""
    import tvm_ffi

    if strides is None:
        strides = torch.empty(tuple(shape), device="meta").stride()
    code, bits = _DTYPES[dtype]
    array = ctypes.c_int64 * len(shape)
    extents, steps = array(*shape), array(*strides)
    _alive.append((extents, steps))
    return tvm_ffi.from_dlpack(
        _Exporter(_Tensor(address, _Device(_CUDA, device), len(shape), _DType(code, bits, 1), extents, steps, 0))
    )
