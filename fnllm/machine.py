"""The machine that steps run on (effect): the cache pool, the rows on the device, the compiled steps, and which step
last wrote each block. It holds no request and decides nothing; plans come from the scheduler."""

import contextlib
import dataclasses
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fnllm.ambient import full_collections_off
from fnllm.buckets import common_buckets, context_bound, pad_to_power, padded, padding
from fnllm.built import Built, functions_of
from fnllm.cache import allocate, block_bytes, blocks_that_fit, host_memory, zero_broken_blocks
from fnllm.compiled import Report, Resident, StepRunner, graphs_traced
from fnllm.distributed import least
from fnllm.edits import Channel
from fnllm.held import Versions, held_by, in_own_containers, same_tensors, tensors_of
from fnllm.jobs import Job, Variant
from fnllm.layers import Layers
from fnllm.numerics import exchanges_for, layers_for
from fnllm.options import Settings
from fnllm.parameters import check_model
from fnllm.rope import make_rope
from fnllm.row_features import RowFeatures
from fnllm.rows import empty_choices, empty_rows, send, write_choices, write_joins, write_tables
from fnllm.sampler import SamplerFeatures, features_of, rounded, rows_from_sampling, widen_rows
from fnllm.scheduler import Plan, blocks_for
from fnllm.state import State
from fnllm.step import StepOutput, StepSpec
from fnllm.taps import Choice
from fnllm.tensor_parallel import TensorParallel
from fnllm.trial import try_logits_fn, try_step
from fnllm.watch import watch
from fnllm.writes import Writes
from fnllm_kernels.attention import default_backend
from fnllm_kernels.kv_store import copy_blocks
from fnllm_weights import ModelConfig, Params, ParamTree, local_sizes


class Unbuilt:
    """A placeholder in a workspace for a machine that is not built yet; the thread that holds its lock builds it."""

    clock = None  # no steps, and nothing to run them

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple:
        return Unbuilt, ()


