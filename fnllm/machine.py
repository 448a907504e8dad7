"""The machine that steps run on (effect): the cache pool, the rows on the device, the compiled steps, and which step
last wrote each block. It holds no request and decides nothing; plans come from the scheduler."""

import dataclasses
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fnllm.buckets import common_buckets, context_bound, pad_to_power, padded, padding
from fnllm.cache import allocate, block_bytes, blocks_that_fit, host_memory, zero_broken_blocks
from fnllm.capture import NOTHING, Capture
from fnllm.compiled import Resident, StepRunner
from fnllm.distributed import least
from fnllm.edits import Channel, Edit
from fnllm.held import Seen, held_tensors, look, tensors_of
from fnllm.layers import Layers
from fnllm.numerics import exchanges_for, layers_for
from fnllm.options import Settings, blocks_for_load
from fnllm.rope import make_rope
from fnllm.rows import empty_choices, empty_rows, send, write_choices, write_joins, write_tables
from fnllm.sampler import SamplerFeatures, features_of, rounded, rows_from_sampling, union, widen_rows
from fnllm.sampling import Sampling
from fnllm.scheduler import Plan
from fnllm.state import State
from fnllm.step import StepOutput, StepSpec
from fnllm.taps import Choice
from fnllm.tensor_parallel import TensorParallel
from fnllm.trial import try_logits_fn, try_step
from fnllm.watch import watch
from fnllm_kernels.attention import default_backend
from fnllm_kernels.kv_store import copy_blocks
from fnllm_weights import Params, ParamTree, local_sizes


class Variant(NamedTuple):
    """What a caller may change about the computation without touching the machine."""

    layers: Layers = Layers()
    edits: tuple[Channel, ...] = ()  # which its requests may use
    capture: tuple[str, ...] = ()  # sites, of which its requests may ask


class Job(NamedTuple):
    """What the device must know of a request beyond its tokens."""

    sampling: Sampling
    seed: int
    prompt_length: int
    tokens: tuple[int, ...] = ()  # the known tokens, for rows that look back at them
    edits: tuple[Edit, ...] = ()
    capture: Capture = NOTHING


