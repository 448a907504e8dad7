"""The engine: one iteration around the pure step. `Engine.step` is `schedule`, launch, read back, `commit`."""

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from fnllm import scheduler
from fnllm.ambient import set_aside
from fnllm.capture import (
    NOTHING,
    Capture,
    CapturedRows,
    as_capture,
    captured_rows,
    expand,
    needs_whole_prompt,
    union_of_sites,
)
from fnllm.compiled import Report
from fnllm.edits import Edit, channels_of, edit_key, edits_of_each, kind_of, placed, with_own_values
from fnllm.failures import failures, no_tokens
from fnllm.held import equal
from fnllm.jobs import Job, Variant, looks_back
from fnllm.layers import Layers
from fnllm.machine import Machine
from fnllm.options import EngineOptions
from fnllm.parameters import check_model
from fnllm.progress import quiet, say
from fnllm.prompts import check_ids
from fnllm.readback import Readback, read_back
from fnllm.sampler import child_seed, features_of
from fnllm.sampling import Sampling, check_sampling, check_seed
from fnllm.scheduler import Events, Finished, Plan, Request, SchedulerConfig, TokenIds
from fnllm.state import State, check_state, may_share
from fnllm.tensor_parallel import TensorParallel
from fnllm.workspace import machine_for
from fnllm_weights import ModelConfig, Params

# What `generate` does around the engine, and what to do instead.
AROUND_THE_ENGINE = {
    "stop": "end it with stop_token_ids, or with finish once its text says so",
    "n": "add the request that many times, with sample=0, 1, ...",
    "prompt_logprobs": "use fnllm.score",
}


class Flight(NamedTuple):
    """A launched step whose results are not read yet."""

    plan: Plan
    results: Readback
    step: tuple[str, int]  # the machine and its clock then
    captured: tuple[CapturedRows, ...] = ()


class StepEvents(NamedTuple):
    """The results of a step: the scheduler's events, and the step's outputs in the order of its plan's entries."""

    events: Events
    plan: Plan
    results: Readback
    captured: tuple[CapturedRows, ...] = ()  # which sequence each row of `results.captured` belongs to
    failed: tuple[tuple[int, Exception], ...] = ()  # (seq_id, why) of sequences that had no token to draw


