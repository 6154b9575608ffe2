"""What the plans of all kernels share: dtypes and their names, the limits of the common schedule, the last words of a
variant's name."""

from __future__ import annotations

import torch

from culax.grouped_wgrad.problem import WgradProblem
from culax.grouped_wgrad.stages.gemm.config import MAX_EXPERTS, MAX_TOKENS

OUTPUTS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.float4_e2m1fn_x2: "e2m1"}
"""Block-scaled operands."""
MX_PAIRS = tuple((a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2"))
NV_PAIR = ("e2m1", "e2m1")
STORES = (*((dtype, False) for dtype in OUTPUTS.values()), ("float32", True))
"""Output dtypes, each with whether the kernel adds to what is there."""


def epilogue_columns(out_dtype: str) -> int:
    """Columns of a chunk that the epilogue stores at once; grouped_wgrad/README.md has the measurements."""
    return 16 if out_dtype == "float32" else 32


def too_large(problem: WgradProblem) -> str:
    """Why the kernels' schedule cannot count a problem's experts or tokens; empty if it can."""
    if problem.experts > MAX_EXPERTS:
        return f"{problem.experts} experts: the kernel keeps the offsets of at most {MAX_EXPERTS} in shared memory"
    if problem.tokens >= MAX_TOKENS:
        return f"{problem.tokens} tokens: the kernel counts fewer than {MAX_TOKENS}"
    return ""


def last_words(discrete: bool, accumulate: bool, *faults: str) -> list[str]:
    """The end of a variant's name: how it stores, and what only tests build."""
    return ["list"] * discrete + ["add"] * accumulate + [fault for fault in faults if fault]
