"""Edits per request in a mixed batch: the right rows, the right cache, one compiled step."""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fnllm
import fnllm.built
from fnllm.edits import add_vector, channels_of, edits_of_each, placed
from fnllm.jobs import Variant
from fnllm.sampler import SamplerFeatures

GREEDY = fnllm.Sampling(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
SMALL = {"num_blocks": 64, "block_size": 4}
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 33]
SITE = "layers.1.resid_post"


def vector(seed, width=48):
    return 3 * torch.randn(width, generator=torch.Generator().manual_seed(seed))


def alone(params, edits, prompt=PROMPT, **options):
    return fnllm.generate(params, [prompt], GREEDY, edits=edits, **{**SMALL, **options})[0]


def by_hand(params, prompt, count, change):
    """Greedy tokens of a model whose layer 1 output is changed, one plain forward pass a token, without a cache."""
    usual = fnllm.Layers()
    ids = list(prompt)

    def mlp(p, x, ctx):
        # The last addition to the stream at layer 1 is the MLP's output: changing it changes resid_post.
        y = usual.mlp(p, x, ctx)
        return change(y, ctx) if ctx.layer == 1 else y

    for _ in range(count):
        seen = fnllm.score(params, [ids], layers=usual._replace(mlp=mlp), capture="logits")[0].captured["logits"]
        ids.append(int(seen[-1].argmax()))
    return tuple(ids[len(prompt) :])


def test_steering_equals_a_model_changed_by_hand(tiny):
    for seed in (1, 2):
        expected = by_hand(tiny, PROMPT, 6, lambda y, ctx, seed=seed: y + vector(seed))
        assert alone(tiny, fnllm.steer(SITE, vector(seed))).token_ids == expected != alone(tiny, ()).token_ids


@pytest.mark.parametrize(
    "options", [{}, {"max_chunk": 1}, {"max_chunk": 3}, {"num_blocks": 9}, {"prefix_cache": False}], ids=str
)
def test_each_request_of_a_batch_gets_its_own_edit(tiny, options):
    other = PROMPT[:5] + [7, 7]
    choices = [
        (PROMPT, None),
        (PROMPT, [fnllm.steer(SITE, vector(1))]),
        (other, [fnllm.steer(SITE, vector(2)), fnllm.ablate("layers.2.resid_mid", vector(3))]),
        (PROMPT, [fnllm.ablate("layers.2.resid_mid", vector(4))]),
        (other, None),
    ]
    outs = fnllm.generate(tiny, [p for p, _ in choices], GREEDY, edits=[e for _, e in choices], **{**SMALL, **options})
    expected = [alone(tiny, e or (), p) for p, e in choices]
    assert [o.token_ids for o in outs] == [e.token_ids for e in expected]
    assert outs[0].token_ids != outs[1].token_ids and outs[2].token_ids != outs[4].token_ids  # the edits do something


def test_fault_10_prefixes_of_different_edits_are_never_shared(tiny):
    params = tiny._replace(workspace={})  # an empty cache
    steered = [fnllm.steer(SITE, vector(1))]
    assert alone(params, ()).cached_tokens == 0
    assert alone(params, steered).cached_tokens == 0
    assert alone(params, [fnllm.steer(SITE, 2 * vector(1))]).cached_tokens == 0
    assert alone(params, [fnllm.steer("layers.0.resid_post", vector(1))]).cached_tokens == 0
    assert alone(params, ()).cached_tokens == 8
    assert alone(params, [fnllm.steer(SITE, vector(1).clone())]).cached_tokens == 8  # equal content is the same edit
    both = fnllm.generate(params, [PROMPT, PROMPT], GREEDY, edits=[None, steered], **SMALL)
    assert [out.cached_tokens for out in both] == [8, 8]
    changed = vector(1)
    edit = fnllm.Edit(SITE, add_vector, (changed, torch.tensor(0)))
    assert alone(params, [edit]).cached_tokens == 8
    changed += 1  # in place: another edit
    assert alone(params, [edit]).cached_tokens == 0


