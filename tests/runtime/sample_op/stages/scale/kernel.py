"""y = s * x + shift over a 1-D fp32 tensor."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from sample_op.device.math import scaled
from sample_op.stages.scale.config import Config


@cute.kernel
def _scale_kernel(x: cute.Tensor, y: cute.Tensor, s: cutlass.Float32, config: cutlass.Constexpr):
    i = cute.arch.block_idx()[0] * config.threads + cute.arch.thread_idx()[0]
    if i < x.shape[0]:
        y[i] = scaled(x[i], s) + config.shift


class Scale:
    """The launch, for one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, s: cutlass.Float32, stream):
        n = x.shape[0]
        threads = self.config.threads
        if n > 0:
            _scale_kernel(x, y, s, self.config).launch(
                grid=(cute.ceil_div(n, threads), 1, 1), block=(threads, 1, 1), stream=stream
            )


def entry(config: Config):
    """Function to compile and its fake arguments: x, y fp32 of one length, s."""
    length = cute.sym_int()
    x, y = (make_fake_compact_tensor(cutlass.Float32, (length,), assumed_align=16) for _ in range(2))
    return Scale(config), (x, y, cutlass.Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True))
