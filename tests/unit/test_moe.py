"""Mixture of experts: the chosen experts' work alone, with the values and gradients of all experts on all tokens."""

import pytest
import torch
from tiny_models import checkpoint, golden, tiny
from tracing import without_code_generation

import fnllm
from fnllm import layers as plain
from fnllm.rope import make_rope
from fnllm.scoring import context, packed_batch, packed_logprobs

FIELDS = {
    "architectures": ("Qwen3MoeForCausalLM",), "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 11,
    "decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": True,
}  # fmt: skip
IDS = [3, 14, 15, 9, 26, 5, 35, 8]


def linear(p, x, ctx):
    """A swapped function, for which every expert runs on every token."""
    return torch.nn.functional.linear(x, p)


DENSE = fnllm.Layers()._replace(linear=linear)


def sparse_layer(dtype=torch.float32):
    p = {
        name: x.detach().clone().to(dtype)
        for name, x in tiny(7, **FIELDS).tree["layers"][0].items()
        if name in ("router", "experts_gate_up", "experts_down")
    }
    return p, torch.randn(8, 24, generator=torch.Generator().manual_seed(1)).to(dtype)  # leaves of their own


def context_of(layers):
    params = tiny(7, **FIELDS)
    return context(params, packed_batch(torch.tensor(IDS), [len(IDS)], make_rope(params.config, "cpu")), layers)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_all_experts_on_all_tokens(dtype):
    p, x = sparse_layer(dtype)
    leaves = [leaf.requires_grad_() for leaf in (x, *p.values())]
    found = []
    for layers in (fnllm.Layers(), DENSE):
        for leaf in leaves:
            leaf.grad = None
        y = plain.moe(p, x, context_of(layers))
        y.square().sum().backward()
        found.append([y.detach(), *(leaf.grad for leaf in leaves)])
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.1}[dtype]
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() < tolerance * want.norm()


def test_only_the_chosen_experts_work():
    rows = []

    def activation(gate_up, ctx):
        rows.append((gate_up.shape[0], ctx.batch.token_ids.shape[0]))
        return plain.activation(gate_up, ctx)

    p, x = sparse_layer()
    y = plain.moe(p, x, context_of(fnllm.Layers()._replace(activation=activation)))
    assert rows == [(8 * 3, 8 * 3)]  # and the batch that it may look at has the same rows
    assert torch.equal(y, plain.moe(p, x, context_of(fnllm.Layers())))


def test_tokens_do_not_meet_in_an_expert():
    p, x = sparse_layer(torch.float64)
    whole = plain.moe(p, x, context_of(fnllm.Layers()))
    for row in range(len(x)):
        alone = plain.moe(p, x[row : row + 1], context_of(fnllm.Layers()))
        torch.testing.assert_close(alone, whole[row : row + 1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["qwen3-moe-norm", "qwen3-moe-mixed"])
def test_a_swapped_linear_gives_the_same_greedy_tokens(name):
    one = golden(name)["p17"]
    greedy = fnllm.Sampling(temperature=0, max_tokens=len(one["greedy"]), ignore_eos=True)
    done = fnllm.generate(checkpoint(name), one["prompt"], greedy, layers=DENSE, max_model_len=64, max_num_seqs=2)
    assert list(done[0].token_ids) == one["greedy"]


def test_gradients_of_each_example():
    params = tiny(7, **FIELDS)
    batch = torch.tensor([IDS, IDS[::-1]])

    def loss(layers):
        def of(tree, ids):
            ctx = context(params, packed_batch(ids, [len(IDS)], make_rope(params.config, "cpu")), layers)
            return packed_logprobs(tree, fnllm.forward(tree, ctx), ctx).sum()

        return torch.func.vmap(torch.func.grad(of), in_dims=(None, 0))(params.tree, batch)

    got, want = loss(fnllm.Layers()), loss(DENSE)
    for name in ("router", "experts_gate_up", "experts_down"):
        a, b = got["layers"][1][name], want["layers"][1][name]
        assert (a - b).norm() < 1e-3 * b.norm(), name


@pytest.mark.compiled
def test_the_traced_step_gives_the_same_tokens():
    """Code is generated for one in tests/compiled/test_open_step.py."""
    params = tiny(7, **FIELDS)
    options = {"max_model_len": 32, "max_num_seqs": 3, "block_size": 4}
    greedy = fnllm.Sampling(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [IDS, IDS[:3], IDS[2:]]
    with without_code_generation():
        eager, traced = (
            [one.token_ids for one in fnllm.generate(params, prompts, greedy, compile=mode, **options)]
            for mode in ("none", "inductor")
        )
    assert eager == traced