@pytest.mark.parametrize("way", ["stream", "engine"])
def test_values_written_after_the_request_change_nothing_of_it(tiny, way):
    """Nor what is found in the prefix cache under the values that it was made with."""
    params = tiny._replace(workspace={})
    written = vector(1)[None]
    cold = alone(tiny, fnllm.patch(SITE, vector(1)[None], 2), prefix_cache=False).token_ids
    assert cold != alone(tiny, fnllm.patch(SITE, torch.zeros(1, 48), 2)).token_ids
    if way == "stream":
        chunks = fnllm.stream(params, [PROMPT], GREEDY, edits=fnllm.patch(SITE, written, 2), **SMALL)
        written.zero_()
        found = [chunk.completion.token_ids for chunk in chunks if chunk.completion]
        again = alone(params, fnllm.patch(SITE, vector(1)[None], 2))
        assert again.cached_tokens == 8 and [*found, again.token_ids] == [cold, cold]
        return
    engine = fnllm.engine(params, edits=[fnllm.patch(SITE, written, 2)], **SMALL)
    state, one = fnllm.add(engine.init(), engine.request(PROMPT, GREEDY))
    written.zero_()
    for number, values in ((one, None), (one + 1, vector(1)[None])):
        if values is not None:
            state, _ = fnllm.add(state, engine.request(PROMPT, GREEDY, edits=[fnllm.patch(SITE, values, 2)]))
        step = True
        while step is not None:
            state, step = engine.step(state)
        assert fnllm.tokens(state, number)[len(PROMPT) :] == cold


def test_patching_from_another_run(tiny):
    """All of layer 1's output from another prompt, patched in: the rest of the model then says what it said there."""
    source = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    sites = ("layers.1.resid_post", "logits")
    there = fnllm.score(tiny, [source], capture=sites)[0].captured
    here = fnllm.score(tiny, [PROMPT], capture=sites, edits=[fnllm.patch(SITE, there[SITE], 0)])[0].captured
    torch.testing.assert_close(here["logits"], there["logits"], rtol=1e-5, atol=1e-5)
    part = fnllm.score(tiny, [PROMPT], capture=sites, edits=[fnllm.patch(SITE, there[SITE][2:4], 2)])[0].captured
    plain = fnllm.score(tiny, [PROMPT], capture=sites)[0].captured
    assert torch.equal(part[SITE][[0, 1, 4, 8]], plain[SITE][[0, 1, 4, 8]])
    assert torch.equal(part[SITE][2:4], there[SITE][2:4])
    token = alone(tiny, [fnllm.patch(SITE, there[SITE], 0)]).token_ids[0]
    assert token == int(there["logits"][-1].argmax())


@pytest.mark.parametrize("site", ["layers.0.resid_pre", "layers.0.q", "layers.2.v", "layers.1.attn_out",
                                  "layers.1.resid_mid",
                                  "layers.2.mlp_out", "layers.2.resid_post", "final_norm", "logits"])  # fmt: skip
def test_generation_and_scoring_edit_alike_at_every_site(tiny, site):
    width = {"q": (4, 16), "v": (2, 16), "logits": (160,)}.get(site.rpartition(".")[2], (48,))
    value = torch.randn(width, generator=torch.Generator().manual_seed(5))
    edit = fnllm.steer(site, value, 2.0, start=3)
    out = alone(tiny, edit)
    scored = fnllm.score(tiny, [PROMPT + list(out.token_ids)], edits=edit)[0][8:]
    torch.testing.assert_close(torch.tensor([x.logprob for x in out.logprobs]), scored, rtol=1e-4, atol=1e-4)
    plain = fnllm.score(tiny, [PROMPT + list(out.token_ids)])[0]
    assert not torch.allclose(scored, plain[8:], atol=1e-3)
    before = fnllm.score(tiny, [PROMPT], edits=edit)[0]
    torch.testing.assert_close(before[:3], plain[:3])


def test_gradients_reach_an_edits_values(tiny):
    """A steering vector can be trained: the gradient equals a difference quotient."""
    ids = [PROMPT + [1, 2, 3], PROMPT[:4]]
    v = vector(9).double().requires_grad_()
    params = tiny._replace(tree=doubled(tiny.tree), workspace={})

    def loss(v):
        return fnllm.score(params, ids, edits=[fnllm.steer(SITE, v), None])[0].sum()

    loss(v).backward()
    step = torch.zeros_like(v)
    step[7] = 1e-5
    with torch.no_grad():
        quotient = (loss(v + step) - loss(v - step)) / 2e-5
    torch.testing.assert_close(v.grad[7], quotient, rtol=1e-5, atol=1e-8)


def divided(x, ctx, by):
    return x / by[:, None]


def test_gradients_of_a_mixed_batch_are_those_of_each_alone(tiny):
    """A sequence without the edit has no value to divide by."""

    def gradient(edits, ids):
        down = tiny.tree["layers"][0]["down"].clone().requires_grad_()
        layers = [{**tiny.tree["layers"][0], "down": down}, *tiny.tree["layers"][1:]]
        params = tiny._replace(tree={**tiny.tree, "layers": layers}, workspace={})
        sum(x.sum() for x in fnllm.score(params, ids, edits=edits)).backward()
        return down.grad

    edit = [fnllm.Edit(SITE, divided, torch.tensor(2.0))]
    whole = gradient([edit, None], [PROMPT, PROMPT[:4]])
    torch.testing.assert_close(whole, gradient(edit, [PROMPT]) + gradient((), [PROMPT[:4]]), rtol=1e-4, atol=1e-5)


