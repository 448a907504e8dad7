"""Requests that fail while running: logits with NaN, no token left to draw, functions that return no logits."""

import random

import numpy as np
import pytest
import torch
from tiny_models import GREEDY, tiny

import fnllm
from fnllm import scheduler
from fnllm.failures import awaits
from fnllm.sampler import Sampled, sample

PROMPTS = [[1, 2], [3, 4, 5], [6]]
SMALL = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 4}


def settings(**options):
    return fnllm.Sampling(temperature=0, max_tokens=6, ignore_eos=True, **options)


def alone(**options):
    return [fnllm.generate(tiny(), one, settings(), **SMALL)[0].token_ids for one in PROMPTS]


def nan_after_five(logits, history):
    return torch.where((history.lengths >= 5)[:, None], torch.nan, logits)


def forbid_all(logits, history):
    return torch.full_like(logits, -torch.inf)


def times(x, ctx, factor):
    return x * factor[:, None]


def test_logits_that_turn_to_nan_end_their_request_and_no_other():
    asked = [settings(), settings(logits_fn=nan_after_five, logprobs=2), settings()]
    site = "layers.1.resid_post"
    done = fnllm.generate(tiny(), PROMPTS, asked, errors="return", capture=site, **SMALL)
    wanted = alone()
    assert [one.finish_reason for one in done] == ["length", "error", "length"]
    assert [done[0].token_ids, done[2].token_ids] == [wanted[0], wanted[2]]
    broken = done[1]
    assert broken.token_ids == wanted[1][:2] and len(broken.logprobs) == 2
    assert broken.captured_at == (0, 1, 2, 3, 4) and broken.captured[site].shape == (5, 24)
    assert isinstance(broken.error, FloatingPointError)
    for part in ("prompts[1]", "step", "position 5", "NaN", "logits_fn (nan_after_five)"):
        assert part in str(broken.error)


def test_without_errors_returned_the_call_raises_and_the_next_one_works():
    with pytest.raises(FloatingPointError, match=r"prompts\[1\], sample 0: in step \d+, .* position 5"):
        fnllm.generate(tiny(), PROMPTS, [settings(), settings(logits_fn=nan_after_five, n=2), settings()], **SMALL)
    assert [one.token_ids for one in fnllm.generate(tiny(), PROMPTS, settings(), **SMALL)] == alone()


def test_a_request_that_forbids_every_token_says_so():
    asked = [settings(logits_fn=forbid_all), settings(min_tokens=1, stop_token_ids=range(41)), settings()]
    done = fnllm.generate(tiny(), PROMPTS, asked, errors="return", **SMALL)
    for one in done[:2]:
        assert isinstance(one.error, ValueError) and "-inf" in str(one.error) and one.token_ids == ()
    assert done[2].token_ids == alone()[2]


def test_a_broken_weight_fails_every_request_of_a_stream():
    params = tiny(3)
    weight = params.tree["layers"][1]["down"]
    kept = weight[3, 3].item()
    try:
        weight[3, 3] = torch.nan
        chunks = list(fnllm.stream(params, PROMPTS, settings(n=2), errors="return", **SMALL))
    finally:
        weight[3, 3] = kept
    assert sorted((one.index, one.sample) for one in chunks) == [(i, n) for i in range(3) for n in range(2)]
    assert all("NaN" in str(one.completion.error) for one in chunks)
    assert not any("logits_fn" in str(one.completion.error) for one in chunks), "they have none"


def test_blocks_that_held_nan_are_clean_for_whoever_has_them_next():
    params = tiny(5)  # a machine of its own, with one block for each of three rows of four
    edit = fnllm.Edit("layers.0.resid_post", times, torch.tensor(torch.nan))
    worker = fnllm.engine(params, edits=[edit], **SMALL, num_blocks=4)
    state, broken = fnllm.add(worker.init(), worker.request([3, 4, 5], GREEDY))
    state, healthy = fnllm.add(state, worker.request([1, 2], settings(), edits=()))
    state, step = worker.step(state)
    assert [seq_id for seq_id, _ in step.failed] == [broken] and "position 3" in str(step.failed[0][1])
    assert [(end.seq_id, end.reason) for end in step.events.finished] == [(broken, "error")]
    assert fnllm.tokens(state, broken) == (3, 4, 5)
    cache = worker.machine.resident.cache
    assert all(pool.isfinite().all() for pool in (*cache.k, *cache.v))
    while step is not None:
        state, step = worker.step(state)
    assert fnllm.tokens(state, healthy)[2:] == fnllm.generate(params, [1, 2], settings(), **SMALL)[0].token_ids