class Machine:
    """Fixed-address tensors and the steps compiled around them, shared by all engines on the same parameters."""

    def __init__(self, params: Params, settings: Settings, tp: TensorParallel):
        weight, config = params.tree["norm"], params.config
        self.settings, self.tp = settings, tp
        self.device, self.dtype = weight.device, weight.dtype
        self.spec = plain_spec(params, settings, tp)
        # One plan serves all ranks, so the pool is as large as the rank with the least room can make it.
        self.num_blocks = settings.num_blocks or least(tp, self.device, self.affordable_blocks)
        size, max_blocks = settings.block_size, blocks_for(settings.max_model_len, settings.block_size)
        cache = allocate(config, self.spec.sizes, self.num_blocks, size, self.dtype, self.device)
        rows = empty_rows(settings.max_num_seqs, max_blocks, settings.max_model_len, self.device)
        self.resident = Resident(cache, rows, make_rope(config, self.device))
        self.built = Built()
        self.features = RowFeatures(settings.max_num_seqs)
        self.writes = Writes(self.num_blocks, size, settings.max_num_seqs, max_blocks)
        self.versions = Versions()  # of the weights (None), and of what each function holds
        self.tree_seen: Any = None  # the weights at the last look, to see at each step whether one was replaced
        self.watch = watch(tp, self.device)
        self.report: Report | None = None  # of those who build without saying whom to tell
        self.idle: State | None = None  # where the last `generate` ended, with its prefix cache
        self.name = uuid.uuid4().hex  # states say whose cache they count on
        self.stepping = False  # in the thread that holds the lock
        self.lock = threading.RLock()  # held by the thread whose step, or whose whole call, is running

    def __reduce__(self) -> tuple:
        """A copy or pickle of params holds a placeholder instead of a machine, and builds its own when needed."""
        return Unbuilt, ()

    @property
    def runners(self) -> dict[StepSpec, StepRunner]:
        """The steps that were built so far."""
        return self.built.runners

    @property
    def clock(self) -> int:
        """How many steps have run."""
        return self.writes.clock

    @property
    def asynchronous(self) -> bool:
        """Whether a launched step runs while the host goes on."""
        return self.device.type == "cuda"

    def graphs_traced(self) -> int:
        """How many graphs torch.compile has made in this process; 0 where this machine's steps are not compiled."""
        return graphs_traced() if self.settings.traced else 0

    def tell(self, report: Report) -> None:
        """Set the function that is called with what is built for engines without their own `report`."""
        self.report = report

    def rest_at(self, state: State | None) -> None:
        """Keep the state in which a `generate` ended, for the next one to continue from; None while one runs."""
        self.idle = state

    def affordable_blocks(self) -> int:
        """Blocks for the pool from the memory that is free now."""
        settings, sizes, config = self.settings, self.spec.sizes, self.spec.config
        free, total = memory_of(self.device)
        width = max(sizes.vocab_rows, 4 * config.hidden_size, 2 * sizes.intermediate)
        activations = 6 * settings.max_num_batched_tokens * config.hidden_size * 4
        return blocks_that_fit(
            free=free,
            total=total,
            reserve=activations + 3 * settings.max_num_seqs * width * 4,
            utilization=settings.utilization,
            per_block=block_bytes(config, sizes, settings.block_size, self.dtype),
            needed=settings.max_num_seqs * blocks_for(settings.max_model_len, settings.block_size),
        )

    def reserve_for_captures(self, needed: int, report: Report) -> None:
        """Report how many bytes captured activations will take; ValueError on all ranks if one has too few free."""
        free = least(self.tp, self.device, lambda: memory_of(self.device)[0])
        if needed > free:
            raise ValueError(
                f"capture would take up to {needed / 1e9:.2f} GB and only {free / 1e9:.2f} GB are free on "
                f"{self.device}; ask for fewer sites, positions or new tokens, or give a Capture per prompt"
            )
        report(f"captured activations take at most {needed / 1e6:.1f} MB on {self.device}")

    def version_of(self, params: Params, variant: Variant) -> int:
        """A number that changes whenever a weight does: another tensor, or the same one written in place.

        What the variant's functions hold counts as weights too: tensors, whose values are not read, and numbers and the
        like. Graphs are dropped that hold such a number, or the address of a tensor that was replaced in such a
        function or in the tree. Raises ValueError for a tree that was changed so that the layers cannot read it.
        """
        if not same_tensors(params.tree, self.tree_seen):
            check_model(params, variant.layers)
            self.tree_seen = in_own_containers(params.tree)
        version, moved = self.versions.of(None, list(tensors_of(params.tree)))
        if moved:
            for runner in self.runners.values():
                runner.drop_moved()
        return max((version, *map(self.version_held, variant.own_functions())))

    def version_held(self, function: Callable) -> int:
        """A number that changes whenever what a function holds does; graphs with what it held before are dropped."""
        held = held_by([function])
        number, stale = self.versions.of(function, held.leaves, held.constants)
        if stale:
            for spec, runner in self.runners.items():
                if function in functions_of(spec):
                    runner.start_over()
        return number

    def notice_changes(self, params: Params, variant: Variant) -> None:
        """Look for changes since the last step, before a step that does not ask for a version.

        Otherwise a graph would continue with what it was captured with, and blocks computed with temporary weights or
        numbers would be found under the version of the weights before and after.
        """
        if not same_tensors(params.tree, self.tree_seen):
            self.version_of(params, variant)
        else:
            for function in variant.own_functions():
                self.version_held(function)

    def weights_changed(self) -> None:
        """Treat the weights, and what functions hold, as changed: they were written in a way that PyTorch misses."""
        self.versions.forget()

    @contextlib.contextmanager
    def one_step(self) -> Iterator[None]:
        """A context in which a step runs; RuntimeError for a nested one, which would overwrite its rows and blocks."""
        if self.stepping:
            raise RuntimeError(
                "a function that a step calls (a layer, an edit, a logits_fn) has itself asked for a step of the same "
                "model's machine; use fnllm.score in it, or params of its own: params._replace(workspace={})"
            )
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False

    def execute(
        self,
        params: Params,
        variant: Variant,
        plan: Plan,
        job_of: Callable[[int], Job],
        captured: np.ndarray,
        report: Report,
    ) -> StepOutput:
        """Carry out one plan; `captured` are the tokens of its batch whose activations are captured.

        The output is in buffers that the next step overwrites.
        """
        self.notice_changes(params, variant)
        self.writes.follow(plan)
        self.apply(plan, job_of, variant.edits)
        inputs, as_graph = padded(plan, self.settings, self.device.type == "cuda")
        max_context = 0 if inputs.token_ids is not None else context_bound(plan, self.settings.max_model_len)
        if len(captured):
            inputs = inputs._replace(captured=pad_to_power(captured))
        else:
            variant = variant._replace(capture=())
        with torch.no_grad():
            return self.runner(variant, self.features_for(plan), params.tree)(
                params.tree, inputs, max_context=max_context, as_graph=as_graph, report=report
            )

    def clean(self) -> list[int]:
        """Zero the blocks that hold NaN or infinity, and return them: every state has lost their contents."""
        used = torch.tensor(self.writes.since(0), dtype=torch.int64, device=self.device)
        found = zero_broken_blocks(self.resident.cache, used, self.tp.all_reduce_max)
        if found:
            self.writes.spoil(found)
        return found

    def apply(self, plan: Plan, job_of: Callable[[int], Job], channels: tuple[Channel, ...]) -> None:
        """Bring cache and rows to where the plan starts: copied blocks, joining rows, new block table entries."""
        if len(plan.copies[0]):
            at, to = (send(torch.from_numpy(x.astype(np.int64)), self.device) for x in plan.copies)
            for k, v in zip(self.resident.cache.k, self.resident.cache.v, strict=True):
                copy_blocks(k, v, at, to)
        if plan.joins:
            jobs = [job_of(join.seq_id) for join in plan.joins]
            self.join(plan, jobs)
            rows, edits = [join.row for join in plan.joins], [job.edits for job in jobs]
            write_choices(self.choices_of(channels), channels, rows, edits)
            self.built.joined = channels
        row, column, block = plan.table_updates
        if len(row):
            write_tables(self.resident.rows, row, column, block)

    def join(self, plan: Plan, jobs: Sequence[Job]) -> None:
        """Write the rows of the sequences that join: block tables and sampler settings."""
        rows, eos = [join.row for join in plan.joins], self.spec.config.eos_token_ids
        features = self.features.join(rows, [features_of([job.sampling], eos_token_ids=eos) for job in jobs])
        sampler = rows_from_sampling(
            [job.sampling for job in jobs],
            features=self.widen(features),
            prompt_lengths=[job.prompt_length for job in jobs],
            seeds=[job.seed for job in jobs],
            eos_token_ids=eos,
        )
        write_joins(
            self.resident.rows, plan.joins, [job.prompt_length for job in jobs], sampler, [job.tokens for job in jobs]
        )

    def try_logits_fn(self, function: Callable) -> None:
        """Refuse a logits_fn that returns no logits, before a request with it is queued."""
        if function not in self.built.tried:
            traced = self.settings.traced
            try_logits_fn(function, self.spec.config.vocab_size, self.device, traced=traced)
            self.built.tried.add(function)

    def choices_of(self, channels: tuple[Channel, ...]) -> tuple[Choice, ...]:
        """The rows' choices among these channels."""
        choices = self.built.choices
        if channels not in choices:
            choices[channels] = empty_choices(channels, self.settings.max_num_seqs + 1, self.device)
        return choices[channels]

    def widen(self, features: SamplerFeatures) -> SamplerFeatures:
        """The features with the widths of the rows' lists of stop ids and biases, which first get the room they need.

        Lists once widened stay so. Steps that were built around the old rows are dropped.
        """
        rows = self.resident.rows
        stops, bias = rows.sampler.stop_ids.shape[1], rows.sampler.bias_ids.shape[1]
        wide = dataclasses.replace(features, stops=max(stops, features.stops), bias=max(bias, features.bias))
        if (wide.stops, wide.bias) != (stops, bias):
            self.resident = self.resident._replace(rows=rows._replace(sampler=widen_rows(rows.sampler, wide)))
            self.built.runners.clear()
            self.built.last = None
        return wide

    def features_for(self, plan: Plan) -> SamplerFeatures:
        """The sampler features that the rows of this plan need."""
        if self.features.turn_to(plan.rows) and self.features.together.logits_fns:
            # Each row's function is its place among the batch's, which other rows may have changed.
            numbers = torch.tensor(self.features.function_numbers(), dtype=torch.int32, device="cpu")
            where = send(torch.from_numpy(plan.rows.astype(np.int64)), self.device)
            self.resident.rows.sampler.logits_fn.index_copy_(0, where, send(numbers, self.device))
        features = self.features.together
        for function in features.logits_fns:
            self.version_held(function)  # no cache depends on it, but graphs do
        return rounded(features)

    def runner(self, variant: Variant, features: SamplerFeatures, tree: ParamTree) -> StepRunner:
        """The runner for a variant and what its sampler must do; tried and built at first use."""
        found = self.built.again(variant, features)
        if found is not None:
            return found
        spec = dataclasses.replace(
            self.spec,
            layers=self.layers_of(variant),
            features=features,
            capture=variant.capture,
            edits=variant.edits,
        )
        if spec not in self.runners:
            if self.built.make_room(spec, lambda: dataclasses.replace(self.spec, layers=self.layers_of(Variant()))):
                kept = {function for one in (spec, *self.runners) for function in functions_of(one)}
                self.versions.keep(lambda function: function in kept)
            rows = self.resident.rows._replace(edits=self.choices_of(variant.edits))
            resident = self.resident._replace(rows=rows)
            self.try_variant(variant, spec, resident, tree)
            self.runners[spec] = StepRunner(spec, resident, self.settings)
        return self.built.used(variant, features, spec)

    def layers_of(self, variant: Variant) -> Layers:
        """The functions that a variant's steps call."""
        by_kernels = self.device.type == "cuda" and self.dtype != torch.float64
        return layers_for(variant.layers, self.settings.numerics, on_gpu=by_kernels)

    def try_variant(self, variant: Variant, spec: StepSpec, resident: Resident, tree: ParamTree) -> None:
        """Check the variant's functions in steps on padding, unless they have passed before."""
        functions, tried = variant._replace(capture=()), self.built.tried
        # A sampler of one's own must give what each kind of request asks of it.
        asked = (variant, None if variant.layers.sample is Layers().sample else spec.features.logprobs)
        if asked not in tried and functions != Variant():
            try_step(tree, resident, spec, traced=self.settings.traced and functions not in tried)
            tried |= {asked, functions}

    def prepare(self, params: Params, variant: Variant, features: SamplerFeatures, report: Report) -> None:
        """Compile and capture the steps of every bucket now, so that no request waits for them.

        These are the steps of short contexts, for a batch with these sampler `features`. Without graphs there is
        nothing to prepare.
        """
        self.version_of(params, variant)  # so that it is noticed if they lie elsewhere when the graphs are used
        for function in features.logits_fns:
            self.version_held(function)
        if not self.settings.captured:
            return
        scratch = self.settings.max_num_seqs
        with torch.no_grad(), full_collections_off(self.graphs_traced):
            runner = self.runner(variant, rounded(features), params.tree)
            for bucket in common_buckets(self.settings):
                empty = padding(bucket.entries, bucket.tokens, None, scratch)
                runner(params.tree, empty, max_context=bucket.max_context, as_graph=True, report=report)


def plain_spec(params: Params, settings: Settings, tp: TensorParallel) -> StepSpec:
    """The static settings of a step without swaps, edits or captures."""
    config, weight = params.config, params.tree["norm"]
    num_ids = config.vocab_size if params.tokenizer is None else params.tokenizer.num_ids
    return StepSpec(
        config=config,
        sizes=local_sizes(config, params.shard),
        layers=Layers(),
        tp=exchanges_for(tp, settings.numerics),
        backends=backends_for(config, settings, weight.dtype, weight.device),
        block_size=settings.block_size,
        vocab_limit=min(config.vocab_size, num_ids),
        features=SamplerFeatures(),
    )


def backends_for(config: ModelConfig, settings: Settings, dtype: torch.dtype, device: torch.device) -> tuple[str, str]:
    """The backends of decode steps and of steps with prefill chunks.

    FlashAttention prefills faster; for decode the project's own kernel is faster (benchmarks/results/kernels.json).
    """
    if settings.attention is not None:
        return settings.attention, settings.attention
    best = default_backend(device, dtype, config.head_dim, settings.block_size)
    return ("triton" if best in ("fa3", "fa2") else best), best


def memory_of(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a device. On a host, which others use too, only the free memory counts."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    free = host_memory()
    return free, free
