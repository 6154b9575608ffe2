"""Capturing calls in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def capture(call: Callable[[], T], pool: object = None, warm: bool = True) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of one call, and what the call returned; warm: call once before, on another stream."""
    if warm:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outputs = call()
    return graph, outputs