class Engine:
    """Parameters, layer functions with edits and captures, and the machine they run on; made by `engine`.

    An engine holds no requests: they are in a `State`, which `init` makes and `step` takes and returns.
    """

    def __init__(
        self,
        params: Params,
        machine: Machine,
        variant: Variant,
        edits: tuple[Edit, ...] = (),
        capture: Capture = NOTHING,
        report: Report | None = None,
    ):
        self.params, self.machine, self.variant = params, machine, variant
        self.edits, self.capture = edits, capture  # of a request that does not choose
        self.own_report = report
        self.plain_key = scheduler.make_cache_key(layers=variant.layers, edits=(), tag=None)

    @property
    def report(self) -> Report:
        """The function that is called with a line for each thing that is built for this engine."""
        return self.own_report or self.machine.report or (say if self.machine.tp.rank == 0 else quiet)

    @property
    def limits(self) -> SchedulerConfig:
        """The sizes that the scheduler works with: cache blocks, rows, tokens per step and per sequence."""
        settings = self.machine.settings
        return SchedulerConfig(
            num_blocks=self.machine.num_blocks,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
            prefix_cache=settings.prefix_cache,
            chunked_prefill=settings.chunked_prefill,
            max_chunk=settings.max_chunk,
        )

    def init(self) -> State:
        """A state without requests and with an empty prefix cache."""
        return State(
            scheduler.init(self.limits),
            clock=self.machine.clock,
            variant=self.variant,
            config=self.params.config,
            machine=self.machine.name,
        )

    def request(
        self,
        prompt: Iterable[int],
        sampling: Sampling,
        *,
        seed: SupportsIndex = 0,
        sample: SupportsIndex = 0,
        cache_tag: Any = None,
        edits: Iterable[Edit] | None = None,
        capture: Capture | Iterable[str] | None = None,
    ) -> Request:
        """A request to be passed to `add`.

        `prompt` holds token ids. `sampling.seed` overrides `seed`. `sample` is the index of this request among several
        samples of one prompt. Requests with different `cache_tag` (any hashable) share no blocks of the prefix cache.
        `edits` and `capture` may use only functions, shapes and sites that the engine was built for; None means the
        engine's own. Raises TypeError or ValueError that names the argument; also for stop strings, n and
        prompt_logprobs, which only `generate` and `stream` handle, and for a logits_fn that does not return logits.
        """
        self.check_settings(sampling)
        seed, sample = check_seed("seed", seed), check_seed("sample", sample)
        if isinstance(prompt, str) or not isinstance(prompt, Iterable):
            advice = "; params.tokenizer.encode makes one of text" if isinstance(prompt, str) else ""
            raise TypeError(f"prompt must be a list of token ids, found {type(prompt).__name__} {prompt!r}{advice}")
        ids = check_ids("prompt", tuple(prompt), self.params.config.vocab_size)
        (edits,) = with_own_values(edits_of_each(self.edits if edits is None else edits, 1))
        capture = self.capture if capture is None else expand(self.params.config, as_capture(capture))
        return self.request_of(ids, sampling, seed, sample, cache_tag=cache_tag, edits=edits, capture=capture)

    def request_of(
        self,
        prompt: TokenIds,
        sampling: Sampling,
        seed: int,
        sample: int,
        *,
        cache_tag: Any = None,
        edits: tuple[Edit, ...],
        capture: Capture,
    ) -> Request:
        """`request`, for a loop that has checked ids, sampling and seeds, and does what an engine leaves to it."""
        config = self.params.config
        placed(edits, self.variant.edits)
        if sampling.logits_fn is not None:
            self.machine.try_logits_fn(sampling.logits_fn)
        if missing := set(capture.sites) - set(self.variant.capture):
            raise ValueError(
                f"this engine was not built to capture {sorted(missing)}; name them in engine(capture=...)"
            )
        key = self.plain_key  # what nearly all requests have
        if edits or cache_tag is not None:
            key = scheduler.make_cache_key(layers=self.variant.layers, edits=edit_key(edits), tag=cache_tag)
        stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= frozenset(config.eos_token_ids)
        return Request(
            prompt=prompt,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=stops,
            cache_key=key,
            # What is captured must be computed, not found.
            use_cache=not needs_whole_prompt(capture, len(prompt)) and may_share(config, len(prompt)),
            payload=Job(
                sampling,
                child_seed(seed if sampling.seed is None else sampling.seed, sample),
                len(prompt),
                edits=edits,
                capture=capture,
            ),
            keep=True,
        )

    def check_settings(self, sampling: Sampling) -> None:
        """Raise TypeError or ValueError for settings that this model, or an engine without `generate`, cannot serve."""
        check_sampling(sampling, vocab_size=self.params.config.vocab_size)
        for name, instead in AROUND_THE_ENGINE.items():
            if getattr(sampling, name) != getattr(Sampling, name):  # the class holds the defaults
                raise ValueError(
                    f"{name}={getattr(sampling, name)!r} is for generate and stream; an engine works on ids: {instead}"
                )

    def prepare(self, sampling: Sampling) -> None:
        """Build the steps for requests with such sampling now; without it each step is built when first needed."""
        features = features_of([sampling], eos_token_ids=self.params.config.eos_token_ids)
        with self.machine.lock, set_aside(self.machine.device):
            self.machine.prepare(self.params, self.variant, features, self.report)

    def step(self, state: State) -> tuple[State, StepEvents | None]:
        """Run one step and wait for it: the new state and the results, which are None when there is nothing to do."""
        state, flight = self.launch(state)
        return (state, None) if flight is None else self.collect(state, flight)

    def launch(self, state: State) -> tuple[State, Flight | None]:
        """Schedule and start a step: the new state and the step in flight, which is None when there is nothing to do.

        Pass both to `collect`. One more step may be launched before that. Threads may launch at the same time; their
        steps run one after another.
        """
        check_state(state)
        with self.machine.lock, set_aside(self.machine.device):
            return self.launch_alone(state)

    def launch_alone(self, state: State) -> tuple[State, Flight | None]:
        """`launch` in a thread that holds the machine, with torch in no mode of the caller's."""
        if not equal(state.variant, self.variant):
            raise ValueError(
                "this state belongs to an engine with other layers, edits or captures, which computed what its cache "
                "holds; continue it with that engine, or add its tokens to a state of this engine"
            )
        if state.clock != self.machine.clock or state.machine != self.machine.name:
            state = self.recover(state)
        planned, plan = scheduler.schedule(state.scheduler, lambda: self.machine.version_of(self.params, self.variant))
        if plan is None:
            return replace(state, scheduler=planned), None
        tokens, owners = np.zeros(0, np.int64), ()
        if self.variant.capture:
            tokens, owners = captured_rows(lambda seq_id: capture_of(planned, seq_id), plan)
        with self.machine.one_step():
            output = self.machine.execute(
                self.params, self.variant, plan, lambda seq_id: job_of(planned, seq_id), tokens, self.report
            )
        flight = Flight(plan, read_back(output, len(tokens)), (self.machine.name, self.machine.clock), owners)
        flights = (*state.flights, flight.step)
        return replace(state, scheduler=planned, clock=self.machine.clock, flights=flights), flight

    def collect(self, state: State, flight: Flight) -> tuple[State, StepEvents]:
        """Wait for a launched step and add its tokens to the state.

        A sequence whose logits leave no token to draw ends with reason "error", and `StepEvents.failed` says why.
        Raises ValueError for a step that is not the oldest one that the state waits for.
        """
        check_state(state)
        if not isinstance(flight, Flight):
            raise TypeError(
                f"flight must be what launch returns with the state, found {kind_of(flight)}: launch returns None when "
                "there is nothing to do, and then there is nothing to collect"
            )
        if flight.step != next(iter(state.flights), None):
            raise ValueError(
                f"flight is not the next of the {len(state.flights)} that this state waits for: collect each once, in "
                "the order of the launches, with the state that its launch returned or a state made from it"
            )
        with self.machine.watch:
            ids = flight.results.wait()[: len(flight.plan.rows)].astype(np.int32)
        state = replace(state, flights=state.flights[1:])
        if no_tokens(ids, self.params.config.vocab_size).any():
            return self.collect_failed(state, flight, ids)
        planned, events = scheduler.commit(state.scheduler, flight.plan, ids)
        step = StepEvents(events, flight.plan, flight.results, flight.captured)
        return replace(state, scheduler=planned), step

    def collect_failed(self, state: State, flight: Flight, ids: np.ndarray) -> tuple[State, StepEvents]:
        """`collect`, where some of the ids are no tokens: their sequences end, and their blocks are cleaned."""
        machine, plan, vocab_size = self.machine, flight.plan, self.params.config.vocab_size
        with machine.lock, set_aside(machine.device):
            # A state that others have stepped past must still notice what they wrote.
            current = (state.clock, state.machine) == (machine.clock, machine.name)
            broken = machine.clean()
            clock = machine.clock if current else state.clock
        failed = failures(state.scheduler, plan, ids, vocab_size, broken)
        planned = state.scheduler
        for seq_id, _ in failed:
            planned = scheduler.finish(planned, seq_id, "error")
        # `commit` takes tokens alone: any stands for those that no sequence accepts any more.
        planned, events = scheduler.commit(planned, plan, np.where(no_tokens(ids, vocab_size), 0, ids))
        planned = scheduler.invalidate(planned, broken)
        errors = (Finished(seq_id, "error", None) for seq_id, _ in failed)
        events = replace(events, finished=(*events.finished, *errors))
        step = StepEvents(events, plan, flight.results, flight.captured, failed)
        return replace(state, scheduler=planned, clock=clock), step

    def recover(self, state: State) -> State:
        """Continue a state that the machine has left since: blocks others wrote are forgotten and computed anew.

        Of a state of another machine that is every block. Raises ValueError for a state of another model, whose machine
        is always another, or of other sizes.
        """
        check_config(state, self.params.config)
        if state.scheduler.config != self.limits:
            raise ValueError(
                f"this state belongs to an engine of other sizes, {state.scheduler.config}; this engine has "
                f"{self.limits}"
            )
        since = state.clock if state.machine == self.machine.name else -1
        settled = scheduler.park(scheduler.invalidate(state.scheduler, self.machine.writes.since(since)))
        return replace(state, scheduler=settled, clock=self.machine.clock, machine=self.machine.name)


