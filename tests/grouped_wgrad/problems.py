"""A problem that tests of the plans change."""

from __future__ import annotations

import torch

from culax.grouped_wgrad.problem import WgradProblem

M, N, T, E = 256, 512, 1024, 4
PLAIN = WgradProblem(
    m=M,
    n=N,
    tokens=T,
    experts=E,
    a_dtype=torch.bfloat16,
    b_dtype=torch.bfloat16,
    out_dtype=torch.bfloat16,
    a_strides=(1, M),
    b_strides=(N, 1),
    operand_layout="2d",
    scale_layout="",
    block=0,
    discrete=False,
    accumulate=False,
    device_type="cuda",
)
