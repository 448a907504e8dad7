"""Captured activations: equal to transformers' and to a plain forward, in every way of running; bounded beforehand."""

import numpy as np
import pytest
import torch

import fnllm
from fnllm import scheduler
from fnllm.capture import Capture, wanted

GREEDY = fnllm.Sampling(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = {"num_blocks": 64, "block_size": 4}
PROMPTS = [[3, 14, 15, 92, 65, 35], [8, 9, 79], [32, 38, 46, 26, 43, 38, 32, 79, 50]]
SITES = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")


def transformers_sites(model, ids):
    """Site -> activations of one sequence, from hooks in transformers' model."""
    found, hooks = {}, []

    def keep(name):
        def hook(module, args, output):
            found[name] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    for i, layer in enumerate(model.model.layers):
        hooks += [
            layer.register_forward_pre_hook(lambda m, args, i=i: found.update({f"layers.{i}.resid_pre": args[0][0]})),
            layer.register_forward_hook(keep(f"layers.{i}.resid_post")),
            layer.self_attn.register_forward_hook(keep(f"layers.{i}.attn_out")),
            layer.mlp.register_forward_hook(keep(f"layers.{i}.mlp_out")),
            layer.post_attention_layernorm.register_forward_pre_hook(
                lambda m, args, i=i: found.update({f"layers.{i}.resid_mid": args[0][0]})
            ),
        ]
    hooks.append(model.model.norm.register_forward_hook(keep("final_norm")))
    with torch.no_grad():
        found["logits"] = model(torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    return found


def test_captured_equals_transformers(tiny, reference):
    capture = Capture(tuple(f"layers.*.{site}" for site in SITES) + ("final_norm", "logits"))
    for prompt, out in zip(PROMPTS, fnllm.generate(tiny, PROMPTS, GREEDY, capture=capture, **SMALL), strict=True):
        ids = prompt + list(out.token_ids[:-1])
        expected = transformers_sites(reference("qwen3-tiny"), ids)
        assert out.captured_at == tuple(range(len(ids)))
        assert out.captured.keys() == expected.keys()
        for site, x in expected.items():
            torch.testing.assert_close(out.captured[site], x, rtol=1e-4, atol=1e-4, msg=lambda m, s=site: f"{s}: {m}")


@pytest.mark.parametrize(
    "options",
    [
        {"max_chunk": 1},
        {"max_chunk": 3},
        {"num_blocks": 8},
        {"prefix_cache": False},
        {"block_size": 16, "num_blocks": 16},
    ],
    ids=str,
)
def test_fault_81_some_requests_some_layers_however_the_engine_runs(tiny, options):
    """Layers 1 and 2 of two of three requests, against `score` of the same tokens."""
    sites = ("layers.1.resid_post", "layers.2.q", "layers.2.v", "logits")
    captures = [Capture(sites[:2]), None, Capture(sites, "output")]
    outs = fnllm.generate(tiny, PROMPTS, GREEDY, capture=captures, **{**SMALL, **options})
    plain = fnllm.generate(tiny, PROMPTS, GREEDY, **SMALL)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert outs[1].captured == {} and outs[1].captured_at == ()
    assert set(outs[0].captured) == set(sites[:2]) and set(outs[2].captured) == set(sites)
    assert outs[2].captured_at == tuple(range(9, 9 + 5))
    for index in (0, 2):
        ids = PROMPTS[index] + list(outs[index].token_ids)
        whole = fnllm.score(tiny, [ids], capture=sites)[0].captured
        for site, x in outs[index].captured.items():
            torch.testing.assert_close(x, whole[site][list(outs[index].captured_at)], rtol=1e-5, atol=2e-5)


def test_preempted_requests_keep_each_position_once(tiny):
    """8 blocks of 4 cannot hold three sequences of 12 and more tokens: some are computed twice."""
    engine = fnllm.engine(tiny, num_blocks=8, block_size=4)
    state = engine.init()
    for prompt in PROMPTS:
        state, _ = fnllm.add(state, engine.request(prompt, GREEDY))
    while (step := engine.step(state))[1] is not None:
        state = step[0]
    assert state.scheduler.counters.preemptions > 0
    outs = fnllm.generate(tiny, PROMPTS, GREEDY, capture="layers.0.k", num_blocks=8, block_size=4)
    for prompt, out in zip(PROMPTS, outs, strict=True):
        assert out.captured_at == tuple(range(len(prompt) + 5))
        assert out.captured["layers.0.k"].shape == (len(prompt) + 5, 2, 16)


def test_a_captured_prompt_is_computed_though_it_is_cached(tiny):
    prompt = PROMPTS[2]
    fnllm.generate(tiny, [prompt], GREEDY, **SMALL)
    seen = fnllm.generate(tiny, [prompt], GREEDY, capture="layers.1.resid_mid", **SMALL)[0]
    assert seen.cached_tokens == 0 and len(seen.captured["layers.1.resid_mid"]) == 9 + 5
    last = fnllm.generate(tiny, [prompt], GREEDY, capture=Capture("layers.1.resid_mid", "last"), **SMALL)[0]
    assert last.cached_tokens == 8 and last.captured_at == (8,)
    torch.testing.assert_close(last.captured["layers.1.resid_mid"][0], seen.captured["layers.1.resid_mid"][8])


@pytest.mark.parametrize("sites", ["layers.*.resid_post", "logits"])
def test_a_sequences_activations_keep_and_save_no_other_sequences(tiny, sites):
    outs = [
        *fnllm.score(tiny, PROMPTS, capture=Capture(sites, "last")),
        *fnllm.generate(tiny, PROMPTS, GREEDY, capture=Capture(sites, "last"), **SMALL),
    ]
    for x in (x for out in outs for x in out.captured.values()):
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size() > 0


def test_nothing_captured_has_the_shape_of_its_site(tiny):
    sites = ("layers.0.q", "layers.0.resid_mid", "logits")
    out = fnllm.generate(tiny, [PROMPTS[0]], GREEDY, capture=Capture(sites, (99,)), **SMALL)[0]
    assert out.captured_at == ()
    assert [tuple(out.captured[site].shape) for site in sites] == [(0, 4, 16), (0, 48), (0, 160)]


def test_tokens_appended_are_captured_though_they_are_cached(tiny):
    """Position 14 lies behind the first prompt, and in a prefix that another request left, when it is appended."""
    site, more = "layers.1.resid_post", [1, 2, 3, 4, 5, 6, 7, 8]
    engine = fnllm.engine(tiny, capture=Capture(site, (14,)), **SMALL)

    def run(state):
        rows = []
        while (stepped := engine.step(state))[1] is not None:
            state, step = stepped
            scheduler.check(state.scheduler)
            rows += [step.results.captured[site][one.first] for one in step.captured]
        return state, rows

    other = engine.request(PROMPTS[2] + more, GREEDY, capture=Capture(()))
    state, rows = run(fnllm.add(engine.init(), other)[0])
    assert rows == []
    state, one = fnllm.add(state, engine.request(PROMPTS[2], fnllm.Sampling(temperature=0, max_tokens=0)))
    state, rows = run(fnllm.append(run(state)[0], one, more))
    whole = fnllm.score(tiny, [PROMPTS[2] + more], capture=site)[0].captured[site]
    torch.testing.assert_close(torch.stack(rows), whole[[14]], rtol=1e-5, atol=2e-5)
    # One that still runs holds blocks that others share, which it no longer does.
    state, one = fnllm.add(state, engine.request(PROMPTS[2], GREEDY))
    state, _ = engine.step(state)
    state = fnllm.append(state, one, more)
    scheduler.check(state.scheduler)


@pytest.mark.parametrize("positions", ["output", "last", "prompt", "all", (-1,)])
@pytest.mark.parametrize("cached", [False, True])
def test_positions_after_an_append_count_from_the_new_prompt(tiny, positions, cached):
    """What was there at the append is the prompt now, whether another request has left it in the cache or not."""
    site, more = "layers.1.resid_post", [1, 2, 3, 4, 5, 6, 7, 8]
    engine = fnllm.engine(tiny, capture=Capture(site, positions), **SMALL)

    def run(state):
        seen = set()
        while (stepped := engine.step(state))[1] is not None:
            state, step = stepped
            seen.update(position for one in step.captured for position in one.positions.tolist())
        return state, seen

    one_turn = fnllm.Sampling(temperature=0, max_tokens=3, ignore_eos=True)
    state, one = fnllm.add(engine.init(), engine.request(PROMPTS[2], one_turn))
    state, _ = run(state)
    prompt = [*fnllm.tokens(state, one), *more]
    if cached:
        state, _ = run(fnllm.add(state, engine.request([*prompt, 9], one_turn, capture=Capture(())))[0])
    state, seen = run(fnllm.append(state, one, more))
    first, end = len(prompt), len(fnllm.tokens(state, one)) - 1
    expected = {"output": range(first, end), "prompt": range(first), "all": range(end)}
    assert seen == set(expected.get(positions, [first - 1]))


def test_stream_gives_what_generate_gives(tiny):
    capture = Capture(("final_norm",), (0, -1))
    done = [c.completion for c in fnllm.stream(tiny, PROMPTS, GREEDY, capture=capture, **SMALL) if c.finished]
    for out in done:
        assert out.captured_at == (0, out.prompt_tokens - 1)


def test_the_head_sees_no_more_rows_than_it_must(tiny):
    """Capturing other sites does not send the prompt through the head."""
    seen = []

    def lm_head(p, x, ctx):
        seen.append(x.shape[0])
        return fnllm.Layers().lm_head(p, x, ctx)

    layers = fnllm.Layers()._replace(lm_head=lm_head)
    fnllm.generate(tiny, [list(range(3, 40))], GREEDY, layers=layers, capture="layers.0.v", **SMALL)
    assert max(seen[2:]) == 1  # the first two are the trial's


@pytest.mark.parametrize(
    "positions, expected",
    [("all", [2, 3, 4, 5, 6]), ("prompt", [2, 3, 4]), ("output", [5, 6]), ("last", [4]), ((0, -1, 6, 99), [4, 6])],
)
def test_wanted_positions(positions, expected):
    assert wanted(Capture("logits", positions), 5, 2, 7).tolist() == expected
    whole = wanted(Capture("logits", positions), 5, 0, 7)
    pieces = [wanted(Capture("logits", positions), 5, at, at + 1) for at in range(7)]
    assert np.array_equal(np.concatenate(pieces), whole)


def test_capture_bytes_is_exact_for_a_request_that_runs_to_its_end(tiny):
    capture = Capture(("layers.*.resid_post", "layers.0.q", "layers.0.k", "logits"), "all")
    out = fnllm.generate(tiny, [PROMPTS[0]], GREEDY, capture=capture, **SMALL)[0]
    real = sum(x.numel() * x.element_size() for x in out.captured.values())
    assert real == fnllm.capture_bytes(tiny.config, capture, prompt_tokens=6, new_tokens=6)


def test_too_much_is_refused_with_both_numbers(tiny, monkeypatch):
    monkeypatch.setattr("fnllm.machine.host_memory", lambda: 1000)
    with pytest.raises(
        ValueError, match=r"capture would take up to 0\.00 GB and only 0\.00 GB are free on cpu; ask for fewer"
    ):
        fnllm.generate(tiny, [PROMPTS[0]], GREEDY, capture="logits", **SMALL)


@pytest.mark.parametrize(
    "capture, error, words",
    [
        ("layers.7.resid_post", ValueError, "unknown site 'layers.7.resid_post'; sites are layers.<0 to 2>"),
        ("layers.*.nothing", ValueError, "unknown site"),
        ([None, None, None, None], ValueError, "3 prompts and 4 captures"),
    ],
)
def test_errors_name_the_site(tiny, capture, error, words):
    with pytest.raises(error, match=words.replace("*", r"\*")):
        fnllm.generate(tiny, PROMPTS, GREEDY, capture=capture, **SMALL)


def test_positions_are_checked():
    with pytest.raises(ValueError, match="found 'first'"):
        Capture("logits", "first")
    with pytest.raises(TypeError, match="integers"):
        Capture("logits", (1.5,))
