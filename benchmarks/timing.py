"""The time of work on a GPU, from replays of a captured graph."""

import statistics
from collections.abc import Callable
from typing import Any

import torch


def replay_seconds(work: Callable[[], Any], replays: int = 15) -> float:
    """Median seconds of one replay of a CUDA graph of `work()`, which is called once before to compile and allocate."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # In another mode the thread in which NCCL looks after earlier collectives would end the capture.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        kept = work()
    for _ in range(3):  # the clocks rise and the caches fill
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    del kept  # until here the graph writes to it
    return statistics.median(times)
