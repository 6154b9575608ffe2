"""Variants of the sample op."""

from culax.runtime.variants import Variant
from sample_op.stages.scale.config import Config


def variants(arch: str) -> tuple[Variant, ...]:
    """Two configurations for SM90."""
    if arch != "sm_90a":
        return ()
    return tuple(
        Variant("sample", arch, f"sample_scale_t{threads}", "sample_op.stages.scale.kernel:entry", Config(threads))
        for threads in (64, 128)
    )