def test_a_prompt_whose_first_chunk_breaks_its_keys_ends_there():
    """Its blocks are cleaned; computed anew they would only break again, for ever."""
    params = tiny(31)
    edit = fnllm.Edit("layers.0.resid_post", times, torch.tensor(torch.nan))
    worker = fnllm.engine(params, edits=[edit], max_chunk=4, **SMALL)
    state, broken = fnllm.add(worker.init(), worker.request(range(1, 21), GREEDY))
    state, healthy = fnllm.add(state, worker.request(range(1, 11), settings(), edits=()))
    step, failed = None, []
    for _ in range(40):
        state, step = worker.step(state)
        if step is None:
            break
        failed += step.failed
    assert step is None, "no end"
    assert [seq_id for seq_id, _ in failed] == [broken] and "NaN" in str(failed[0][1])
    assert fnllm.tokens(state, broken) == tuple(range(1, 21))
    wanted = fnllm.generate(params, [list(range(1, 11))], settings(), **SMALL)[0].token_ids
    assert fnllm.tokens(state, healthy)[10:] == wanted


def test_a_failure_of_a_step_that_no_longer_counts_is_none():
    state = scheduler.init(scheduler.SchedulerConfig(8, 4, 2, 16, 32))
    state, seq_id = scheduler.add(state, scheduler.Request((1, 2, 3), 5))
    state, first = scheduler.schedule(state)
    state = scheduler.truncate(state, seq_id, 3)  # its token of the first step is dropped
    state, second = scheduler.schedule(state)
    for now in (state, scheduler.preempt(state, seq_id)):
        assert [awaits(now, plan, seq_id) for plan in (first, second)] == [False, True]
        now, dropped = scheduler.commit(now, first, np.array([7]))
        _, accepted = scheduler.commit(now, second, np.array([8]))
        assert (dropped.tokens.tolist(), accepted.tokens.tolist()) == ([], [8])


def test_a_failure_hides_no_steps_that_others_took_meanwhile():
    params = tiny(32)
    worker = fnllm.engine(params, **SMALL, num_blocks=16)
    prompt = [5, 6, 7, 8, 9]
    state, _ = fnllm.add(worker.init(), worker.request([1, 2, 3, 4], settings(logits_fn=nan_after_five)))
    state, mine = fnllm.add(state, worker.request(prompt, settings()))
    other, _ = fnllm.add(worker.init(), worker.request(range(11, 21), settings()))
    failed = []
    while True:
        state, flight = worker.launch(state)
        if flight is None:
            break
        other, theirs = worker.launch(other)  # writes into blocks that the first state counts on
        if theirs is not None:
            other, _ = worker.collect(other, theirs)
        state, step = worker.collect(state, flight)
        failed += step.failed
    assert len(failed) == 1
    wanted = fnllm.generate(params, [prompt], settings(), **SMALL)[0].token_ids
    assert fnllm.tokens(state, mine)[len(prompt) :] == wanted


def test_a_state_from_before_finds_its_blocks_written_over():
    params = tiny(6)
    worker = fnllm.engine(params, **SMALL, num_blocks=8)
    state, one = fnllm.add(worker.init(), worker.request([1, 2, 3, 4, 5], settings()))
    state, _ = worker.step(state)
    cache = worker.machine.resident.cache
    cache.k[0][:] = torch.nan  # as a kernel at fault would
    later, step = worker.step(state)
    assert [seq_id for seq_id, _ in step.failed] == [one]
    while step is not None:  # the same state, continued: its keys are computed anew
        state, step = worker.step(state)
    assert fnllm.tokens(state, one)[5:] == fnllm.generate(params, [1, 2, 3, 4, 5], settings())[0].token_ids


NO_LOGITS = {
    "nothing": (lambda z, h: None, TypeError, "NoneType"),
    "an array": (lambda z, h: z.numpy(), TypeError, "ndarray"),
    "another width": (lambda z, h: z[:, :5], ValueError, r"\(3, 5\)"),
    "one row": (lambda z, h: z[0], ValueError, r"\(41,\)"),
    "float64": (lambda z, h: z.double(), TypeError, "torch.float64"),
    "integers": (lambda z, h: z.int(), TypeError, "torch.int32"),
    "one argument": (lambda z: z, TypeError, "too many positional arguments"),
}


@pytest.mark.parametrize("name", NO_LOGITS)
def test_a_logits_fn_that_returns_no_logits_is_refused_by_name(name):
    function, kind, found = NO_LOGITS[name]
    with pytest.raises(kind, match=rf"logits_fn \(.*lambda.*{found}"):
        fnllm.generate(tiny(), PROMPTS[0], settings(logits_fn=function), **SMALL)
    asked = [settings(), settings(logits_fn=function), settings()]
    done = fnllm.generate(tiny(), PROMPTS, asked, errors="return", **SMALL)
    assert [one.finish_reason for one in done] == ["length", "error", "length"]
    assert isinstance(done[1].error, kind)


def test_a_logits_fn_that_writes_into_the_batchs_logits_is_refused():
    def ban(logits, history):
        logits[:, 3] = -torch.inf
        return logits

    with pytest.raises(RuntimeError, match="logits_fn .*ban.* in place"):
        fnllm.generate(tiny(), PROMPTS[0], settings(logits_fn=ban), **SMALL)


def test_an_error_inside_a_logits_fn_keeps_its_traceback():
    def inner(logits):
        raise KeyError("mine")

    def outer(logits, history):
        return inner(logits)

    with pytest.raises(KeyError, match="mine") as caught:
        fnllm.generate(tiny(), PROMPTS[0], settings(logits_fn=outer), **SMALL)
    assert [entry.name for entry in caught.traceback][-2:] == ["outer", "inner"]


