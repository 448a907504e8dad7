"""Compiling and capturing the step (effect): one compiled function, and on a GPU one CUDA graph per bucket of sizes."""

import time
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fnllm.batch import Rows, StepInputs
from fnllm.cache import KVCache
from fnllm.rope import Rope
from fnllm.rows import send
from fnllm.step import StepOutput, StepSpec, step

# eager; eager in CUDA graphs (no compile time); compiled; compiled in CUDA graphs
COMPILE_MODES = ("none", "graphs", "inductor", "reduce-overhead")
TRACED_MODES = ("inductor", "reduce-overhead")


class Bucket(NamedTuple):
    """The sizes of one captured step. `tokens` None is a decode step."""

    entries: int
    tokens: int | None
    captured: int | None  # tokens whose activations leave the step
    max_context: int  # no sequence is longer

    @property
    def name(self) -> str:
        return f"decode of {self.entries}" if self.tokens is None else f"prefill of {self.tokens} tokens"


class HostInputs(NamedTuple):
    """A step's inputs as numpy arrays, padded to their bucket."""

    row: np.ndarray
    accept: np.ndarray
    cu_seqlens: np.ndarray
    token_ids: np.ndarray | None = None
    entry: np.ndarray | None = None
    captured: np.ndarray | None = None


def ladder(largest: int, smallest: int = 1) -> tuple[int, ...]:
    """Bucket sizes: every power of two to 16, then steps of a half octave's quarter, and always the largest itself.

    >>> ladder(20)
    (1, 2, 4, 8, 16, 20)
    """
    sizes, size = [], smallest
    while size < largest:
        sizes.append(size)
        size += size if size < 16 else max(8, 1 << (size.bit_length() - 3))
    return (*sizes, largest)


