"""A device that obeys plans to the letter, a model whose every token depends on its whole history, and an oracle.

The cache keeps for each slot (token, position, digest of the history, weights). The next token is computed from what
the slots named by the block table hold, so a stale, foreign or missing block gives another token. `next_token` computes
the same from the plain list of tokens, without a cache.
"""

import numpy as np

from fnllm import scheduler

START = 17


def digest(history: int, token: int, position: int, weights: int) -> int:
    """The next link of the chain; hashes of ints are the same in every run."""
    return hash((history, token, position, weights)) & 0x7FFFFFFF


def next_token(tokens, weights: int, vocab: int) -> int:
    """The token after `tokens`, from all of them."""
    history = START
    for position, token in enumerate(tokens):
        history = digest(history, token, position, weights)
    return history % vocab


class Device:
    """Row lengths, block tables, sampled tokens and the cache, changed only as plans say."""

    def __init__(self, config: scheduler.SchedulerConfig, vocab: int):
        self.config, self.vocab = config, vocab
        self.cache: dict[int, tuple] = {}
        self.length, self.last, self.weights, self.tables = {}, {}, {}, {}
        self.written: set[int] = set()  # blocks, since whoever wants to know emptied it

    def copy(self) -> "Device":
        other = Device(self.config, self.vocab)
        other.cache, other.length, other.last = dict(self.cache), dict(self.length), dict(self.last)
        other.weights, other.tables = dict(self.weights), {row: list(table) for row, table in self.tables.items()}
        return other

    def run(self, plan: scheduler.Plan, weights_of: dict[int, int]) -> np.ndarray:
        """Executes one plan and returns a token for each entry, noise where nothing is sampled."""
        size = self.config.block_size
        self._copy_blocks(plan)
        for join in plan.joins:
            self.length[join.row], self.tables[join.row] = join.length, join.block_table.tolist()
            self.weights[join.row], self.last[join.row] = weights_of[join.seq_id], None
        joined = {join.row for join in plan.joins}
        for row, column, block in zip(*(part.tolist() for part in plan.table_updates), strict=True):
            assert row not in joined and column == len(self.tables[row]), "a table grows by one entry at a time"
            self.tables[row].append(block)
        rows, lens = plan.rows.tolist(), plan.query_lens.tolist()
        assert len(set(rows)) == len(rows) and min(lens) >= 1 and sum(lens) <= self.config.max_num_batched_tokens
        assert lens[: plan.num_decode] == [1] * plan.num_decode and plan.samples[: plan.num_decode].all()
        assert plan.starts.tolist() == [self.length[row] for row in rows], "the row's length is not the plan's"
        given = iter(plan.prefill_tokens.tolist())
        inputs = [
            [self.last[row]] if entry < plan.num_decode else [next(given) for _ in range(count)]
            for entry, (row, count) in enumerate(zip(rows, lens, strict=True))
        ]
        assert next(given, None) is None
        written = [
            {self._slot(row, self.length[row] + at) for at in range(count)}
            for row, count in zip(rows, lens, strict=True)
        ]
        every = [slot for slots in written for slot in slots]
        assert len(set(every)) == len(every), "two entries write one slot"
        self.written |= {slot // size for slot in every}
        result = np.full(len(rows), -7)
        for entry, (row, count) in enumerate(zip(rows, lens, strict=True)):
            start, weights = self.length[row], self.weights[row]
            read = [self._slot(row, position) for position in range(start)]
            foreign = set(every) - written[entry]
            assert not foreign & set(read), "an entry reads what another writes in the same step"
            history = START
            for position, slot in enumerate(read):
                token, at, after, by = self.cache[slot]
                history = digest(history, token, at, by)
                assert (at, after) == (position, history), f"row {row}: slot {slot} holds another prefix"
            for position, token in enumerate(inputs[entry], start):
                history = digest(history, token, position, weights)
                self.cache[self._slot(row, position)] = (token, position, history, weights)
            self.length[row] = start + count
            if plan.samples[entry]:
                result[entry] = self.last[row] = history % self.vocab
        assert all(len(self.tables[row]) == -(-self.length[row] // size) for row in rows)
        return result

    def _copy_blocks(self, plan: scheduler.Plan) -> None:
        size, (sources, targets) = self.config.block_size, (part.tolist() for part in plan.copies)
        assert not set(sources) & set(targets) and len(set(targets)) == len(targets)
        self.written |= set(targets)
        for source, target in zip(sources, targets, strict=True):
            for offset in range(size):
                self.cache[target * size + offset] = self.cache.get(source * size + offset)

    def _slot(self, row: int, position: int) -> int:
        block = self.tables[row][position // self.config.block_size]
        return block * self.config.block_size + position % self.config.block_size


class Engine:
    """A scheduler, a device and the oracle: every accepted token and every ending is compared with `expected`.

    `depth` plans may be in flight. `expected[seq_id]` is the plain token list, `turn[seq_id]` the length at which the
    present output began.
    """

    def __init__(self, config: scheduler.SchedulerConfig, vocab: int = 3):
        self.state, self.device, self.vocab = scheduler.init(config), Device(config, vocab), vocab
        self.flight: list[tuple[scheduler.Plan, np.ndarray]] = []
        self.expected, self.turn, self.most, self.weights, self.requests = {}, {}, {}, {}, {}
        self.reasons: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        self.plans: list[scheduler.Plan] = []

    def copy(self) -> "Engine":
        other = Engine(self.state.config, self.vocab)
        other.state, other.device, other.flight = self.state, self.device.copy(), list(self.flight)
        other.expected = {seq_id: list(tokens) for seq_id, tokens in self.expected.items()}
        for name in ("turn", "most", "weights", "requests", "reasons", "cached"):
            setattr(other, name, dict(getattr(self, name)))
        return other

    def add(self, prompt, max_tokens: int, weights: int = 0, **options) -> int:
        request = scheduler.Request(
            tuple(prompt), max_tokens, cache_key=scheduler.make_cache_key(weights=weights), **options
        )
        self.state, seq_id = scheduler.add(self.state, request)
        self.expected[seq_id], self.turn[seq_id], self.most[seq_id] = list(prompt), len(prompt), max_tokens
        self.weights[seq_id], self.requests[seq_id] = weights, request
        return seq_id

    def schedule(self) -> scheduler.Plan | None:
        able = self._able_to_decode()
        self.state, plan = scheduler.schedule(self.state)
        if plan is not None:
            still = {seq_id for seq_id in able if self.state.sequences[seq_id].row >= 0}
            still -= {join.seq_id for join in plan.joins}  # preempted, and back at once thanks to the prefix cache
            assert still <= set(plan.seq_ids[: plan.num_decode].tolist()), "a running sequence got no token"
            self.plans.append(plan)
            self.flight.append((plan, self.device.run(plan, self.weights)))
        return plan

    def _able_to_decode(self) -> set[int]:
        rows = self.state.rows
        able = (rows.seq_id >= 0) & rows.decoding & (rows.computed + 1 < rows.limit)
        return set(rows.seq_id[able].tolist())

    def commit(self) -> scheduler.Events:
        plan, tokens = self.flight.pop(0)
        self.state, events = scheduler.commit(self.state, plan, tokens)
        ended = {entry.seq_id: entry for entry in events.finished}
        for seq_id, token in zip(events.seq_ids.tolist(), events.tokens.tolist(), strict=True):
            expected = self.expected[seq_id]
            assert seq_id not in self.reasons, f"sequence {seq_id} got a token after its end"
            assert token == next_token(expected, self.weights[seq_id], self.vocab), f"sequence {seq_id}: wrong token"
            made, request = len(expected) - self.turn[seq_id], self.requests[seq_id]
            expected.append(token)
            stops = token in request.stop_token_ids and made >= request.min_tokens
            want = ("stop", token) if stops else ("length", None) if len(expected) >= self.limit(seq_id) else None
            got = ended.pop(seq_id)[1:] if seq_id in ended else None
            assert got == want, f"sequence {seq_id} ended with {got}, not {want}"
            if want:
                self.reasons[seq_id] = want[0]
        for seq_id, entry in ended.items():
            assert len(self.expected[seq_id]) >= self.limit(seq_id) and entry[1:] == ("length", None)
            self.reasons[seq_id] = "length"
        self.cached.update(events.cached)
        return events

    def limit(self, seq_id: int) -> int:
        return min(self.turn[seq_id] + self.most[seq_id], scheduler.length_limit(self.state.config))

    def step(self) -> scheduler.Events | None:
        return self.commit() if self.schedule() is not None or self.flight else None

    def drain(self, depth: int = 1, most: int = 3000) -> None:
        """Runs until nothing is left to do, with `depth` plans in flight; fails rather than run for ever."""
        for _ in range(most):
            while len(self.flight) < depth and self.schedule() is not None:
                pass
            if not self.flight:
                assert scheduler.metrics(self.state).running == len(self.state.waiting) == 0, scheduler.show(self.state)
                return
            self.commit()
        raise AssertionError(f"no end after {most} steps:\n{scheduler.show(self.state)}")

    def fork(self, seq_id: int) -> int:
        self.state, new = scheduler.fork(self.state, seq_id)
        self.expected[new] = list(self.expected[seq_id])
        for table in (self.turn, self.most, self.weights, self.requests, self.reasons):
            if seq_id in table:
                table[new] = table[seq_id]
        return new

    def truncate(self, seq_id: int, length: int) -> None:
        self.state = scheduler.truncate(self.state, seq_id, length)
        del self.expected[seq_id][length:]
        self.turn[seq_id] = min(self.turn[seq_id], length)

    def append(self, seq_id: int, tokens, max_tokens: int | None = None) -> None:
        self.state = scheduler.append(self.state, seq_id, tokens, max_tokens)
        self.expected[seq_id] += tokens
        self.turn[seq_id] = len(self.expected[seq_id])
        self.most[seq_id] = self.requests[seq_id].max_tokens if max_tokens is None else max_tokens
        self.reasons.pop(seq_id, None)

    def finish(self, seq_id: int, reason: str = "stop string") -> None:
        self.state = scheduler.finish(self.state, seq_id, reason)
        self.reasons[seq_id] = reason

    def abort(self, seq_id: int) -> None:
        self.state = scheduler.abort(self.state, seq_id)
        self.reasons[seq_id] = "abort"

    def invalidate(self, blocks) -> None:
        """Loses blocks: what the device has in them is overwritten with noise."""
        self.state = scheduler.invalidate(self.state, blocks)
        size = self.state.config.block_size
        self.device.written |= set(blocks)
        for slot in (block * size + offset for block in blocks for offset in range(size)):
            self.device.cache[slot] = (-1, -1, -1, -1)

    def check(self) -> None:
        scheduler.check(self.state)
        for seq_id in self.state.sequences:
            assert list(scheduler.tokens(self.state, seq_id)) == self.expected[seq_id]

    def alive(self) -> list[int]:
        return sorted(seq_id for seq_id, record in self.state.sequences.items() if record.reason is None)


def run_alone(request: scheduler.Request, weights: int, vocab: int, limit: int) -> list[int]:
    """The output of a request by itself, without cache, paging or chunks."""
    tokens = list(request.prompt)
    limit = min(limit, len(tokens) + request.max_tokens)
    while len(tokens) < limit:
        made = len(tokens) - len(request.prompt)
        tokens.append(next_token(tokens, weights, vocab))
        if tokens[-1] in request.stop_token_ids and made >= request.min_tokens:
            break
    return tokens[len(request.prompt) :]


def make(blocks=100, size=4, seqs=8, budget=64, length=256, **options) -> Engine:
    """An engine of small sizes."""
    return Engine(scheduler.SchedulerConfig(blocks, size, seqs, budget, length, **options), vocab=11)


def started(steps=3, prompt=(1, 2, 3), most=20, **options) -> tuple[Engine, int]:
    """An engine after some steps of one sequence, and the sequence's id."""
    engine = make(**options)
    seq_id = engine.add(prompt, most, keep=True)
    for _ in range(steps):
        engine.step()
    return engine, seq_id