class Machine:
    """Fixed-address tensors and the steps compiled around them, shared by all engines on the same parameters."""

    def __init__(self, params: Params, settings: Settings, tp: TensorParallel, report: Callable[[str], None]):
        weight = params.tree["embed"]
        self.config, self.settings, self.tp, self.report = params.config, settings, tp, report
        self.sizes = local_sizes(params.config, params.shard)
        self.device, self.dtype = weight.device, weight.dtype
        self.backends = self.attention_backends()
        self.vocab_limit = params.config.vocab_size
        if params.tokenizer is not None:
            self.vocab_limit = min(self.vocab_limit, params.tokenizer.num_ids)
        # One plan serves all ranks, so the pool is as large as the rank with the least room can make it.
        self.num_blocks = settings.num_blocks or least(tp, self.device, self.affordable_blocks)
        cache = allocate(self.config, self.sizes, self.num_blocks, settings.block_size, self.dtype, self.device)
        max_blocks = -(-settings.max_model_len // settings.block_size)
        rows = empty_rows(settings.max_num_seqs, max_blocks, settings.max_model_len, self.device)
        self.resident = Resident(cache, rows, make_rope(params.config, self.device))
        self.runners: dict[StepSpec, StepRunner] = {}
        self.last_runner: tuple[Variant | None, SamplerFeatures | None, StepRunner | None] = (None, None, None)
        self.tried: set[Any] = set()  # variants whose functions, and logits_fns that, have passed a trial
        self.choices: dict[tuple[Channel, ...], tuple[Choice, ...]] = {(): ()}  # of each row, for each set of channels
        self.features: list[SamplerFeatures] = [SamplerFeatures()] * settings.max_num_seqs  # of each row
        self.batch_rows, self.batch_features = np.zeros(0, np.int32), SamplerFeatures()
        # Which step wrote a block last, so that a state from before that step is not continued on its contents.
        self.clock = 0
        self.written = np.zeros(self.num_blocks, np.int64)
        self.tables = np.zeros((settings.max_num_seqs, max_blocks), np.int32)  # the rows' block tables, on the host
        self.watch = watch(tp, self.device)
        self.asynchronous = self.device.type == "cuda"  # a launched step runs while the host goes on
        self.by_kernels = self.device.type == "cuda" and self.dtype != torch.float64
        self.idle: State | None = None  # where the last `generate` ended, with its prefix cache
        self.name = uuid.uuid4().hex  # states say whose cache they count on
        self.lock = threading.RLock()  # held by the thread whose step, or whose whole call, is running
        # Weights (None) and what variants' functions hold, at the last look, and the number of their last change.
        self.seen: dict[Variant | None, tuple[Seen, int]] = {}
        self.changes = 0

    def __reduce__(self) -> tuple:
        """A copy of params, or a pickle, holds None in a machine's place: it builds its own when it first needs one."""
        return type(None), ()

    def attention_backends(self) -> tuple[str, str]:
        """The backends of decode steps and of steps with prefill chunks.

        FlashAttention prefills faster; for decode the project's own kernel is faster (benchmarks/results/kernels.json).
        """
        if self.settings.attention is not None:
            return self.settings.attention, self.settings.attention
        best = default_backend(self.device, self.dtype, self.config.head_dim, self.settings.block_size)
        return ("triton" if best in ("fa3", "fa2") else best), best

    def affordable_blocks(self) -> int:
        """Blocks for the pool from the memory that is free now."""
        settings = self.settings
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
        else:
            free = total = host_memory()  # others live there too: the share is of what is free
        width = max(self.sizes.vocab_rows, 4 * self.config.hidden_size, 2 * self.sizes.intermediate)
        activations = 6 * settings.max_num_batched_tokens * self.config.hidden_size * 4
        return blocks_that_fit(
            free=free,
            total=total,
            reserve=activations + 3 * settings.max_num_seqs * width * 4,
            utilization=settings.utilization,
            per_block=block_bytes(self.config, self.sizes, settings.block_size, self.dtype),
            needed=blocks_for_load(settings.max_model_len, settings.max_num_seqs, settings.block_size),
        )

    def reserve_for_captures(self, needed: int) -> None:
        """Say how many bytes captured activations will take; ValueError when the device has not that much free."""
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else host_memory()
        if needed > free:
            raise ValueError(
                f"capture would take up to {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free on {self.device}; "
                "ask for fewer sites, positions or new tokens, or give a Capture per prompt"
            )
        self.report(f"captured activations take at most {needed / 1e6:.1f} MB on {self.device}")

    def version_of(self, params: Params, variant: Variant) -> int:
        """A number that changes whenever a weight does: another tensor, or the same one written in place.

        Tensors that the variant's functions hold are weights like those of `params`. Reads none: PyTorch counts the
        writes to a tensor, but for those through `.data` or in inference mode, of which `weights_changed` has to be
        told.
        """
        version = self.last_change(None, list(tensors_of(params.tree)))
        own = [mine for mine, usual in zip(variant.layers, Layers(), strict=True) if mine is not usual]
        held = held_tensors((*own, *(channel.apply for channel in variant.edits)))
        return max(version, self.last_change(variant._replace(capture=()), held)) if held else version

    def last_change(self, of: Variant | None, leaves: list[torch.Tensor]) -> int:
        """When these tensors last differed from those seen before, as a count of all such changes."""
        now, (before, change) = look(leaves), self.seen.get(of, (None, 0))
        if before is not None and (before.places, before.writes) == (now.places, now.writes):
            return change
        if before is not None and before.places != now.places and of is not None:
            self.drop_graphs(of)
        self.changes += 1
        self.seen[of] = now, self.changes
        return self.changes

    def drop_graphs(self, variant: Variant) -> None:
        """Let the variant's steps be captured anew: their graphs hold the addresses of what its functions held."""
        layers = layers_for(variant.layers, self.settings.numerics)
        for spec, runner in self.runners.items():
            if (spec.layers, spec.edits) == (layers, variant.edits):
                runner.graphs.clear()

    def execute(
        self, params: Params, variant: Variant, plan: Plan, job_of: Callable[[int], Job], captured: np.ndarray
    ) -> StepOutput:
        """Carry out one plan; `captured` are the tokens of its batch whose activations are asked for.

        The output lies in buffers that the next step writes over.
        """
        self.clock += 1
        self.apply(plan, job_of, variant.edits)
        inputs, capture = padded(plan, self.settings, self.device.type == "cuda")
        max_context = 0 if inputs.token_ids is not None else context_bound(plan, self.settings.max_model_len)
        if len(captured):
            inputs = inputs._replace(captured=pad_to_power(captured))
        else:
            variant = variant._replace(capture=())
        with torch.no_grad():
            return self.runner(variant, self.features_for(plan), params.tree)(
                params.tree, inputs, max_context=max_context, capture=capture
            )

    def clean(self) -> list[int]:
        """Zero the blocks that hold NaN or infinity, and say which they were: they are lost to every state."""
        used = torch.from_numpy(np.flatnonzero(self.written)).to(self.device)
        found = zero_broken_blocks(self.resident.cache, used, self.tp.all_reduce_max)
        if found:
            self.clock += 1
            self.written[found] = self.clock
        return found

    def apply(self, plan: Plan, job_of: Callable[[int], Job], channels: tuple[Channel, ...]) -> None:
        """Bring cache and rows to where the plan starts: block copies, joining rows, grown block tables."""
        source, target = plan.copies
        if len(source):
            self.written[target] = self.clock
            at, to = (send(torch.from_numpy(x.astype(np.int64)), self.device) for x in plan.copies)
            for k, v in zip(self.resident.cache.k, self.resident.cache.v, strict=True):
                copy_blocks(k, v, at, to)
        if plan.joins:
            jobs = [job_of(join.seq_id) for join in plan.joins]
            self.join(plan, jobs)
            rows, edits = [join.row for join in plan.joins], [job.edits for job in jobs]
            write_choices(self.choices_of(channels), channels, rows, edits)
        row, column, block = plan.table_updates
        if len(row):
            write_tables(self.resident.rows, row, column, block)
            self.tables[row, column] = block
        self.mark_written(plan)

    def join(self, plan: Plan, jobs: Sequence[Job]) -> None:
        """Write the rows of the sequences that join: their tables, and what the sampler must know of each."""
        for join, job in zip(plan.joins, jobs, strict=True):
            self.features[join.row] = features_of([job.sampling], eos_token_ids=self.config.eos_token_ids)
            self.tables[join.row, : len(join.block_table)] = join.block_table
        self.batch_rows = np.zeros(0, np.int32)  # decide the features anew
        features = self.batch_features
        for join in plan.joins:
            features = union(features, self.features[join.row])
        self.widen(features)
        rows = self.resident.rows
        sampler = rows_from_sampling(
            [job.sampling for job in jobs],
            # Tables once widened stay so.
            features=dataclasses.replace(
                features, stops=rows.sampler.stop_ids.shape[1], bias=rows.sampler.bias_ids.shape[1]
            ),
            prompt_lengths=[job.prompt_length for job in jobs],
            seeds=[job.seed for job in jobs],
            eos_token_ids=self.config.eos_token_ids,
        )
        write_joins(
            rows,
            [join.row for join in plan.joins],
            [join.length for join in plan.joins],
            [job.prompt_length for job in jobs],
            [join.block_table for join in plan.joins],
            sampler,
            [job.tokens if looks_back(job.sampling) else () for job in jobs],
        )

    def try_logits_fn(self, function: Callable) -> None:
        """Refuse a logits_fn that returns no logits, before a request with it is queued."""
        if function not in self.tried:
            traced = self.settings.traced
            try_logits_fn(function, self.config.vocab_size, self.device, traced=traced)
            self.tried.add(function)

    def choices_of(self, channels: tuple[Channel, ...]) -> tuple[Choice, ...]:
        """The rows' choices among these channels."""
        if channels not in self.choices:
            self.choices[channels] = empty_choices(channels, self.settings.max_num_seqs + 1, self.device)
        return self.choices[channels]

    def widen(self, features: SamplerFeatures) -> None:
        """Make room in the rows for longer lists of stop ids and biases; graphs that hold the old rows are dropped."""
        self.batch_features = features
        sampler = self.resident.rows.sampler
        stops, bias = sampler.stop_ids.shape[1], sampler.bias_ids.shape[1]
        if features.stops > stops or features.bias > bias:
            wide = dataclasses.replace(features, stops=max(stops, features.stops), bias=max(bias, features.bias))
            rows = self.resident.rows._replace(sampler=widen_rows(sampler, wide))
            self.resident = self.resident._replace(rows=rows)
            self.runners.clear()
            self.last_runner = (None, None, None)

    def features_for(self, plan: Plan) -> SamplerFeatures:
        """What the sampler must do for the rows of this plan; looked up again only when the rows change."""
        if not np.array_equal(self.batch_rows, plan.rows):
            features = SamplerFeatures()
            for row in plan.rows.tolist():
                features = union(features, self.features[row])
            self.batch_rows = plan.rows
            self.batch_features = features
            if features.logits_fns:
                self.number_functions(plan.rows, features.logits_fns)
        return rounded(self.batch_features)

    def number_functions(self, rows: np.ndarray, functions: tuple[Callable, ...]) -> None:
        """Write each row's logits_fn as its place among the batch's, which other rows may have changed."""
        own = [self.features[row].logits_fns for row in rows.tolist()]
        indices = [functions.index(fns[0]) if fns else -1 for fns in own]
        numbers = torch.tensor(indices, dtype=torch.int32, device="cpu")
        where = send(torch.from_numpy(rows.astype(np.int64)), self.device)
        self.resident.rows.sampler.logits_fn.index_copy_(0, where, send(numbers, self.device))

    def mark_written(self, plan: Plan) -> None:
        """Note this step at every block that the plan's new tokens lie in."""
        decode = slice(0, plan.num_decode)
        size = self.settings.block_size
        self.written[self.tables[plan.rows[decode], plan.starts[decode] // size]] = self.clock
        for entry in range(plan.num_decode, len(plan.rows)):
            first, last = plan.starts[entry] // size, (plan.starts[entry] + plan.query_lens[entry] - 1) // size
            self.written[self.tables[plan.rows[entry], first : last + 1]] = self.clock

    def runner(self, variant: Variant, features: SamplerFeatures, tree: ParamTree) -> StepRunner:
        """The runner for a variant and what its sampler must do; the last one is found without hashing."""
        last_variant, last_features, runner = self.last_runner
        if last_variant is variant and last_features == features and runner is not None:
            return runner
        spec = StepSpec(
            config=self.config,
            sizes=self.sizes,
            layers=layers_for(variant.layers, self.settings.numerics, on_gpu=self.by_kernels),
            tp=exchanges_for(self.tp, self.settings.numerics),
            backends=self.backends,
            block_size=self.settings.block_size,
            vocab_limit=self.vocab_limit,
            features=features,
            capture=variant.capture,
            edits=variant.edits,
        )
        if spec not in self.runners:
            rows = self.resident.rows._replace(edits=self.choices_of(variant.edits))
            functions = variant._replace(capture=())
            # A sampler of one's own must give what each kind of request asks of it.
            asked = (variant, None if variant.layers.sample is Layers().sample else features.logprobs)
            if asked not in self.tried and functions != Variant():
                traced = self.settings.traced and functions not in self.tried
                try_step(tree, self.resident._replace(rows=rows), spec, traced=traced)
                self.tried |= {asked, functions}
            self.runners[spec] = StepRunner(spec, self.resident._replace(rows=rows), self.settings, self.report)
        self.last_runner = (variant, features, self.runners[spec])
        return self.runners[spec]

    def prepare(self, params: Params, variant: Variant, features: SamplerFeatures) -> None:
        """Compile and capture the steps of every bucket now, so that no request waits for them.

        Those of short contexts, for a batch whose sampler does what `features` says. Without graphs there is nothing
        to prepare.
        """
        if not self.settings.captured:
            return
        runner, scratch = self.runner(variant, rounded(features), params.tree), self.settings.max_num_seqs
        with torch.no_grad():
            for bucket in common_buckets(self.settings):
                empty = padding(bucket.entries, bucket.tokens, None, scratch)
                runner(params.tree, empty, max_context=bucket.max_context, capture=True)


def looks_back(sampling: Sampling) -> bool:
    """Whether a request's sampling depends on the tokens before."""
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0) or sampling.logits_fn is not None
