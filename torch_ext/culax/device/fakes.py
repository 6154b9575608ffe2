"""Stand-ins for the tensors that kernels are compiled for: what each argument may be."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor


def rows(dtype: type[cutlass.Numeric], width: int) -> cute.Tensor:
    """[B, T, heads, width], last dimension contiguous, the other strides multiples of 16 bytes, 64-bit."""
    step = 128 // dtype.width
    strides = tuple(cute.sym_int64(divisibility=step) for _ in range(3))
    shape = tuple(cute.sym_int32() for _ in range(3))
    return make_fake_tensor(dtype, (*shape, width), stride=(*strides, 1), assumed_align=16)


def column(dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """[B, T, heads] of any strides, 64-bit."""
    strides = tuple(cute.sym_int64() for _ in range(3))
    return make_fake_tensor(dtype, tuple(cute.sym_int32() for _ in range(3)), stride=strides)


def image(rows: int, columns: int) -> cute.Tensor:
    """bf16 [chunks, heads, rows * columns], each entry the image (images.py) of a tile, offsets of 64 bits."""
    size = rows * columns
    shape = (cute.sym_int32(), cute.sym_int32(), size)
    stride = (cute.sym_int64(divisibility=size), size, 1)
    return make_fake_tensor(cutlass.BFloat16, shape, stride=stride, assumed_align=16)


def compact(*tail: int) -> cute.Tensor:
    """Contiguous fp32 [chunks, sequences or rows, heads, *tail] with offsets of 64 bits."""
    shape = (cute.sym_int32(), cute.sym_int32(), *tail)
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(cutlass.Float32, shape, stride_order=order, assumed_align=16)


def table() -> cute.Tensor:
    """The chunk table, int32 [NT, 4]."""
    return make_fake_compact_tensor(cutlass.Int32, (cute.sym_int32(), 4), stride_order=(1, 0), assumed_align=16)


def stream() -> object:
    """Torch's current stream at the time of the call."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)


def vector(dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """A contiguous vector: cu_seqlens, or bounds, the first chunk of every sequence and the end of the last, int32 [N +
    1]."""
    return make_fake_compact_tensor(dtype, (cute.sym_int32(),))


def buffer() -> cute.Tensor:
    """A workspace in 2-byte elements, [size] with 64 bits."""
    return make_fake_tensor(cutlass.BFloat16, (cute.sym_int64(),), stride=(1,), assumed_align=16)