def check_config(state: State, config: ModelConfig) -> None:
    """Raise ValueError for a state of a model of another config, whose ids may not be this model's."""
    if state.config != config:
        names = [f.name for f in fields(config) if getattr(state.config, f.name) != getattr(config, f.name)]
        theirs, ours = (
            ", ".join(f"{name}={getattr(of, name)!r}" for name in names[:3])  # enough to know it by
            for of in (state.config, config)
        )
        raise ValueError(
            f"state belongs to an engine of another model: its config has {theirs}; this engine's has {ours}; step it "
            "with an engine of its model, or add its text to a state of this one"
        )


def job_of(state: scheduler.SchedulerState, seq_id: int) -> Job:
    """What the device must know of a sequence that joins. After an `append` all it had then counts as its prompt."""
    sequence = state.sequences[seq_id]
    job: Job = sequence.request.payload._replace(prompt_length=sequence.prompt_len)
    return job._replace(tokens=scheduler.tokens(state, seq_id)) if looks_back(job.sampling) else job


def capture_of(state: scheduler.SchedulerState, seq_id: int) -> tuple[Capture, int]:
    """What is captured of a sequence, and its prompt's length: after an `append`, that of all it had then."""
    sequence = state.sequences[seq_id]
    return sequence.request.payload.capture, sequence.prompt_len


