"""The forward pass for some tokens only: the same values, and no feed-forward of the last layer for the others."""

import pytest
import torch
from tiny_models import tiny
from torch.utils.flop_counter import FlopCounterMode

import fnllm
from fnllm import layers as plain
from fnllm import numerics
from fnllm.model import rest_by_token
from fnllm.rope import make_rope
from fnllm.scoring import context, packed_batch
from fnllm.taps import Taps

LENGTHS = [7, 1, 4]
TOKENS = torch.tensor([6, 7, 11])
EXPERTS = {
    "architectures": ("Qwen3MoeForCausalLM",), "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 11,
    "decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": True,
}  # fmt: skip


def context_of(params, layers=None, taps=None):
    ids = torch.arange(sum(LENGTHS)) % 50
    batch = packed_batch(ids, LENGTHS, make_rope(params.config, "cpu"))
    return context(params, batch, layers or fnllm.Layers(), taps)


def flops_of(params, ctx, tokens):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        fnllm.forward(params.tree, ctx, tokens)
    return counter.get_total_flops()


@pytest.mark.parametrize("fields", [{}, EXPERTS], ids=["dense", "experts"])
def test_some_tokens_are_those_of_all(fields):
    params = tiny(3, **fields)
    ctx = context_of(params)
    with torch.no_grad():
        found, want = fnllm.forward(params.tree, ctx, TOKENS), fnllm.forward(params.tree, ctx)[TOKENS]
    torch.testing.assert_close(found, want)


def test_the_last_feed_forward_runs_for_the_tokens_asked_for():
    params = tiny(3)
    ctx, config = context_of(params), params.config
    saved = flops_of(params, ctx, None) - flops_of(params, ctx, TOKENS)
    assert saved == (sum(LENGTHS) - len(TOKENS)) * 6 * config.hidden_size * config.intermediate_size


def test_the_functions_of_batch_invariance_do_so_too(monkeypatch):
    rows, product = [], numerics.invariant_linear
    monkeypatch.setattr(numerics, "invariant_linear", lambda x, w: rows.append(x.shape[0]) or product(x, w))
    params = tiny(3)
    fnllm.forward(params.tree, context_of(params, numerics.layers_for(fnllm.Layers(), "batch_invariant")), TOKENS)
    assert rows == [sum(LENGTHS)] * 6 + [len(TOKENS)] * 2  # two layers of qkv, o, gate_up and down


def test_a_step_of_one_token_each_leaves_nothing_out():
    """Its tokens all pass the head; where logits are captured some pass it twice."""
    ctx = context_of(tiny(3))
    assert rest_by_token(ctx) and not rest_by_token(ctx._replace(batch=ctx.batch._replace(max_seqlen=1)))


@pytest.mark.parametrize("name", ["norm", "linear", "mlp", "activation", "moe"])
def test_a_function_of_ones_own_gets_every_token(name):
    seen, usual = [], getattr(plain, name)

    def own(*args):
        seen.append(args[0 if name == "activation" else 1].shape[0])
        return usual(*args)

    params = tiny(3, **EXPERTS) if name == "moe" else tiny(3)
    fnllm.forward(params.tree, context_of(params, fnllm.Layers()._replace(**{name: own})), TOKENS)
    assert set(seen) == {sum(LENGTHS)}


@pytest.mark.parametrize("name", ["resid_mid", "mlp_out", "resid_post", "final_norm"])
def test_a_site_behind_the_last_attention_sees_every_token(name):
    params = tiny(3)
    site = name if name == "final_norm" else f"layers.{params.config.num_hidden_layers - 1}.{name}"
    captured = {}
    fnllm.forward(params.tree, context_of(params, taps=Taps((site,), captured=captured)), TOKENS)
    assert captured[site].shape[0] == sum(LENGTHS)
