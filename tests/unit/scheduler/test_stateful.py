"""Hypothesis looks for a list of events, in any order and with plans in flight, after which a token is wrong."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from unit.scheduler.simulator import Engine

from fnllm import scheduler

VOCAB = 3
TOKENS = st.integers(0, VOCAB - 1)


@st.composite
def configs(draw) -> scheduler.SchedulerConfig:
    chunked = draw(st.booleans())
    return scheduler.SchedulerConfig(
        num_blocks=draw(st.integers(1, 10)),
        block_size=draw(st.integers(1, 4)),
        max_num_seqs=draw(st.integers(1, 4)),
        max_num_batched_tokens=draw(st.integers(1, 10)),
        max_model_len=draw(st.integers(2, 20)),
        prefix_cache=draw(st.booleans()),
        chunked_prefill=chunked,
        max_chunk=draw(st.sampled_from([None, 1, 3])) if chunked else None,
    )


class Machine(RuleBasedStateMachine):
    """Events on an `Engine`, which compares every token and ending with the oracle."""

    @initialize(config=configs(), depth=st.integers(1, 3))
    def start(self, config, depth):
        self.engine, self.depth = Engine(config, VOCAB), depth
        self.past = []

    def pick(self, data, ids):
        return data.draw(st.sampled_from(ids))

    def everyone(self):
        return sorted(self.engine.state.sequences)

    @rule(
        data=st.data(),
        most=st.sampled_from([0, 1, 3, 20]),
        least=st.sampled_from([0, 2]),
        stops=st.frozensets(TOKENS, max_size=1),
        weights=st.integers(0, 1),
        keep=st.booleans(),
        use_cache=st.booleans(),
    )
    def add(self, data, most, least, stops, weights, keep, use_cache):
        limit = scheduler.prompt_limit(self.engine.state.config)
        prompt = data.draw(st.lists(TOKENS, min_size=1, max_size=limit))
        options = {"min_tokens": least, "stop_token_ids": stops, "keep": keep, "use_cache": use_cache}
        self.engine.add(prompt, most, weights, **options)

    @precondition(lambda self: len(self.engine.flight) < self.depth)
    @rule()
    def schedule(self):
        self.engine.schedule()

    @precondition(lambda self: self.engine.flight)
    @rule()
    def commit(self):
        self.engine.commit()

    @rule(steps=st.integers(1, 6))
    def run(self, steps):
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: self.engine.alive())
    @rule(data=st.data(), event=st.sampled_from(["finish", "preempt", "park"]))
    def disturb(self, data, event):
        seq_id = self.pick(data, self.engine.alive())
        if event == "finish":
            self.engine.finish(seq_id)
        else:
            self.engine.state = getattr(scheduler, event)(self.engine.state, seq_id)

    @precondition(lambda self: self.everyone())
    @rule(data=st.data(), event=st.sampled_from(["abort", "fork"]))
    def abort_or_fork(self, data, event):
        getattr(self.engine, event)(self.pick(data, self.everyone()))

    @precondition(lambda self: self.everyone())
    @rule(data=st.data())
    def truncate(self, data):
        seq_id = self.pick(data, self.everyone())
        self.engine.truncate(seq_id, data.draw(st.integers(1, len(self.engine.expected[seq_id]))))

    @precondition(lambda self: self.everyone())
    @rule(data=st.data(), most=st.sampled_from([None, 0, 2]))
    def append(self, data, most):
        seq_id = self.pick(data, self.everyone())
        room = scheduler.prompt_limit(self.engine.state.config) - len(self.engine.expected[seq_id])
        if room >= 0:
            self.engine.append(seq_id, data.draw(st.lists(TOKENS, max_size=min(room, 5))), most)

    @rule(data=st.data())
    def invalidate(self, data):
        blocks = st.integers(0, self.engine.state.config.num_blocks - 1)
        self.engine.invalidate(data.draw(st.sets(blocks, min_size=1, max_size=3)))

    @rule()
    def remember(self):
        self.past.append((self.engine.state, scheduler.show(self.engine.state)))

    @invariant()
    def holds(self):
        self.engine.check()

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.drain(self.depth)
            self.engine.check()
            for state, text in self.past:
                scheduler.check(state)
                assert scheduler.show(state) == text


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
