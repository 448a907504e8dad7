"""States are values: snapshots never disturb one another, forks share blocks, logs replay; searches built on them."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from examples_of import example
from tiny_models import drain

import fnllm

GREEDY = fnllm.Sampling(temperature=0, max_tokens=12, ignore_eos=True)
WARM = fnllm.Sampling(temperature=1.5, seed=5, max_tokens=12, ignore_eos=True)
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 33]
SMALL = {"num_blocks": 40, "block_size": 4}
search = example("search")


def alone(params, prompt, sampling, **changes):
    changes = {"max_tokens": 12, **changes}
    return fnllm.generate(params, [prompt], dataclasses.replace(sampling, **changes), **SMALL)[0].token_ids


def new_tokens(state, seq_id, prompt=PROMPT):
    return fnllm.tokens(state, seq_id)[len(prompt) :]


@pytest.mark.parametrize("seed", range(3))
def test_snapshots_continued_in_any_order_are_as_if_alone(tiny, seed):
    """States kept at every step, then continued from in random order, turn by turn, on one machine."""
    engine, draw = fnllm.engine(tiny, num_blocks=24, block_size=4), random.Random(seed)
    prompts = [PROMPT, PROMPT[:6] + [7, 8], [31, 41, 59]]
    expected = [alone(tiny, p, WARM) for p in prompts]
    state, ids = engine.init(), []
    for prompt in prompts:
        state, seq_id = fnllm.add(state, engine.request(prompt, WARM))
        ids.append(seq_id)
    kept = [state]
    for _ in range(40):
        at = draw.randrange(len(kept))
        state, step = engine.step(kept[at])
        if step is not None:
            kept[at] = state
            if draw.random() < 0.5 and len(kept) < 6:
                kept.append(state)
    for state in draw.sample(kept, len(kept)):
        state = drain(engine, state)
        assert [new_tokens(state, i, p) for i, p in zip(ids, prompts, strict=True)] == expected


def test_a_state_survives_other_calls_on_the_same_machine(tiny):
    engine = fnllm.engine(tiny, num_blocks=24, block_size=4)
    state, one = fnllm.add(engine.init(), engine.request(PROMPT, GREEDY))
    for _ in range(4):
        state, _ = engine.step(state)
    fnllm.generate(tiny, [[5, 6, 7, 8, 9, 10]] * 3, GREEDY, num_blocks=24, block_size=4)  # writes over its blocks
    assert new_tokens(drain(engine, state), one) == alone(tiny, PROMPT, GREEDY)


def test_fault_91_fork_two_branches_drop_one(tiny):
    """Fork after 6 tokens in blocks of 4: block 0 is shared, block 1 copied; each branch is as if alone."""
    engine = fnllm.engine(tiny, **SMALL)
    prompt = PROMPT[:5]
    state, one = fnllm.add(engine.init(), engine.request(prompt, WARM))
    for _ in range(2):
        state, _ = engine.step(state)
    assert len(fnllm.tokens(state, one)) == 7  # 6 of them computed
    state, same = fnllm.fork(state, one)
    state, other = fnllm.fork(state, one, seed=77)
    state, _ = engine.step(state)
    tables = {i: state.scheduler.sequences[i].table for i in (one, same, other)}
    assert len({table[0] for table in tables.values()}) == 1 and len({table[1] for table in tables.values()}) == 3
    assert "shared by 0, 1, 2: blocks " in fnllm.show(state)
    dropped = fnllm.abort(state, same)
    for start in (state, dropped):
        done = drain(engine, start)
        assert new_tokens(done, one, prompt) == alone(tiny, prompt, WARM)
        branch = new_tokens(done, other, prompt)
        assert branch[:2] == new_tokens(done, one, prompt)[:2] and branch[2:] != new_tokens(done, one, prompt)[2:]
        rest = alone(tiny, prompt + list(branch[:2]), WARM, seed=77, max_tokens=10)
        assert branch[2:] == rest


def test_a_state_is_short_to_print(tiny):
    engine = fnllm.engine(tiny, **SMALL)
    state, _ = fnllm.add(engine.init(), engine.request(PROMPT, GREEDY))
    assert repr(engine.step(state)[0]).startswith("State(1 running, 0 waiting, 0 kept; fnllm.show")


def test_truncate_and_append(tiny):
    engine = fnllm.engine(tiny, **SMALL)
    state, one = fnllm.add(engine.init(), engine.request(PROMPT, GREEDY))
    whole = drain(engine, state)
    back = fnllm.append(fnllm.truncate(whole, one, 11), one, [42, 43], max_tokens=5)
    expected = alone(tiny, [*fnllm.tokens(whole, one)[:11], 42, 43], GREEDY, max_tokens=5)
    assert fnllm.tokens(drain(engine, back), one)[13:] == expected
    assert new_tokens(whole, one) == alone(tiny, PROMPT, GREEDY)  # the older state is untouched


def test_a_log_replays(tiny):
    event = fnllm.event
    log = [
        event("add", PROMPT, WARM, seed=3),
        event("add", PROMPT[:4], GREEDY),
        *[event("step")] * 4,
        event("fork", 0, seed=9),
        *[event("step")] * 3,
        event("truncate", 1, 5),
        event("append", 1, [50, 51], max_tokens=4),
        event("finish", 0, "stop"),
        *[event("step")] * 9,
    ]
    engine = fnllm.engine(tiny, num_blocks=24, block_size=4)
    pictures, tokens = [], []
    for _ in range(2):
        state, results = fnllm.replay(engine, log)
        pictures.append(fnllm.show(state))
        tokens.append([fnllm.tokens(state, i) for i in (0, 1, 2)])
        fnllm.generate(tiny, [[9, 9, 9]], GREEDY, num_blocks=24, block_size=4)
    assert pictures[0] == pictures[1] and tokens[0] == tokens[1]
    assert results[0] == 0 and results[6] == 2
    first, _ = fnllm.replay(engine, log[:7])
    second, _ = fnllm.replay(engine, log[7:], first)
    assert fnllm.show(second) == pictures[0]
    with pytest.raises(ValueError, match="did you mean 'truncate'"):
        event("trunctate", 1)


@pytest.mark.parametrize("kind", [list, iter, np.array, torch.tensor])
def test_a_log_is_what_it_was_when_it_was_written(kind, tiny):
    engine = fnllm.engine(tiny, **SMALL)
    prompt, more, sites = kind(PROMPT), kind([4, 5]), ["logits"] if kind is list else iter(["logits"])
    looking = fnllm.engine(tiny, capture="logits", **SMALL)
    log = [fnllm.event("add", prompt, GREEDY), fnllm.event("step"), fnllm.event("append", 0, tokens=more)]
    looked = [fnllm.event("add", PROMPT, GREEDY, capture=sites), fnllm.event("step")]
    if kind is not iter:
        prompt[0] = more[0] = 7
    for _ in range(2):
        state, results = fnllm.replay(engine, log)
        known = [*PROMPT, int(results[1].events.tokens[0]), 4, 5]
        assert fnllm.tokens(state, 0) == tuple(known)
        assert set(fnllm.replay(looking, looked)[1][1].results.captured) == {"logits"}


def test_samples_of_one_prompt_share_its_blocks_and_differ(tiny):
    params = tiny._replace(workspace={})
    sampling = fnllm.Sampling(temperature=1.0, n=4, max_tokens=6, seed=1, ignore_eos=True)
    outs = fnllm.generate(params, [PROMPT], sampling, **SMALL)
    assert len({out.token_ids for out in outs}) == 4
    assert [out.cached_tokens for out in outs] == [0, 8, 8, 8]
    again = fnllm.generate(params, [PROMPT], sampling, **SMALL)
    assert [out.token_ids for out in again] == [out.token_ids for out in outs]


def beams_by_score(params, prompt, width, length):
    beams = [(0.0, tuple(prompt))]
    for _ in range(length):
        grown = []
        for total, ids in beams:
            logits = fnllm.score(params, [ids], capture=fnllm.Capture("logits", "last"))[0].captured["logits"][0]
            best = logits.log_softmax(-1).topk(width)
            grown += [(total + v, (*ids, i)) for v, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
        beams = sorted(grown, reverse=True)[:width]
    return beams


def test_beam_search_equals_one_without_a_cache(tiny):
    engine = fnllm.engine(tiny, **SMALL)
    found = search.beam_search(engine, PROMPT, 3, 5)
    expected = beams_by_score(tiny, PROMPT, 3, 5)
    assert [f.tokens for f in found] == [ids[9:] for _, ids in expected]
    for f, (total, _) in zip(found, expected, strict=True):
        assert math.isclose(f.logprob, total, abs_tol=1e-4)


def test_tree_and_best_of_n_report_true_log_probabilities(tiny):
    engine = fnllm.engine(tiny, **SMALL)
    found, picture = search.tree_search(engine, PROMPT, branch=3, keep=2, depth=3, span=3)
    assert len(found.tokens) == 9 and "shared by" in picture
    best = search.best_of_n(tiny, PROMPT, 4, 6)
    for f in (found, best):
        exact = fnllm.score(tiny, [PROMPT + list(f.tokens)])[0][8:].sum()
        torch.testing.assert_close(torch.tensor(f.logprob), exact, rtol=1e-4, atol=1e-3)
