"""`score`: values and gradients of transformers' autograd, per-example gradients, log-probabilities of prompts."""

import math

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import fnllm
from fnllm.completion import TokenLogprob
from fnllm.rope import make_rope
from fnllm.sampler import token_logprobs
from fnllm.scoring import context, packed_batch, packed_logprobs

NAMES = ("qwen3-tiny", "qwen2-window", "llama-tiny", "qwen3-moe-norm", "qwen3-untied-sharded")
IDS = [[3, 14, 15, 92, 65, 35], [8, 9, 79], [32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84]]


def widened(model):
    """transformers' model with norms computed in the model's own dtype: in float64 it would round them to float32."""

    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * scale)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = forward.__get__(module)
    return model


def expected_logprobs(model, ids):
    logits = model(torch.tensor([ids])).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def with_gradients(params):
    """The same params with leaves that take gradients; a tied head stays one leaf."""
    made = {}

    def leaf(x):
        return made.setdefault(id(x), x.detach().clone().requires_grad_())

    return params._replace(tree=tree_map(leaf, params.tree), workspace={})


def checkpoint_gradients(params):
    """Our gradients under transformers' names for what is not fused, and the fused rows in their order."""
    tree, config = params.tree, params.config
    found = {"model.embed_tokens.weight": tree["embed"].grad, "model.norm.weight": tree["norm"].grad}
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    for i, p in enumerate(tree["layers"]):
        at = f"model.layers.{i}."
        found[at + "input_layernorm.weight"] = p["input_norm"].grad
        found[at + "post_attention_layernorm.weight"] = p["post_norm"].grad
        parts = p["qkv"].grad.split([q, kv, kv])
        found |= {at + f"self_attn.{n}_proj.weight": x for n, x in zip("qkv", parts, strict=True)}
        found[at + "self_attn.o_proj.weight"] = p["o"].grad
        if "gate_up" in p:
            gate, up = p["gate_up"].grad.chunk(2)
            found |= {at + "mlp.gate_proj.weight": gate, at + "mlp.up_proj.weight": up}
            found[at + "mlp.down_proj.weight"] = p["down"].grad
    return found


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-4), (torch.float64, 1e-9)], ids=str)
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_transformers(recomputed, name, dtype, tolerance, request):
    load, model = request.getfixturevalue("checkpoint"), request.getfixturevalue("reference")(name, dtype)
    if dtype == torch.float64:
        if "moe" in name:
            pytest.skip("transformers has no float64 experts")
        model = widened(model)
    params = with_gradients(load(name, dtype))
    weights = [torch.linspace(-1, 2, len(ids) - 1, dtype=dtype) for ids in IDS]
    model.zero_grad()
    theirs = [expected_logprobs(model, ids) for ids in IDS]
    sum((x * w).sum() for x, w in zip(theirs, weights, strict=True)).backward()
    ours = fnllm.score(params, IDS, checkpoint=recomputed, max_batched_tokens=10)
    sum((x * w).sum() for x, w in zip(ours, weights, strict=True)).backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    named = dict(model.named_parameters())
    for key, grad in checkpoint_gradients(params).items():
        scale = named[key].grad.abs().max() + 1e-6
        assert (grad - named[key].grad).abs().max() <= tolerance * scale.clamp(min=1), key


def test_the_head_is_taken_in_pieces_with_the_same_gradient(tiny, monkeypatch):
    def run(rows):
        monkeypatch.setattr("fnllm.scoring.HEAD_ROWS", rows)
        params = with_gradients(tiny)
        values = torch.cat(fnllm.score(params, IDS))
        values.sum().backward()
        return values.detach(), params.tree["embed"].grad

    for small, whole in zip(run(3), run(1024), strict=True):
        torch.testing.assert_close(small, whole, rtol=1e-5, atol=1e-5)


def test_per_example_gradients_by_torch_func(tiny, monkeypatch):
    """vmap over examples of equal length, and grad of one: both equal backward on each example alone."""
    length = 6
    ids = torch.tensor([[3, 14, 15, 92, 65, 35], [8, 9, 79, 32, 38, 46]])
    rope = make_rope(tiny.config)

    def loss(tree, token_ids):
        ctx = context(tiny, packed_batch(token_ids, [length], rope), fnllm.Layers())
        return packed_logprobs(tree, fnllm.forward(tree, ctx), ctx).sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(tiny.tree, ids)
    for row in range(2):
        params = with_gradients(tiny)
        # torch.func sees the tied embedding as two leaves; here they are one
        fnllm.score(params, [ids[row].tolist()])[0].sum().backward()
        torch.testing.assert_close(
            each["layers"][1]["qkv"][row], params.tree["layers"][1]["qkv"].grad, rtol=1e-3, atol=1e-5
        )
        tied = each["embed"][row] + each["lm_head"][row]
        torch.testing.assert_close(tied, params.tree["embed"].grad, rtol=1e-3, atol=1e-4)

    # Of long inputs too: what backward would compute anew, torch.func keeps.
    monkeypatch.setattr("fnllm.scoring.HEAD_ROWS", 4)
    pieces = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(tiny.tree, ids)
    torch.testing.assert_close(pieces["lm_head"], each["lm_head"], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="checkpoint=True cannot run inside torch.func"):
        torch.func.grad(lambda tree: fnllm.score(tiny._replace(tree=tree), IDS, checkpoint=True)[0].sum())(tiny.tree)

    def scores(tree):
        return torch.stack([x.sum() for x in fnllm.score(tiny._replace(tree=tree), ids.tolist())])

    jacobian = torch.func.jacrev(scores)(tiny.tree)
    torch.testing.assert_close(jacobian["layers"][0]["down"], each["layers"][0]["down"], rtol=1e-3, atol=1e-4)


