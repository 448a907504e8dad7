"""The engine: a loop body around the pure step. `step` is `schedule`, launch, read back, `commit`."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from fnllm_weights import Params

from fnllm import scheduler
from fnllm.distributed import world
from fnllm.layers import Layers
from fnllm.machine import Job, Machine, Variant, looks_back
from fnllm.options import EngineOptions, resolve
from fnllm.readback import Readback, read_back
from fnllm.sampler import child_seed
from fnllm.sampling import Sampling
from fnllm.scheduler import Events, Plan, Request, SchedulerConfig
from fnllm.state import State
from fnllm.taps import Edit, check_sites
from fnllm.tensor_parallel import TensorParallel


class Flight(NamedTuple):
    """A launched step whose results are not read yet."""

    plan: Plan
    results: Readback


class StepEvents(NamedTuple):
    """What a step brought: the scheduler's events, and the step's other results in the order of its plan's entries."""

    events: Events
    plan: Plan
    results: Readback


class Engine:
    """Parameters, a variant of the layer functions, and the machine they run on. States are values outside of it."""

    def __init__(self, params: Params, machine: Machine, variant: Variant):
        self.params, self.machine, self.variant = params, machine, variant

    @property
    def limits(self) -> SchedulerConfig:
        options = self.machine.options
        return SchedulerConfig(
            num_blocks=self.machine.num_blocks,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            prefix_cache=options.prefix_cache,
            chunked_prefill=options.chunked_prefill,
            max_chunk=options.max_chunk,
        )

    def init(self) -> State:
        """A state without requests and with an empty prefix cache."""
        return State(scheduler.init(self.limits), self.machine.clock)

    def request(
        self, prompt: Iterable[int], sampling: Sampling, *, seed: int = 0, sample: int = 0, cache_tag: Any = None
    ) -> Request:
        """A request for `add`. `sample` is the number of this copy among a prompt's n; `cache_tag` keeps requests apart
        in the prefix cache that must not share blocks."""
        prompt, config = tuple(prompt), self.params.config
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(config.eos_token_ids))
        return Request(
            prompt=prompt,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=stops,
            cache_key=scheduler.make_cache_key(
                params=self.machine.version_of(self.params),
                layers=self.variant.layers,
                edits=self.variant.edits,
                tag=cache_tag,
            ),
            # A captured or scored prompt must be computed, not found.
            use_cache=not self.variant.capture,
            payload=Job(sampling, child_seed(seed if sampling.seed is None else sampling.seed, sample), len(prompt)),
            keep=True,
        )

    def step(self, state: State) -> tuple[State, StepEvents | None]:
        """One step, waited for; None when there is nothing to do."""
        state, flight = self.launch(state)
        return (state, None) if flight is None else self.collect(state, flight)

    def launch(self, state: State) -> tuple[State, Flight | None]:
        """Schedule a step and start it. The state then waits for `collect`; one more step may be launched before."""
        if state.clock != self.machine.clock:
            state = self.recover(state)
        planned, plan = scheduler.schedule(state.scheduler)
        if plan is None:
            return replace(state, scheduler=planned), None
        output = self.machine.execute(self.params, self.variant, plan, lambda seq_id: job_of(planned, seq_id))
        results = read_back(output, int(plan.query_lens.sum()))
        return State(planned, self.machine.clock), Flight(plan, results)

    def collect(self, state: State, flight: Flight) -> tuple[State, StepEvents]:
        """Wait for a launched step and take its tokens into the state."""
        with self.machine.watch:
            ids = flight.results.wait()[: len(flight.plan.rows)].astype(np.int32)
        committed, events = scheduler.commit(state.scheduler, flight.plan, ids)
        return replace(state, scheduler=committed), StepEvents(events, flight.plan, flight.results)

    def recover(self, state: State) -> State:
        """Continue a state that the machine has left since: blocks written by others are forgotten and computed anew."""
        disturbed = np.flatnonzero(self.machine.written > state.clock).tolist()
        settled = scheduler.invalidate(state.scheduler, disturbed)
        running = [int(seq_id) for seq_id in settled.rows.seq_id if seq_id >= 0]
        for seq_id in sorted(running, reverse=True):  # the oldest ends up first in line
            settled = scheduler.park(settled, seq_id)
        return State(settled, self.machine.clock)


def job_of(state: scheduler.SchedulerState, seq_id: int) -> Job:
    """What the device must know of a sequence that joins."""
    job: Job = state.sequences[seq_id].request.payload
    return job._replace(tokens=scheduler.tokens(state, seq_id)) if looks_back(job.sampling) else job


def engine(
    params: Params,
    *,
    layers: Layers | None = None,
    edits: Iterable[Edit] = (),
    capture: Iterable[str] = (),
    tp: TensorParallel | None = None,
    report: Callable[[str], None] | None = None,
    **options: Any,
) -> Engine:
    """An engine for these parameters; `options` are those of `EngineOptions`.

    Engines of one `params` with equal options share a machine, so that another one costs nothing: no pool, no compiling
    of what is compiled. A swapped layer or an edit has steps of its own and never sees others' cached prefixes.
    """
    wanted = EngineOptions(**options)
    variant = Variant(layers or Layers(), tuple(edits), tuple(capture))
    check_sites(params.config, (*variant.capture, *(edit.site for edit in variant.edits)))
    tp = tp or world(params.shard)
    workspace = {} if params.workspace is None else params.workspace
    key = (wanted, tp)
    if key not in workspace:
        resolved = resolve(wanted, params.config, params.tree["embed"].device.type == "cuda")
        workspace[key] = Machine(params, resolved, tp, report or (say if tp.rank == 0 else quiet))
    return Engine(params, workspace[key], variant)


def quiet(line: str) -> None:
    """Say nothing: another rank builds the same and tells of it."""


def say(line: str) -> None:
    """Tell a person at a terminal what is being built."""
    if sys.stderr.isatty():
        print(f"fnllm: {line}", file=sys.stderr)