def test_ablation_leaves_nothing_along_the_direction_over_all_heads(tiny):
    direction = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    seen = fnllm.score(tiny, [PROMPT], edits=fnllm.ablate("layers.1.q", direction), capture="layers.1.q")[0]
    plain = fnllm.score(tiny, [PROMPT], capture="layers.1.q")[0].captured["layers.1.q"]
    along = plain.flatten(1) @ direction.flatten() / direction.norm() ** 2
    torch.testing.assert_close(seen.captured["layers.1.q"], plain - along[:, None, None] * direction)


def test_ablation_computes_in_float32_where_activations_are_shorter():
    torch.manual_seed(0)
    edit = fnllm.ablate(SITE, torch.randn(48).bfloat16())
    unit = edit.values[0].double()
    x = (torch.randn(5, 48) + 9 * unit).bfloat16()  # most of it lies along the direction
    want = x.double() - (x.double() @ unit)[:, None] * unit
    assert torch.equal(edit.apply(x, None, edit.values[0].expand(5, -1)), want.bfloat16())


def doubled(tree):
    if isinstance(tree, dict):
        return {k: doubled(x) for k, x in tree.items()}
    return [doubled(x) for x in tree] if isinstance(tree, list) else tree.double()


def test_other_values_build_no_other_step(tiny):
    params = tiny._replace(workspace={})
    alone(params, [fnllm.steer(SITE, vector(1))])
    (machine,) = params.workspace.values()
    built = len(machine.runners)
    alone(params, [fnllm.steer(SITE, vector(2), start=4)])
    fnllm.generate(params, [PROMPT] * 3, GREEDY, edits=[None, [fnllm.steer(SITE, vector(3))], None], **SMALL)
    assert len(machine.runners) == built


def test_rows_for_values_go_with_the_steps_that_read_them(tiny, monkeypatch):
    monkeypatch.setattr(fnllm.built, "MOST_CHANGED", 3)
    params = tiny._replace(workspace={})
    rows = torch.stack([vector(seed) for seed in range(len(PROMPT))])
    first = alone(params, fnllm.patch(SITE, rows[:1], 0))
    for n in range(2, len(PROMPT)):
        alone(params, fnllm.patch(SITE, rows[:n], 0))
    (machine,) = params.workspace.values()
    kept = machine.built.choices
    assert set(kept) == {(), *(spec.edits for spec in machine.runners)} and len(kept) <= 4
    assert alone(params, fnllm.patch(SITE, rows[:1], 0)).token_ids == first.token_ids  # built again, written again


def test_rows_that_a_running_sequence_reads_outlive_its_steps(tiny, monkeypatch):
    """`prepare` builds steps for others while it runs: it does not join again, so nothing would write them anew."""
    monkeypatch.setattr(fnllm.built, "MOST_CHANGED", 3)
    params = tiny._replace(workspace={})
    expected = alone(params, fnllm.steer(SITE, vector(1)), prefix_cache=False).token_ids
    engine = fnllm.engine(params, edits=[fnllm.steer(SITE, vector(1))], prefix_cache=False, **SMALL)
    state, name = fnllm.add(engine.init(), engine.request(PROMPT, GREEDY))
    for _ in range(3):
        state, _ = engine.step(state)
    for n in range(1, 6):
        other = channels_of([[fnllm.patch(SITE, torch.zeros(n, 48), 0)]])
        with torch.no_grad():
            engine.machine.runner(Variant(edits=other), SamplerFeatures(), params.tree)
    assert engine.variant.edits not in [spec.edits for spec in engine.machine.runners]
    for _ in range(3):
        state, _ = engine.step(state)
    assert fnllm.tokens(state, name)[len(PROMPT) :] == expected != alone(params, ()).token_ids