def engine(
    params: Params,
    *,
    layers: Layers | None = None,
    edits: Iterable[Edit] = (),
    capture: Capture | Iterable[str] | None = None,
    tp: TensorParallel | None = None,
    report: Report | None = None,
    **options: Any,
) -> Engine:
    """An engine for these parameters.

    - `layers`: swapped layer functions. They get their own compiled steps and never find prefixes cached by others.
    - `edits`, `capture`: what each request gets by default. A request may choose others with the same functions,
      shapes and sites.
    - `tp`: the group of ranks that holds the shards. None: the ranks that torchrun started.
    - `report`: a function called with a line of text for each thing that is built for this engine, and from now on also
      for `generate` and for engines without their own `report`. Without one, the lines are shown on a terminal.
    - `options`: those of `EngineOptions`.

    Engines of one `params` with equal options share a machine, that is, cache memory and compiled steps, so that
    another engine costs almost nothing. Raises TypeError or ValueError that names the argument.
    """
    layers = check_model(params, layers)
    (edits,), capture = edits_of_each(edits, 1), expand(params.config, as_capture(capture))
    variant = Variant(layers, channels_of([edits]), union_of_sites([capture]))
    machine = machine_for(params, variant, tp, EngineOptions(**options))
    if report is not None:
        machine.tell(report)
    return Engine(params, machine, variant, edits, capture, report)


def weights_changed(of: Params | Engine) -> None:
    """Declare that weights were written in a way that PyTorch does not count: prefixes cached so far are not reused.

    `of` is the params, for all engines of these params, or one engine. Tensors that swapped functions and edits hold
    count as weights. Needed after a write through `weight.data`, to a tensor made under `torch.inference_mode`, or by
    code that writes to the memory directly; other writes are noticed. Raises ValueError for params without a workspace.
    """
    if isinstance(of, Engine):
        of.machine.weights_changed()
        return
    if of.workspace is None:
        raise ValueError(
            "these params keep no engines (their workspace is None), so a prefix that one of them cached cannot be "
            "dropped: give weights_changed the engine, or make the params with workspace={}"
        )
    for place in list(of.workspace.values()):  # threads may add some meanwhile
        if isinstance(place, Machine):
            place.weights_changed()