def test_checkpointing_keeps_less(tiny):
    """Bytes saved for the backward pass, counted by autograd's own hooks."""

    def saved(**options):
        count = 0

        def pack(x):
            nonlocal count
            count += x.numel() * x.element_size()
            return x

        params = with_gradients(tiny)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            fnllm.score(params, [list(range(100))], **options)[0].sum()
        return count

    assert saved(checkpoint=True) < 0.5 * saved()


def test_prompt_logprobs_are_those_of_score(tiny):
    sampling = fnllm.Sampling(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=3)
    none = fnllm.Sampling(temperature=0, max_tokens=2, ignore_eos=True)
    outs = fnllm.generate(tiny, IDS, [sampling, none, sampling], num_blocks=64, block_size=4)
    assert outs[1].prompt_logprobs is None
    for ids, out in ((IDS[0], outs[0]), (IDS[2], outs[2])):
        scored = fnllm.score(tiny, [ids], capture="logits")[0]
        everything = torch.log_softmax(scored.captured["logits"], -1)
        assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(ids)
        for place in range(1, len(ids)):
            found = out.prompt_logprobs[place]
            assert isinstance(found, TokenLogprob) and found.id == ids[place]
            assert found.logprob == pytest.approx(scored.logprobs[place - 1].item(), abs=2e-5)
            best = everything[place - 1].topk(3)
            assert [i for i, _ in found.top] == best.indices.tolist()
            assert [v for _, v in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_fault_12_log_probabilities_of_a_cached_prompt(tiny):
    """Block 4, a prompt of 13 tokens scored twice: 12 equal numbers both times."""
    ask = fnllm.Sampling(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompt = (IDS[2] + IDS[0])[:13]
    first, second = (fnllm.generate(tiny, [prompt], ask, num_blocks=64, block_size=4)[0] for _ in range(2))
    assert second.cached_tokens == 12
    assert first.prompt_logprobs == second.prompt_logprobs and len(first.prompt_logprobs) == 13


def test_fault_77_logits_of_a_long_prompt_never_exist_at_once(tiny):
    """The largest result of the head, while a prompt of 2500 tokens is read with its log-probabilities."""
    largest = 0

    def lm_head(p, x, ctx):
        nonlocal largest
        largest = max(largest, x.shape[0])
        return fnllm.Layers().lm_head(p, x, ctx)

    config = tiny.config
    import dataclasses

    params = tiny._replace(config=dataclasses.replace(config, max_position_embeddings=4096), workspace={})
    ask = fnllm.Sampling(temperature=0, max_tokens=1, prompt_logprobs=1)
    fnllm.generate(params, [[5] * 2500], ask, layers=fnllm.Layers()._replace(lm_head=lm_head), num_blocks=200)
    assert largest <= 1024


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_logit_that_is_nan_makes_its_rows_nan_whichever_ids_are_asked_for(ranks):
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = torch.nan
    logits[2, 9] = torch.nan  # behind the vocabulary
    ids = torch.tensor([1, 2, 3])
    expected = torch.log_softmax(logits[:, :9], -1).gather(1, ids[:, None])[:, 0]

    def of_rank(tp, part):
        return token_logprobs(part, ids, vocab_start=tp.rank * part.shape[1], vocab_limit=9, tp=tp)

    parts = [part.clone().requires_grad_() for part in logits.chunk(ranks, 1)]
    for found in fnllm.simulate(ranks, of_rank, parts).results:
        assert found[1].isnan()
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_broken_row_of_the_head_shows_in_every_score(tiny):
    """Its own id is in none of these texts: the other ids' numbers alone would look like log-probabilities."""
    params = with_gradients(tiny)
    with torch.no_grad():
        params.tree["lm_head"][1] = torch.nan
    (scores,) = fnllm.score(params, IDS[:1])
    assert scores.isnan().all()
    scores.sum().backward()
    assert params.tree["layers"][0]["qkv"].grad.isnan().all()
    ask = fnllm.Sampling(temperature=0, max_tokens=1, prompt_logprobs=1)
    (out,) = fnllm.generate(params, IDS[:1], ask, num_blocks=64, block_size=4, errors="return")
    assert all(math.isnan(one.logprob) and math.isnan(one.top[0][1]) for one in out.prompt_logprobs[1:])


def test_float64_stays_float64(checkpoint):
    assert fnllm.score(checkpoint("qwen3-tiny", torch.float64), [[3, 4, 5]])[0].dtype == torch.float64
    assert all(x.dtype == torch.float64 for x in tree_leaves(checkpoint("qwen3-tiny", torch.float64).tree))


@pytest.mark.parametrize("ids, words", [([[]], "empty"), ([[3, 999]], "outside the vocabulary")])
def test_bad_sequences_are_named(tiny, ids, words):
    with pytest.raises(ValueError, match=words):
        fnllm.score(tiny, ids)


@pytest.mark.parametrize("limit", [0, -5, 2.5, "8", None, True])
def test_a_limit_below_one_token_is_named(tiny, limit, unchecked):
    with pytest.raises(ValueError, match=f"max_batched_tokens must be a positive integer, found {limit!r}"):
        fnllm.score(tiny, IDS, max_batched_tokens=limit)
