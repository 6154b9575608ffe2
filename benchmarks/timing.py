"""Meters: time eager, inside a CUDA graph, and of kernels summed; CPU time and memory of a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch

from benchmarks.case import Call

Bound = Mapping[str, Sequence[Call]]
"""The calls of each implementation, one an input set."""

MODES = ("eager", "graph", "kernels", "overhead", "memory")


def in_turn(names: Iterable[str]) -> Iterator[str]:
    """Names one after the other, without end; each round begins one name later, so that nobody always comes first."""
    order = list(names)
    while order:
        yield from order
        order.append(order.pop(0))


def eager_ms(bound: Bound, device: str, warmups: int, repeats: int, budget_s: float) -> dict[str, list[float]]:
    """Wall time in ms of `repeats` calls of each implementation in turn, from an idle device to its last kernel.

    Every call takes another input set than the call before it, whoever made that: its operands must come from memory,
    not from the cache. Fewer rounds are made, but always one, when they would take longer than `budget_s` seconds.
    """
    started = time.perf_counter()
    for i in range(warmups):
        if time.perf_counter() - started > budget_s / 4:
            break
        for calls in bound.values():
            calls[i % len(calls)]()
    times: dict[str, list[float]] = {name: [] for name in bound}
    started = time.perf_counter()
    for i, name in enumerate(islice(in_turn(bound), repeats * len(bound))):
        if i >= len(bound) and time.perf_counter() - started > budget_s:
            break
        calls = bound[name]
        times[name].append(_timed(calls[i % len(calls)], device))
    return times


def graph_ms(bound: Bound, warmups: int, repeats: int) -> dict[str, list[float]]:
    """Time in ms per call of CUDA graphs that hold every call of an implementation once, replayed in turn."""
    graphs = {name: _captured(calls) for name, calls in bound.items()}
    times: dict[str, list[float]] = {name: [] for name in bound}
    for i, name in enumerate(islice(in_turn(bound), (warmups + repeats) * len(bound))):
        ms = _timed(graphs[name][0].replay, "cuda") / len(bound[name])
        if i >= warmups * len(bound):
            times[name].append(ms)
    return times


def _captured(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, list[object]]:
    """A graph of all calls, and the outputs that keep its memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs: list[object] = [call() for call in calls]
    return graph, outputs


def kernels_ms(calls: Sequence[Call], warmups: int) -> float:
    """Time in ms that the kernels of one call take, summed from a profile over all calls."""
    from torch.profiler import ProfilerActivity, profile

    for i in range(warmups):
        calls[i % len(calls)]()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for call in calls:
            call()
        torch.cuda.synchronize()
    total_us = sum(event.self_device_time_total for event in profiled.key_averages())
    return total_us / 1e3 / len(calls)


def overhead_us(calls: Sequence[Call], device: str, repeats: int) -> tuple[float, float]:
    """Time in us of one eager call on the host, the device running behind: (wall, CPU time of this thread).

    The device is waited for between batches of ten only. On a host that runs other work as well, wall time counts what
    that takes; the thread's own time does not, but for caches and clocks that they share.
    """
    return _batched_us(calls, device, repeats)


def allocation_us(calls: Sequence[Call], device: str, repeats: int) -> tuple[float, float]:
    """The part of it that torch takes to allocate a call's outputs: the same number of `torch.empty`."""
    shapes = [(x.shape, x.dtype, x.device) for x in calls[0]().values()]

    def allocate() -> object:
        return [torch.empty(shape, dtype=dtype, device=where) for shape, dtype, where in shapes]

    return _batched_us([allocate], device, repeats)


def _batched_us(calls: Sequence[Callable[[], object]], device: str, repeats: int) -> tuple[float, float]:
    for call in calls:
        call()
    walls, own = [], []
    for _ in range(max(3, repeats)):
        _synchronize(device)
        start, start_own = time.perf_counter_ns(), time.thread_time_ns()
        for i in range(10):
            calls[i % len(calls)]()
        own.append((time.thread_time_ns() - start_own) / 1e4)
        walls.append((time.perf_counter_ns() - start) / 1e4)
    return statistics.median(walls), statistics.median(own)


def peak_mib(calls: Sequence[Call]) -> float:
    """Device memory in MiB that a call takes beyond what was allocated before it, at its highest; outputs count."""
    peaks = []
    for call in calls:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_allocated() - before) / 2**20)
    return statistics.median(peaks)


def _timed(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