class Largest(TorchDispatchMode):
    """The most elements that an operation's result has."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.elements = max(self.elements, found.numel())
        return found


def test_patching_a_prompt_needs_no_copy_of_its_rows_for_each_token(tiny):
    count = 40
    ids = [3 + i % 90 for i in range(count)]
    rows = torch.stack([vector(seed) for seed in range(count)])
    with torch.no_grad(), Largest() as largest:
        (found,) = fnllm.score(tiny, [ids], edits=fnllm.patch(SITE, rows, 0), capture=SITE)
    assert torch.equal(found.captured[SITE], rows)
    assert 0 < largest.elements < count * rows.numel()


def test_edits_at_a_site_apply_in_the_requests_order(tiny):
    steer, ablate = fnllm.steer(SITE, vector(1)), fnllm.ablate(SITE, vector(2))
    one, two = fnllm.score(tiny, [PROMPT, PROMPT], edits=[[steer, ablate], [ablate, steer]], capture=SITE)
    assert (one.captured[SITE] @ vector(2)).abs().max() < 1e-3 < (two.captured[SITE] @ vector(2)).abs().max()
    channels = channels_of([[steer, ablate], [ablate, steer]])
    assert placed([ablate, steer], channels) == [None, ablate, steer]


def test_a_permutation_of_requests_has_the_same_channels(tiny):
    a, b, other = (
        fnllm.steer(SITE, vector(1)),
        fnllm.ablate(SITE, vector(2)),
        fnllm.steer("layers.0.mlp_out", vector(3)),
    )
    for requests in ([(a,), (other,)], [(a,), (b,)], [(a, b), (b,)], [(b, a), (a,)], [(a, other), (b,), (other, b)]):
        assert channels_of(requests) == channels_of(requests[::-1])
    assert len(channels_of([(a,), (b, a)])) == 2
    one, two = (
        fnllm.Edit(SITE, functools.partial(add_vector), vector(1)) for _ in range(2)
    )  # of one name: as they come
    assert [channel.apply for channel in channels_of([(two,), (one,)])] == [two.apply, one.apply]
    assert channels_of([(a, other)]) == channels_of([(other, a)])
    assert placed([other, a], channels_of([(a, other)])) == [other, a] == placed([a, other], channels_of([(a, other)]))


def test_directions_may_be_batched_by_torch_func(tiny):
    directions = torch.stack([vector(1), vector(2)])

    def score(direction):
        return fnllm.score(tiny, [PROMPT], edits=fnllm.ablate(SITE, direction))[0]

    together = torch.func.vmap(score)(directions)
    torch.testing.assert_close(together, torch.stack([score(one) for one in directions]), rtol=1e-4, atol=1e-4)


def test_an_engine_takes_the_edits_it_was_built_for(tiny):
    engine = fnllm.engine(tiny, edits=[fnllm.steer(SITE, vector(1))], **SMALL)
    engine.request(PROMPT, GREEDY, edits=[fnllm.steer(SITE, vector(2))])
    engine.request(PROMPT, GREEDY, edits=[])
    with pytest.raises(ValueError, match=r"not built for the edit remove_direction at layers\.1\.resid_post"):
        engine.request(PROMPT, GREEDY, edits=[fnllm.ablate(SITE, vector(2))])
    other = fnllm.engine(tiny, **SMALL)
    with pytest.raises(ValueError, match="another engine|engine with other layers"):
        other.step(fnllm.add(engine.init(), engine.request(PROMPT, GREEDY))[0])


def test_wrong_edits_say_what_is_wrong(tiny):
    def shorter(x, ctx):
        return x[:1]

    with pytest.raises(
        ValueError, match=r"the edit .*shorter at layers\.0\.q must return the shape .* found \(1, 4, 16\)"
    ):
        alone(tiny, [fnllm.Edit("layers.0.q", shorter)])
    with pytest.raises(ValueError, match="unknown site 'layers.9.q'"):
        alone(tiny, [fnllm.Edit("layers.9.q", shorter)])
    with pytest.raises(ValueError, match="1 prompts and 2 lists of edits"):
        alone(tiny, [None, None])
    with pytest.raises(ValueError, match=r"flat list of 2 for 2 prompts: write \[\[a\], .*\[\[a, b, \.\.\.\]\] \* 2"):
        fnllm.generate(tiny, [PROMPT, PROMPT], GREEDY, edits=[fnllm.steer(SITE, vector(seed)) for seed in (1, 2)])
    with pytest.raises(TypeError, match=r"values\[0\] .* must be a tensor, found float"):
        fnllm.Edit("layers.0.q", shorter, (1.5,))
    assert alone(tiny, ()).finish_reason == "length"  # and the engine goes on


def test_edits_of_all_prompts_and_of_each():
    a, b = fnllm.steer(SITE, vector(1)), fnllm.steer(SITE, vector(2))
    assert edits_of_each([a, b], 1) == [(a, b)]
    assert edits_of_each([a, b], 3) == [(a, b)] * 3
    assert edits_of_each([a], 2) == edits_of_each(a, 2) == [(a,)] * 2
    assert edits_of_each([[a], [b]], 2) == edits_of_each([a, [b]], 2) == [(a,), (b,)]
    assert edits_of_each([[a, b]] * 2, 2) == [(a, b)] * 2


def doubling(x, ctx):
    return x.mul_(2)


def test_an_edit_in_place_is_refused_in_scoring_too(tiny):
    """It would reach the sequences beside it."""
    with pytest.raises(RuntimeError, match=r"the edit at layers\.0\.q \(doubling\) changed its argument 1 in place"):
        fnllm.score(tiny, [PROMPT, PROMPT], edits=[[fnllm.Edit("layers.0.q", doubling)], None])
