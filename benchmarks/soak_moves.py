"""Random moves on one engine: requests come, run, are aborted, forked, cut, continued, kept and gone back to.

Every choice comes from the generator that is passed in, and none depends on time: equal seeds make equal moves.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from soak_reference import Drawn, Turn

import fnllm
from fnllm import scheduler
from fnllm.sampler import child_seed
from fnllm.scheduler import length_limit, prompt_limit

MOVES = {"step": 60, "arrive": 14, "fork": 4, "truncate": 4, "append": 5, "abort": 4, "keep": 3, "go_back": 2}
KEPT = 3  # states that are remembered to go back to
WIDEST = dict(stop_token_ids=[7, 11, 13, 17], logit_bias={3: 2.0, 5: -1.0})  # of all requests: tables never grow later


class Source(NamedTuple):
    """Where random requests come from."""

    rng: Random
    vocabulary: int
    longest: int  # tokens of a prompt, at most
    most: int  # new tokens, at most
    few: bool  # all drawn requests ask for every part of the sampler, so that few steps are compiled

    def prompt(self) -> list[int]:
        """A prompt over few ids, most with a common beginning, so that prefixes are shared."""
        rng = self.rng
        stem = Random(rng.randrange(3)).choices(range(20, 30), k=self.longest)
        kept = rng.choice((0, rng.randrange(self.longest), self.longest * 3 // 4))
        return stem[:kept] + rng.choices(range(20, self.vocabulary), k=rng.randrange(1, self.longest - kept + 1))

    def sampling(self) -> fnllm.Sampling:
        """Random settings; all at once, each by itself, or none."""
        rng, most = self.rng, self.rng.randrange(self.most + 1)
        least = rng.randrange(most + 1)
        if rng.random() < 0.25:
            return fnllm.Sampling(temperature=0, max_tokens=most, min_tokens=0, ignore_eos=True, seed=0)

        def some(value: Any, neutral: Any) -> Any:
            return value if self.few or rng.random() < 0.35 else neutral

        return fnllm.Sampling(
            temperature=some(rng.choice((0.5, 0.8, 1.3)), rng.choice((0, 1))),
            top_k=some(rng.choice((1, 5, 40, 300)), 0),
            top_p=some(rng.choice((0.3, 0.8, 0.95)), 1),
            min_p=some(rng.choice((0.02, 0.2)), 0),
            repetition_penalty=some(rng.choice((0.8, 1.2)), 1),
            presence_penalty=some(0.4, 0),
            frequency_penalty=some(0.3, 0),
            logit_bias=some(WIDEST["logit_bias"], ()),
            stop_token_ids=some(WIDEST["stop_token_ids"], ()),
            min_tokens=some(least, 0),
            max_tokens=most,
            logprobs=some(rng.choice((0, 2)), None),
            ignore_eos=rng.random() < 0.5,
            n=rng.choice((1, 1, 1, 2, 3)),
            seed=rng.randrange(1000),
        )


class Player:
    """One engine, the state it is at, and what is known of each of its sequences."""

    def __init__(self, name: str, engine: fnllm.Engine, source: Source, hand_in: Callable[[Turn], None]):
        self.name, self.engine, self.source, self.hand_in = name, engine, source, hand_in
        self.rng, self.limits = source.rng, engine.limits
        self.state, self.turns = engine.init(), {}  # of each sequence, a Turn whose tokens are looked up when needed
        self.flights: deque = deque()
        self.kept: list[tuple[fnllm.State, dict[int, Turn]]] = []
        self.counts: Counter[str] = Counter()

    def move(self, at: int) -> None:
        """One random move, the `at`-th of the run."""
        self.at = at
        name = self.rng.choices(list(MOVES), list(MOVES.values()))[0]
        if name in ("fork", "truncate", "append", "abort"):
            if not self.turns:
                return
            getattr(self, name)(self.rng.choice(sorted(self.turns)))
        else:
            getattr(self, name)()
        self.counts[name] += 1
        if self.rng.random() < 0.2:
            self.counts["invariants"] += 1
            scheduler.check(self.state.scheduler)

    def step(self) -> None:
        """Launch a step, and collect the one before, or none behind it."""
        self.state, launched = self.engine.launch(self.state)
        if launched is not None:
            self.flights.append(launched)
        while len(self.flights) > (0 if launched is None or self.rng.random() < 0.2 else 1):
            self.land()

    def land(self) -> None:
        """Collect the oldest launched step and note what it brought."""
        self.state, step = self.engine.collect(self.state, self.flights.popleft())
        order = {seq_id: entry for entry, seq_id in enumerate(step.plan.seq_ids.tolist())}
        self.counts["tokens"] += len(step.events.seq_ids)
        for seq_id, token in zip(step.events.seq_ids.tolist(), step.events.tokens.tolist(), strict=True):
            turn = self.turns[seq_id]
            if turn.sampling.logprobs is not None:
                drawn = drawn_of(step.results, order[seq_id], turn.sampling.logprobs, token,
                                 len(fnllm.tokens(self.state, seq_id)) - 1)  # fmt: skip
                self.turns[seq_id] = turn._replace(drawn=(*turn.drawn, drawn))
        for seq_id, reason, stop_id in step.events.finished:
            self.turns[seq_id] = self.turns[seq_id]._replace(ended=(reason, stop_id))
            self.counts[f"ended: {reason}"] += 1
            self.judge(seq_id)
            if self.rng.random() < 0.7:
                self.drop(seq_id)

    def settle(self) -> None:
        """Collect what is in flight."""
        while self.flights:
            self.land()

    def judge(self, seq_id: int) -> None:
        """Hand in a sequence as it is now, to be checked."""
        turn = self.turns[seq_id]
        label = dict(move=self.at, player=self.name, sequence=seq_id)
        self.hand_in(turn._replace(tokens=fnllm.tokens(self.state, seq_id), label=label))

    def drop(self, seq_id: int) -> None:
        self.state = fnllm.abort(self.state, seq_id)
        del self.turns[seq_id]

    def arrive(self) -> None:
        """A few requests at once, or none."""
        for _ in range(self.rng.choice((0, 1, 1, 1, 2, 6))):
            self.request(self.source.prompt(), self.source.sampling())

    def request(self, prompt: list[int], sampling: fnllm.Sampling) -> None:
        edits = tuple(edit for edit in self.engine.edits if self.rng.random() < 0.6)
        capacity = length_limit(self.limits)
        for sample in range(sampling.n):
            request = self.engine.request(prompt, replace(sampling, n=1), sample=sample, edits=edits)
            self.state, seq_id = fnllm.add(self.state, request)
            seed = child_seed(sampling.seed, sample)
            self.turns[seq_id] = Turn(
                (), len(prompt), len(prompt), sampling.max_tokens, capacity, sampling, seed, edits
            )
            self.counts["requests"] += 1

    def fork(self, seq_id: int) -> None:
        """A second branch; with a seed of its own what it draws from here on is checked, else all of it."""
        seed = self.rng.choice((None, self.rng.randrange(1000)))
        turn, known = self.turns[seq_id], len(fnllm.tokens(self.state, seq_id))
        self.state, new_id = fnllm.fork(self.state, seq_id, seed=seed)
        own = {} if seed is None else dict(start=known, seed=child_seed(seed, 0), ended=None)
        self.turns[new_id] = turn._replace(**own)

    def truncate(self, seq_id: int) -> None:
        turn = self.turns[seq_id]
        length = self.rng.randrange(1, len(fnllm.tokens(self.state, seq_id)) + 1)
        self.state = fnllm.truncate(self.state, seq_id, length)
        self.turns[seq_id] = turn._replace(
            start=min(turn.start, length),
            prompt_length=min(turn.prompt_length, length),
            ended=None,
            drawn=tuple(one for one in turn.drawn if one.position < length),
        )

    def append(self, seq_id: int) -> None:
        """More tokens, and a new turn behind them."""
        known = len(fnllm.tokens(self.state, seq_id))
        tokens = self.rng.choices(range(20, 30), k=self.rng.randrange(4))
        most = self.rng.choice((None, self.rng.randrange(self.source.most)))
        if known + len(tokens) > prompt_limit(self.limits):
            try:
                fnllm.append(self.state, seq_id, tokens)
            except ValueError:
                self.counts["append refused"] += 1
                return
            raise AssertionError(f"move {self.at}: {known} + {len(tokens)} tokens were accepted, over the limit")
        self.judge(seq_id)
        self.state = fnllm.append(self.state, seq_id, tokens, max_tokens=most)
        turn, length = self.turns[seq_id], known + len(tokens)
        most = turn.sampling.max_tokens if most is None else most
        self.turns[seq_id] = turn._replace(start=length, prompt_length=length, most=most, ended=None, drawn=())

    def abort(self, seq_id: int) -> None:
        if self.rng.random() < 0.5:
            self.judge(seq_id)
        self.drop(seq_id)

    def keep(self) -> None:
        """Remember this state, and forget one at random if there are many."""
        self.settle()
        self.kept.append((self.state, dict(self.turns)))
        if len(self.kept) > KEPT:
            self.kept.pop(self.rng.randrange(KEPT))

    def go_back(self) -> None:
        """Continue a state of before; what is in flight for the present one is lost with it, or was collected."""
        if self.kept:
            if self.rng.random() < 0.5:
                self.settle()
            self.flights.clear()
            self.state, turns = self.rng.choice(self.kept)
            self.turns = dict(turns)

    def drain(self) -> None:
        """Step until nothing is left to do; all sequences are judged and gone then."""
        while True:
            self.state, launched = self.engine.launch(self.state)
            if launched is None and not self.flights:
                break
            self.flights.extend([] if launched is None else [launched])
            while len(self.flights) > (launched is not None):
                self.land()
        for seq_id in sorted(self.turns):
            self.judge(seq_id)
            self.drop(seq_id)

    def finish(self) -> list[str]:
        """Drain the present state and those kept; says what is wrong with the blocks then."""
        problems = []
        for number, (state, turns) in enumerate([(self.state, self.turns), *self.kept]):
            if number:
                self.state, self.turns = state, dict(turns)
            self.drain()
            scheduler.check(self.state.scheduler)
            metrics = scheduler.metrics(self.state.scheduler)
            if not number:
                self.counts["preemptions"] = metrics.counters.preemptions
                self.counts["cached prompt tokens"] = metrics.counters.cached_tokens
            if metrics.blocks_held or metrics.running or metrics.waiting or metrics.kept:
                problems.append(f"{self.name}: not empty at the end: {metrics}")
        self.kept.clear()
        return problems


def drawn_of(results: Any, entry: int, count: int, token: int, position: int) -> Drawn:
    """An entry's log-probabilities in a step's results."""
    top = ()
    if count:
        ids, values = results.top_ids[entry, :count].tolist(), results.top_logprobs[entry, :count].tolist()
        top = tuple(zip(ids, values, strict=True))
    return Drawn(position, token, float(results.logprob[entry]), top)


def widest(sampling: fnllm.Sampling) -> fnllm.Sampling:
    """The same request with the longest lists that any request of a run has."""
    return replace(sampling, **WIDEST, min_tokens=1, max_tokens=max(2, sampling.max_tokens), ignore_eos=False)
