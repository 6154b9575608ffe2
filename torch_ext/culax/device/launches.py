"""Launch attributes that the compiler's `launch` takes but leaves out of kernels built ahead of time."""

from collections.abc import Iterator
from contextlib import contextmanager

import cutlass
from cutlass._mlir.dialects import cuda


@contextmanager
def most_shared_memory() -> Iterator[None]:
    """Launches traced inside ask for all shared memory an SM can have, so that two large CTAs fit.

    A wish, which takes the choice from the driver: the local kernel was measured as fast without it. The argument
    `preferred_smem_carveout` sets an attribute of the function, which only the just-in-time route does.
    """
    create = cuda.launch_cfg_create

    def with_carveout(*arguments, loc=None, ip=None, **named):
        config = create(*arguments, loc=loc, ip=ip, **named)
        cuda.launch_cfg_shared_mem_carveout(config, cutlass.Int32(100).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)
        return config

    cuda.launch_cfg_create = with_carveout
    try:
        yield
    finally:
        cuda.launch_cfg_create = create
