"""Swapped layer functions: the examples against dense arithmetic, isolation from other users, errors that name them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from examples_of import example

import fnllm
from fnllm.rope import make_rope
from fnllm.sampler import Sampled
from fnllm.scoring import context, packed_batch

SMALL = {"num_blocks": 64, "block_size": 4}
PROMPTS = [
    [3, 14, 15, 92, 65, 35, 89, 79, 33, 23, 84, 62, 64, 33, 83, 27, 95, 2, 88, 41],
    [8, 9, 79],
    [31, 41, 59, 26, 53],
]
GREEDY = fnllm.Sampling(temperature=0, max_tokens=8, ignore_eos=True)
USUAL = fnllm.Layers()


swaps = example("swap_layers")


def dense(seen_by):
    """Attention of one whole sequence with an explicit mask: what the paged examples must equal."""

    def attend(q, k, v, ctx):
        place = torch.arange(q.shape[0])
        mask = seen_by(place[:, None], place[None, :]) & (place[None, :] <= place[:, None])
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1) for x in (k, v))
        scores = (q.transpose(0, 1) @ k.mT * ctx.config.head_dim**-0.5).masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1)

    return USUAL._replace(attend=attend)


def greedy_by_score(params, layers, prompt, change=lambda logits: logits):
    ids = list(prompt)
    for _ in range(8):
        with torch.no_grad():
            logits = fnllm.score(params, [ids], layers=layers, capture=fnllm.Capture("logits", "last"))[0].captured[
                "logits"
            ]
        ids.append(int(change(logits[0]).argmax()))
    return tuple(ids[len(prompt) :])


def plain_int8(params):
    """The quantised weights, back in float32, in the usual layers."""

    def whole(p):
        return p.values.float() * p.scale[:, None] if isinstance(p, swaps.Int8) else p

    layers = [{k: whole(x) for k, x in p.items()} for p in swaps.quantised(params).tree["layers"]]
    return params._replace(tree={**params.tree, "layers": layers}, workspace={})


CASES = {
    "window": (USUAL._replace(attend=swaps.windowed), dense(lambda q, k: q - k < swaps.WINDOW)),
    "sinks": (
        USUAL._replace(attend=swaps.windowed_with_sinks),
        dense(lambda q, k: (q - k < swaps.WINDOW) | (k < swaps.SINKS)),
    ),
    "relu2": (USUAL._replace(mlp=swaps.relu2_mlp), None),
    "top_k": (USUAL._replace(mlp=swaps.top_k_mlp), None),
}


@pytest.mark.parametrize("options", [{}, {"max_chunk": 3}, {"num_blocks": 10, "prefix_cache": False}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_examples_equal_dense_arithmetic(tiny, name, options):
    layers, reference = CASES[name]
    expected = [greedy_by_score(tiny, reference or layers, prompt) for prompt in PROMPTS]
    outs = fnllm.generate(tiny, PROMPTS, GREEDY, layers=layers, **{**SMALL, **options})
    assert [out.token_ids for out in outs] == expected
    plain = fnllm.generate(tiny, PROMPTS, GREEDY, **{**SMALL, **options})
    assert plain[0].token_ids != outs[0].token_ids
    for mine, prompt in zip(fnllm.score(tiny, PROMPTS, layers=layers), PROMPTS, strict=True):
        alone = fnllm.score(tiny, [prompt], layers=reference or layers)[0]
        torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-4)


def test_mlp_examples_equal_their_formulas(tiny):
    p, x = tiny.tree["layers"][0], torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    ctx = context(tiny, packed_batch(torch.zeros(5, dtype=torch.int64), [5], make_rope(tiny.config)), USUAL)
    gate, up = (x @ p["gate_up"].T).chunk(2, -1)
    torch.testing.assert_close(swaps.relu2_mlp(p, x, ctx), (gate.clamp(min=0) ** 2 * up) @ p["down"].T)
    h = F.silu(gate) * up
    kept = torch.zeros_like(h).scatter(1, h.abs().topk(24, -1).indices, 1)
    torch.testing.assert_close(swaps.top_k_mlp(p, x, ctx), (h * kept) @ p["down"].T)


def test_int8_weights(tiny):
    layers = USUAL._replace(linear=swaps.int8_linear)
    params = swaps.quantised(tiny)
    assert params.tree["layers"][0]["qkv"].values.dtype == torch.int8
    outs = fnllm.generate(params, PROMPTS, GREEDY, layers=layers, **SMALL)
    plain = fnllm.generate(plain_int8(tiny), PROMPTS, GREEDY, **SMALL)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    error = (fnllm.score(params, PROMPTS, layers=layers)[0] - fnllm.score(tiny, PROMPTS)[0]).abs().max()
    assert 0 < error < 0.3


def test_a_sampler_of_ones_own(tiny):
    def second(logits, rows, positions, **settings):
        best = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).bool()
        return USUAL.sample(logits.masked_fill(best, -torch.inf), rows, positions, **settings)

    def second_best(logits):
        return logits.scatter(0, logits.argmax()[None], -torch.inf)

    outs = fnllm.generate(tiny, PROMPTS, GREEDY, layers=USUAL._replace(sample=second), **SMALL)
    assert [out.token_ids for out in outs] == [greedy_by_score(tiny, USUAL, p, second_best) for p in PROMPTS]
    warm = fnllm.Sampling(temperature=3.0, seed=1, max_tokens=40, ignore_eos=True)
    layers = USUAL._replace(sample=swaps.sample_above_the_mean)
    out = fnllm.generate(tiny, PROMPTS[:1], warm, layers=layers, **SMALL)[0]
    seen = fnllm.score(tiny, [PROMPTS[0] + list(out.token_ids)], capture="logits")[0].captured["logits"][19:-1]
    assert all(row[token] >= row.mean() for row, token in zip(seen, out.token_ids, strict=True))


def test_a_swap_never_reaches_other_users_of_the_params(tiny):
    """Own steps, own cached prefixes; one more step built; the plain results before and after are the same."""
    params = tiny._replace(workspace={})
    prompt = PROMPTS[:1]
    before = fnllm.generate(params, prompt, GREEDY, **SMALL)[0]
    (machine,) = params.workspace.values()
    built = len(machine.runners)
    layers = USUAL._replace(mlp=swaps.relu2_mlp)
    swapped = fnllm.generate(params, prompt, GREEDY, layers=layers, **SMALL)[0]
    assert swapped.cached_tokens == 0 and len(machine.runners) == built + 1
    after = fnllm.generate(params, prompt, GREEDY, **SMALL)[0]
    assert after.token_ids == before.token_ids and after.cached_tokens == 16
    again = fnllm.generate(params, prompt, GREEDY, layers=layers, **SMALL)[0]
    assert again.token_ids == swapped.token_ids and again.cached_tokens == 16 and len(machine.runners) == built + 1


def wide_mlp(p, x, ctx):
    return torch.cat([x, x], -1)


def grown_mlp(p, x, ctx):
    return torch.cat([x, x], 0)


def double_mlp(p, x, ctx):
    return x.double()


def writing_mlp(p, x, ctx):
    x += 1
    return x


def writing_parameters(p, x, ctx):
    p["down"].mul_(1)
    return x


def none_mlp(p, x, ctx):
    return None


def short_of_context(p, x):
    return x


@pytest.mark.parametrize(
    "mlp, error, words",
    [
        (wide_mlp, ValueError, r"layers\.mlp \(wide_mlp\) must return shape \(3, 48\) .* found \(3, 96\)"),
        (
            grown_mlp,
            ValueError,
            r"layers\.mlp \(grown_mlp\) must return shape \(3, 48\) .* found \(6, 48\).*one row for each",
        ),
        (double_mlp, TypeError, r"layers\.mlp \(double_mlp\) must return torch\.float32, found torch\.float64"),
        (writing_mlp, RuntimeError, r"layers\.mlp \(writing_mlp\) changed its argument 2 in place"),
        (writing_parameters, RuntimeError, r"layers\.mlp \(writing_parameters\) changed its parameter 'down' in place"),
        (none_mlp, TypeError, r"layers\.mlp \(none_mlp\) must return a tensor .* found NoneType"),
        (short_of_context, TypeError, r"layers\.mlp \(short_of_context\) is called with \(p, x, ctx\): too many"),
    ],
)
def test_what_is_wrong_with_a_swapped_function_is_said(tiny, mlp, error, words):
    with pytest.raises(error, match=words):
        fnllm.generate(tiny, PROMPTS[:1], GREEDY, layers=USUAL._replace(mlp=mlp), **SMALL)
    assert len(fnllm.generate(tiny, PROMPTS[:1], GREEDY, **SMALL)[0].token_ids) == 8  # others go on


def decoding(ctx):
    return ctx.batch.max_seqlen == 1


def first_row_mlp(p, x, ctx):
    y = USUAL.mlp(p, x, ctx)
    return y[:1] if decoding(ctx) else y  # the sum with the stream would repeat it


def halving_mlp(p, x, ctx):
    return USUAL.mlp(p, x.mul_(0.5) if decoding(ctx) else x, ctx)


def attention_blind_in_decode(p, x, ctx):
    return 0.1 * x if decoding(ctx) else USUAL.attention(p, x, ctx)


def edit_in_decode(x, ctx):
    return x.mul_(0.5) if decoding(ctx) else x


@pytest.mark.parametrize(
    "way, error, words",
    [
        (
            {"layers": USUAL._replace(mlp=first_row_mlp)},
            ValueError,
            r"\(first_row_mlp\) must return .* found \(1, 48\)",
        ),
        ({"layers": USUAL._replace(mlp=halving_mlp)}, RuntimeError, r"\(halving_mlp\) changed its argument 2 in place"),
        (
            {"edits": fnllm.Edit("layers.0.q", edit_in_decode)},
            RuntimeError,
            r"\(edit_in_decode\) changed its argument 1",
        ),
        (
            {"layers": USUAL._replace(attention=attention_blind_in_decode), "capture": "layers.0.q"},
            ValueError,
            r"nothing passes the site layers\.0\.q: layers\.attention \(attention_blind_in_decode\)",
        ),
    ],
)
def test_what_is_wrong_in_decode_steps_alone_is_said_before_any(tiny, way, error, words):
    with pytest.raises(error, match=words):
        fnllm.generate(tiny, PROMPTS[:1], GREEDY, **way, **SMALL)


def by_sequence(q, k, v, ctx):
    ends = ctx.batch.cu_seqlens.tolist()
    return torch.cat([q[start:end] for start, end in zip(ends, ends[1:], strict=False)])


def test_an_attention_by_sequences_is_told_of_padding(tiny):
    with pytest.raises(ValueError, match=r"by_sequence\) must return .* found \(0, 4, 16\).* padding, which is no seq"):
        fnllm.generate(tiny, PROMPTS[:1], GREEDY, layers=USUAL._replace(attend=by_sequence), **SMALL)


def test_score_watches_too(tiny):
    with pytest.raises(ValueError, match=r"layers\.mlp \(wide_mlp\) must return shape"):
        fnllm.score(tiny, PROMPTS, layers=USUAL._replace(mlp=wide_mlp))


def test_a_head_of_ones_own_is_captured_and_edited(tiny):
    """It need not know that `logits` is a site."""
    layers = USUAL._replace(lm_head=lambda p, x, ctx: F.linear(x, p))
    wanted = fnllm.steer("logits", F.one_hot(torch.tensor(7), 160) * 1e4)
    out = fnllm.generate(tiny, PROMPTS[:1], GREEDY, layers=layers, edits=wanted, capture="logits", **SMALL)[0]
    assert out.token_ids == (7,) * 8 and (out.captured["logits"].argmax(-1) == 7).all()
    assert fnllm.score(tiny, [[3, 7, 7]], layers=layers, edits=wanted)[0].tolist() == [0, 0]


def blind_attention(p, x, ctx):
    return 0.1 * x


@pytest.mark.parametrize("way", [{"capture": "layers.0.q"}, {"edits": fnllm.steer("layers.0.q", torch.ones(4, 16))}])
def test_a_site_that_an_attention_leaves_out_is_named(tiny, way):
    layers = USUAL._replace(attention=blind_attention)
    words = r"nothing passes the site layers\.0\.q: layers\.attention \(blind_attention\) leaves it out; .*ctx\.tap"
    fnllm.generate(tiny, PROMPTS[:1], GREEDY, layers=layers, **SMALL)  # well without
    with pytest.raises(ValueError, match=words):
        fnllm.generate(tiny, PROMPTS[:1], GREEDY, layers=layers, **way, **SMALL)
    with pytest.raises(ValueError, match=words):
        fnllm.score(tiny, PROMPTS[:1], layers=layers, **way)


def ids_alone(logits, rows, positions, **settings):
    return Sampled(logits.argmax(-1))


def test_a_sampler_must_give_what_later_requests_ask_for(tiny):
    layers = USUAL._replace(sample=ids_alone)
    assert fnllm.generate(tiny, PROMPTS[:1], GREEDY, layers=layers, **SMALL)[0].logprobs is None
    with pytest.raises(TypeError, match=r"layers\.sample \(ids_alone\): Sampled\.logprob, which logprobs needs"):
        fnllm.generate(tiny, PROMPTS[:1], replace(GREEDY, logprobs=0), layers=layers, **SMALL)


def test_errors_inside_keep_their_type_and_traceback(tiny):
    def failing(p, x, ctx):
        raise KeyError("a reason of my own")

    with pytest.raises(KeyError, match="a reason of my own") as caught:
        fnllm.generate(tiny, PROMPTS[:1], GREEDY, layers=USUAL._replace(mlp=failing), **SMALL)
    assert any(entry.name == "failing" for entry in caught.traceback)


def test_the_example_runs(capsys):
    swaps.main()
    assert len(capsys.readouterr().out.splitlines()) == 7