@pytest.mark.parametrize("where", ["logits_fn", "layer"])
def test_a_step_inside_a_step_is_refused_and_params_of_its_own_are_not(where):
    """Both would write the same rows, and the outer request would go on with the inner one's."""
    usual, inner = fnllm.Layers(), []

    def run(params):
        def ask():
            inner.append(fnllm.generate(params, PROMPTS[1], settings(), **SMALL)[0].token_ids)

        def asking(logits, history):
            ask()
            return logits

        def mlp(p, x, ctx):
            ask()
            return usual.mlp(p, x, ctx)

        if where == "layer":
            return fnllm.generate(tiny(), PROMPTS[0], settings(), layers=usual._replace(mlp=mlp), **SMALL)[0]
        return fnllm.generate(tiny(), PROMPTS[0], settings(logits_fn=asking), **SMALL)[0]

    expected = alone()
    with pytest.raises(RuntimeError, match=r"asked for a step of the same model.* fnllm.score .*workspace=\{\}"):
        run(tiny())
    assert alone() == expected
    assert run(tiny()._replace(workspace={})).token_ids == expected[0] and set(inner) == {expected[1]}


NO_DRAWS = {
    "a tensor": (lambda *a, **k: sample(*a, **k).ids, TypeError, "Sampled"),
    "int32": (lambda *a, **k: Sampled(sample(*a, **k).ids.int()), TypeError, "Sampled.ids.*torch.int32"),
    "a column": (lambda *a, **k: Sampled(sample(*a, **k).ids[:, None]), ValueError, r"Sampled.ids.*\(3, 1\)"),
    "no logprobs": (lambda *a, **k: Sampled(sample(*a, **k).ids), TypeError, "Sampled.logprob.*logprobs"),
}


@pytest.mark.parametrize("name", NO_DRAWS)
def test_a_swapped_sampler_that_draws_no_tokens_is_refused_by_name(name):
    function, kind, found = NO_DRAWS[name]
    layers = fnllm.Layers()._replace(sample=function)
    with pytest.raises(kind, match=f"layers.sample.*{found}"):
        fnllm.generate(tiny(), PROMPTS[0], settings(logprobs=1), layers=layers, **SMALL)


def test_a_swapped_sampler_that_draws_what_is_no_token_fails_those_requests():
    def beyond(logits, rows, positions, **options):
        return Sampled(torch.where(positions == 4, 41, sample(logits, rows, positions, **options).ids))

    layers = fnllm.Layers()._replace(sample=beyond)
    done = fnllm.generate(tiny(), [PROMPTS[0], [1] * 6], settings(), layers=layers, errors="return", **SMALL)
    assert done[0].token_ids == alone()[0][:2] and done[1].error is None
    assert "layers.sample drew 41; token ids are 0 to 40" in str(done[0].error)


def nan_after_two(logits, history):
    return torch.where((history.lengths - history.prompt_lengths >= 2)[:, None], torch.nan, logits)


CROWDS = [{}, {"num_blocks": 12, "max_chunk": 5}, {"max_num_seqs": 2}, {"prefix_cache": False}]


@pytest.mark.parametrize("crowd", CROWDS)
def test_each_request_of_a_crowd_with_failures_is_as_alone(crowd):
    """Preempted, in chunks, over shared prefixes, in three streams at a time: the same bits, and the same errors."""
    draw = random.Random(len(crowd))
    prompts = [[draw.randrange(1, 41) for _ in range(draw.choice((1, 4, 5, 17)))] for _ in range(9)]
    asked = [
        fnllm.Sampling(
            temperature=draw.choice((0, 0.9)), seed=seed, max_tokens=draw.choice((1, 5, 12)), ignore_eos=True,
            top_p=draw.choice((1, 0.8)), n=draw.choice((1, 2)), logits_fn=draw.choice((None, None, nan_after_two)),
        )
        for seed in range(9)
    ]  # fmt: skip
    options = {**SMALL, "numerics": "batch_invariant", "errors": "return"}

    def seen(one):
        return one.token_ids, one.finish_reason, type(one.error)

    alone = [seen(one) for pair in zip(prompts, asked, strict=True) for one in fnllm.generate(tiny(), *pair, **options)]
    assert {reason for _, reason, _ in alone} == {"length", "error"}
    assert [seen(one) for one in fnllm.generate(tiny(), prompts, asked, **{**options, **crowd})] == alone
    streams = [fnllm.stream(tiny(), prompts, asked, **{**options, **crowd}) for _ in range(3)]
    found: list[dict] = [{}, {}, {}]
    running = [0, 1, 2]
    while running:
        number = draw.choice(running)
        chunk = next(streams[number], None)
        if chunk is None or (number == 2 and len(found[2]) == 4):
            streams[number].close()
            running.remove(number)
        elif chunk.completion is not None:
            found[number][chunk.index, chunk.sample] = seen(chunk.completion)
    assert [[some[key] for key in sorted(some)] for some in found[:2]] == [alone, alone]
