"""Random lists of events on random small configurations, every token compared with the oracle."""

import random

import pytest
from unit.scheduler.simulator import Engine

from fnllm import scheduler


def random_config(rng: random.Random) -> scheduler.SchedulerConfig:
    chunked = rng.random() < 0.8
    return scheduler.SchedulerConfig(
        num_blocks=rng.randint(1, 12),
        block_size=rng.randint(1, 5),
        max_num_seqs=rng.randint(1, 4),
        max_num_batched_tokens=rng.randint(1, 12),
        max_model_len=rng.randint(2, 24),
        prefix_cache=rng.random() < 0.8,
        chunked_prefill=chunked,
        max_chunk=rng.choice([None, 1, 3]) if chunked else None,
    )


def add_random(engine: Engine, rng: random.Random) -> None:
    limit = scheduler.prompt_limit(engine.state.config)
    if engine.expected and rng.random() < 0.3:  # continue or repeat a text that may be in the cache
        prompt = rng.choice(list(engine.expected.values()))[: rng.randint(1, limit)]
    else:
        prompt = [rng.randrange(engine.vocab) for _ in range(rng.randint(1, limit))]
    stops = frozenset(rng.sample(range(engine.vocab), rng.choice([0, 0, 1])))
    engine.add(
        prompt[:limit],
        rng.choice([0, 1, 2, 5, 30]),
        weights=rng.choice([0, 0, 0, 1]),
        min_tokens=rng.choice([0, 2]),
        stop_token_ids=stops,
        use_cache=rng.random() < 0.9,
        keep=rng.random() < 0.4,
    )


def act(engine: Engine, rng: random.Random, depth: int) -> None:
    """One random event."""
    everyone, alive = sorted(engine.state.sequences), engine.alive()
    event = rng.choices(
        ["add", "schedule", "commit", "finish", "abort", "fork", "truncate", "append", "preempt", "park", "invalidate"],
        [5, 30, 25, 1, 1, 3, 2, 2, 2, 1, 1],
    )[0]
    if event == "add":
        add_random(engine, rng)
    elif event == "schedule" and len(engine.flight) < depth:
        engine.schedule()
    elif event == "commit" and engine.flight:
        engine.commit()
    elif event == "finish" and alive:
        engine.finish(rng.choice(alive))
    elif event == "abort" and everyone:
        engine.abort(rng.choice(everyone))
    elif event == "fork" and everyone:
        engine.fork(rng.choice(everyone))
    elif event == "truncate" and everyone:
        seq_id = rng.choice(everyone)
        engine.truncate(seq_id, rng.randint(1, len(engine.expected[seq_id])))
    elif event == "append" and everyone:
        seq_id = rng.choice(everyone)
        room = scheduler.prompt_limit(engine.state.config) - len(engine.expected[seq_id])
        if room >= 0:
            count = rng.randint(0, min(room, 6))
            engine.append(seq_id, [rng.randrange(engine.vocab) for _ in range(count)], rng.choice([None, 1, 4]))
    elif event in ("preempt", "park") and alive:
        engine.state = getattr(scheduler, event)(engine.state, rng.choice(alive))
    elif event == "invalidate":
        blocks = range(engine.state.config.num_blocks)
        engine.invalidate(rng.sample(blocks, rng.randint(1, min(3, len(blocks)))))


def run(seed: int, events: int = 80) -> Engine:
    rng = random.Random(seed)
    engine, depth = Engine(random_config(rng), vocab=rng.choice([2, 3, 5])), rng.randint(1, 3)
    for _ in range(rng.randint(1, events)):
        act(engine, rng, depth)
        engine.check()
    before, text = engine.state, scheduler.show(engine.state)
    engine.copy().drain(depth)
    assert engine.state is before and scheduler.show(before) == text
    scheduler.check(before)
    engine.drain(rng.randint(1, 2))
    engine.check()
    for seq_id in sorted(engine.state.sequences):
        engine.abort(seq_id)
    engine.check()
    assert scheduler.metrics(engine.state).blocks_held == 0
    return engine


@pytest.mark.parametrize("start", range(0, 600, 100))
def test_random_events_give_the_oracle_s_tokens(start):
    for seed in range(start, start + 100):
        run(seed)


@pytest.mark.parametrize("start", range(0, 150, 50))
def test_going_back_to_an_old_state_on_the_same_device(start):
    for seed in range(start, start + 50):
        rng = random.Random(seed)
        engine, depth = Engine(random_config(rng), vocab=3), rng.randint(1, 3)
        for _ in range(rng.randint(1, 60)):
            act(engine, rng, depth)
        old = engine.copy()
        old.device = engine.device
        engine.device.written.clear()
        for _ in range(rng.randint(1, 60)):
            act(engine, rng, depth)
        old.state = scheduler.park(old.state)
        old.state = scheduler.invalidate(old.state, engine.device.written)
        old.check()
        old.drain(depth)
        old.check()
