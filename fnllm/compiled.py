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

from fnllm import fusing
from fnllm.batch import Rows, StepInputs
from fnllm.buckets import Bucket, HostInputs, padding
from fnllm.cache import KVCache
from fnllm.fallbacks import name_fallbacks
from fnllm.fusing import fuse_norms
from fnllm.held import tensors_of
from fnllm.options import Settings
from fnllm.rope import Rope
from fnllm.rows import send
from fnllm.step import StepOutput, StepSpec, step
from fnllm_kernels import linear_add_norm
from fnllm_weights import ParamTree

Report = Callable[[str], None]  # takes a line for each thing that is built
Place = tuple[int, tuple[int, ...], tuple[int, ...]]  # a tensor's address, shape and strides


class Resident(NamedTuple):
    """The tensors a step works on, at fixed addresses while an engine lives."""

    cache: KVCache
    rows: Rows
    rope: Rope


def advance_in_place(
    tree: ParamTree, resident: Resident, inputs: StepInputs, *, spec: StepSpec, max_seqlen: int, max_context: int
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
class Recorded:
    """A CUDA graph of one bucket with the tensors it reads and writes, and the parameters whose addresses it holds."""

    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    sent: HostInputs | None
    output: StepOutput
    tree: ParamTree
    places: list[Place]  # of its tensors when the graph was captured


class StepRunner:
    """Runs steps of one spec; builds what a bucket needs at its first use."""

    def __init__(self, spec: StepSpec, resident: Resident, settings: Settings):
        self.spec, self.resident, self.settings = spec, resident, settings
        self.device = resident.rows.length.device
        self.graphs: dict[Bucket, Recorded] = {}
        self.pool = torch.cuda.graph_pool_handle() if settings.captured else None
        self.compiled: dict[tuple[bool, int], Callable[..., StepOutput]] = {}
        self.stale = 0  # how often what its functions hold has become another since it was last compiled from nothing

    def __call__(
        self, tree: ParamTree, host: HostInputs, *, max_context: int, as_graph: bool, report: Report
    ) -> StepOutput:
        """Run one step, and tell `report` of what had to be built for it.

        With `as_graph`, where the engine has graphs, its bucket's is replayed; the outputs last until the next step.
        """
        tokens, captured = (None if x is None else len(x) for x in (host.token_ids, host.captured))
        bucket = Bucket(len(host.row), tokens, captured, max_context)
        if as_graph and self.settings.captured:
            return self.replay(tree, host, bucket, report)
        inputs = self.upload(host)
        if not self.settings.traced:
            return self.function(bucket)(tree, self.resident, inputs)
        made, began = graphs_traced(), time.perf_counter()
        output = self.function(bucket)(tree, self.resident, inputs)
        if graphs_traced() != made:
            report(f"compiled {bucket.name} in {time.perf_counter() - began:.1f} s")
        return output

    def replay(self, tree: ParamTree, host: HostInputs, bucket: Bucket, report: Report) -> StepOutput:
        """Run one step by its bucket's graph, recorded first if there is none for these parameters."""
        graph = self.graphs.get(bucket)
        if graph is not None and graph.tree is not tree and graph.places == places(tree):
            graph.tree = tree  # the same tensors in other containers, known by these from now on
        if graph is None or graph.tree is not tree:
            graph = self.graphs[bucket] = self.record(tree, bucket, report)
        self.refresh(graph, host)
        graph.graph.replay()
        return graph.output

    def drop_moved(self) -> None:
        """Drop the graphs whose parameters lie elsewhere or otherwise by now, in the same tree."""
        self.graphs = {key: one for key, one in self.graphs.items() if places(one.tree) == one.places}

    def start_over(self) -> None:
        """Capture anew: the graphs hold what the step's functions held, or where that lay.

        torch.compile makes other graphs of operations for each number that a function holds and keeps those before, but
        refuses after so many. A step of one entry has two: for one token and for several.
        """
        self.graphs.clear()
        self.stale += 1
        if self.settings.traced and 2 * (self.stale + 1) > torch._dynamo.config.recompile_limit:
            self.compiled.clear()
            self.stale = 0

    def function(self, bucket: Bucket) -> Callable[..., StepOutput]:
        """The step as a function of (tree, resident, inputs): eager, or compiled once for all sizes but one entry."""
        kind = (bucket.entries == 1, bucket.max_context)  # torch.compile specialises on size one
        if kind not in self.compiled:
            spec = self.spec  # not `self`: in a cycle the cache would outlive its params until Python's collector comes

            def run(tree: ParamTree, resident: Resident, inputs: StepInputs) -> StepOutput:
                longest = 1 if inputs.token_ids is None else inputs.token_ids.shape[0]
                return advance_in_place(
                    tree, resident, inputs, spec=spec, max_seqlen=longest, max_context=bucket.max_context
                )

            if self.settings.traced:
                # A code object of its own, since torch.compile counts recompilations by it. Sizes are dynamic where
                # `upload` marks them and nowhere else: torch would take those that differ from another model's for
                # changing ones, since it knows them by the line of code.
                if self.device.type == "cuda":
                    start_compilers()
                own = types.FunctionType(run.__code__.replace(), run.__globals__, "step", None, run.__closure__)
                run = torch.compile(own, fullgraph=True, dynamic=False, options=inductor_options())
            self.compiled[kind] = run
        return self.compiled[kind]

    def upload(self, host: HostInputs) -> StepInputs:
        """The inputs on the device; a length that is one of many is marked so before the compiler asks."""

        def sent(x: np.ndarray, of_many: bool) -> Tensor:
            tensor = send(torch.from_numpy(x), self.device)
            if self.settings.traced and of_many:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            return tensor

        several = len(host.row) > 1
        row, accept, cu_seqlens = (sent(x, several) for x in (host.row, host.accept, host.cu_seqlens))
        tokens = (None if x is None else sent(x, len(x) > 1) for x in (host.token_ids, host.entry, host.captured))
        return StepInputs(row, accept, cu_seqlens, *tokens)

    def refresh(self, graph: Recorded, host: HostInputs) -> None:
        """Copy to the graph's inputs what differs from the step before: in a steady decode nothing."""
        sent, graph.sent = graph.sent, None  # unknown, should this be cut short
        for index, (target, new) in enumerate(zip(graph.inputs, host, strict=True)):
            if target is not None and (sent is None or not np.array_equal(sent[index], new)):
                target.copy_(send(torch.from_numpy(new), self.device), non_blocking=True)
        graph.sent = host

    def record(self, tree: ParamTree, bucket: Bucket, report: Report) -> Recorded:
        """Compile and warm up on padding, which writes nothing, then capture the bucket's graph."""
        began = time.perf_counter()
        inputs = self.upload(padding(bucket.entries, bucket.tokens, bucket.captured, self.settings.max_num_seqs))
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
        report(f"captured {bucket.name} in {time.perf_counter() - began:.1f} s")
        found = Recorded(graph, inputs, None, output, tree, places(tree))
        # At the program's end too, where NCCL waits for every graph that holds its collectives.
        weakref.finalize(found, graph.reset)
        return found


def inductor_options() -> dict[str, Any]:
    """What the compiler must do with each graph, in place of a pass set in Inductor's own config, and what it must not.

    Its reordering of a graph for the peak of memory loses sight of what is written in place: it put a kernel that reads
    an all-reduce's result before the all-reduce (torch 2.13, two ranks, edits and captures in one step). And a kernel
    of its own must have ended where the next starts: batch-1 attention reads a step's lengths before it waits.
    """
    import torch._inductor.config as inductor
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class BeforeLowering(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            fuse_norms(graph)
            name_fallbacks(graph)

        def uuid(self) -> bytes:
            """Part of the name under which a compiled graph is found on disk by the next process."""
            return get_hash_for_files((fusing.__file__, linear_add_norm.__file__))

    avoided = [name for name in ("reorder_for_peak_memory", "triton.enable_pdl") if hasattr(inductor, name)]
    return {**dict.fromkeys(avoided, False), "post_grad_custom_post_pass": BeforeLowering()}


def start_compilers() -> None:
    """Start the processes in which Inductor compiles a GPU's kernels, if there are none, and keep them running.

    Inductor would end them after a minute without a result. A job that comes just then, as may happen while a large
    model is compiled for the first time, forks new ones beside the threads of the old ones, and these may wait for a
    lock without end (PyTorch issues 176968 and 186136). The setting is read at their start and restored afterwards.
    """
    import torch._inductor.config as inductor

    kept = {"quiesce_async_compile_pool": False} if hasattr(inductor, "quiesce_async_compile_pool") else {}
    with inductor.patch(kept):
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()


def graphs_traced() -> int:
    """How many graphs torch.compile has made in this process; asking loads the compiler."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def places(tree: ParamTree) -> list[Place]:
    """Where the tensors of a parameter tree lie, and how: a graph captured with one tree computes with all such."""
    return [(leaf.data_ptr(), leaf.shape, leaf.stride()) for leaf in tensors_of(tree)]