def round_up(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`; ValueError when none does."""
    for bucket in sizes:
        if size <= bucket:
            return bucket
    raise ValueError(f"a step of size {size} is larger than the largest bucket, {sizes[-1]}")


class Resident(NamedTuple):
    """The tensors a step works on, at fixed addresses while an engine lives."""

    cache: KVCache
    rows: Rows
    rope: Rope


def advance_in_place(
    tree: dict, resident: Resident, inputs: StepInputs, *, spec: StepSpec, max_seqlen: int, max_context: int
) -> StepOutput:
    """`step`, with the new rows written over the old ones: what is compiled and captured."""
    cache, rows, rope = resident
    moved, output = step(tree, cache, rows, inputs, rope, spec=spec, max_seqlen=max_seqlen, max_context=max_context)
    write_over(rows, moved)
    return output


def write_over(old: Any, new: Any) -> None:
    """Copy every changed leaf of a nested NamedTuple of tensors over the old one's storage."""
    if isinstance(old, Tensor):
        if new is not old:
            old.copy_(new)
    elif old is not None:
        for a, b in zip(old, new, strict=True):
            write_over(a, b)


@dataclass
class Captured:
    """A CUDA graph of one bucket with the tensors it reads and writes, and the parameters whose addresses it holds."""

    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    sent: HostInputs | None
    output: StepOutput
    tree: dict


class StepRunner:
    """Runs steps of one spec; builds what a bucket needs at its first use and says so through `report`."""

    def __init__(self, spec: StepSpec, resident: Resident, mode: str, report: Callable[[str], None]):
        self.spec, self.resident, self.mode, self.report = spec, resident, mode, report
        self.device = resident.rows.length.device
        self.graphs: dict[Bucket, Captured] = {}
        self.pool = torch.cuda.graph_pool_handle() if mode in ("graphs", "reduce-overhead") else None
        self.compiled: dict[tuple[bool, int], Callable[..., StepOutput]] = {}

    def __call__(self, tree: dict, host: HostInputs, *, max_context: int, capture: bool) -> StepOutput:
        """Run one step. With `capture` its bucket is replayed as a CUDA graph; its outputs last until the next step."""
        tokens, captured_tokens = (None if x is None else len(x) for x in (host.token_ids, host.captured))
        bucket = Bucket(len(host.row), tokens, captured_tokens, max_context)
        if not capture or self.mode not in ("graphs", "reduce-overhead"):
            inputs = StepInputs(*(None if x is None else self.upload(x) for x in host))
            if self.mode not in TRACED_MODES:
                return self.function(bucket)(tree, self.resident, inputs)
            made, began = graphs_traced(), time.perf_counter()
            output = self.function(bucket)(tree, self.resident, inputs)
            if graphs_traced() != made:
                self.report(f"compiled {bucket.name} in {time.perf_counter() - began:.1f} s")
            return output
        captured = self.graphs.get(bucket)
        if captured is None or not same_storage(captured.tree, tree):
            captured = self.graphs[bucket] = self.capture(tree, host, bucket)
        self.send(captured, host)
        captured.graph.replay()
        return captured.output

    def function(self, bucket: Bucket) -> Callable[..., StepOutput]:
        """The step as a function of (tree, resident, inputs): eager, or compiled once for all sizes but one entry."""
        kind = (bucket.entries == 1, bucket.max_context)  # torch.compile specialises on size one
        if kind not in self.compiled:

            def run(tree: dict, resident: Resident, inputs: StepInputs) -> StepOutput:
                longest = 1 if inputs.token_ids is None else inputs.token_ids.shape[0]
                return advance_in_place(
                    tree, resident, inputs, spec=self.spec, max_seqlen=longest, max_context=bucket.max_context
                )

            if self.mode in TRACED_MODES:
                # A code object of its own, since torch.compile counts recompilations by it. Sizes are dynamic where
                # `upload` marks them and nowhere else: torch would take those that differ from another model's for
                # changing ones, since it knows them by the line of code.
                own = types.FunctionType(run.__code__.replace(), run.__globals__, "step", None, run.__closure__)
                run = torch.compile(own, fullgraph=True, dynamic=False)
            self.compiled[kind] = run
        return self.compiled[kind]

    def upload(self, x: np.ndarray) -> Tensor:
        """A host array on the device; its length is one of many, which the compiler is told before it asks."""
        tensor = send(torch.from_numpy(x), self.device)
        if self.mode in TRACED_MODES and len(x) > 2:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return tensor

    def send(self, captured: Captured, host: HostInputs) -> None:
        """Copy to the graph's inputs what differs from the step before: in a steady decode nothing."""
        sent = captured.sent
        for index, (target, new) in enumerate(zip(captured.inputs, host, strict=True)):
            if target is not None and (sent is None or not np.array_equal(sent[index], new)):
                target.copy_(send(torch.from_numpy(new), self.device), non_blocking=True)
        captured.sent = host

    def capture(self, tree: dict, host: HostInputs, bucket: Bucket) -> Captured:
        """Compile and warm up on padding, which writes nothing, then capture."""
        began = time.perf_counter()
        inputs = StepInputs(*(None if x is None else self.upload(x) for x in padding_like(host, self.resident.rows)))
        run = self.function(bucket)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run(tree, self.resident, inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # In another mode the thread in which NCCL looks after earlier collectives would end the capture.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            output = run(tree, self.resident, inputs)
        self.report(f"captured {bucket.name} in {time.perf_counter() - began:.1f} s")
        found = Captured(graph, inputs, None, output, tree)
        # At the program's end too, where NCCL waits for every graph that holds its collectives.
        weakref.finalize(found, graph.reset)
        return found


def graphs_traced() -> int:
    """How many graphs torch.compile has made in this process; asking loads the compiler."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def padding_like(host: HostInputs, rows: Rows) -> HostInputs:
    """Inputs of the same sizes in which every entry is padding."""
    return HostInputs(
        row=np.full_like(host.row, rows.length.shape[0] - 1),
        accept=np.zeros_like(host.accept),
        cu_seqlens=host.cu_seqlens if host.token_ids is None else np.zeros_like(host.cu_seqlens),
        token_ids=None if host.token_ids is None else np.zeros_like(host.token_ids),
        entry=None if host.entry is None else np.full_like(host.entry, len(host.row)),
        captured=None if host.captured is None else np.zeros_like(host.captured),
    )


def same_storage(a: Any, b: Any) -> bool:
    """Whether two parameter trees are the same tensors, so that a graph captured with one computes with the other."""
    if isinstance(a, Tensor):
        return a is b or a.data_ptr() == b.data_ptr()
    if isinstance(a, dict):
        return a is b or all(same_storage(a[key], b[key]) for key in a)
    return a is b or all(same_storage(x, y) for x, y in zip(a, b, strict=True))
