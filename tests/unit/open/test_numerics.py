"""What each numerics mode promises; every test here is a cell of the table in docs/numerics.md."""

import random

import pytest
import torch
from gpu_cases import DRAWN, SURROUNDINGS, bits, counted, ways
from gpu_cases import prompts_of as drawn_prompts
from torch.nn.attention import SDPBackend, sdpa_kernel

import fnllm
import fnllm.numerics
from fnllm.numerics import heads_by_kernel, layers_for
from fnllm.tensor_parallel import Ordered
from fnllm_kernels.attention import paged_attention
from fnllm_kernels.invariant_linear import invariant_linear

SMALL = {"num_blocks": 64, "block_size": 4}
NAMES = ("qwen3-tiny", "qwen2-window", "qwen3-odd", "qwen3-moe-norm")
DTYPES = (torch.float32, torch.bfloat16)
WAYS = ways()


def prompts(params):
    return drawn_prompts(params.config.vocab_size)


@pytest.fixture(scope="module")
def alone():
    """Each prompt by itself: the bits that everything else must give."""
    known = {}

    def run(params):
        key = id(params)
        if key not in known:
            known[key] = [
                bits(fnllm.generate(params, [p], DRAWN, prefix_cache=False, **SURROUNDINGS))[0] for p in prompts(params)
            ]
        return known[key]

    return run


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fault_40_bits_do_not_depend_on(way, dtype, checkpoint, alone):
    params, options = checkpoint("qwen3-tiny", dtype), {**SURROUNDINGS, **WAYS[way]}
    assert bits(fnllm.generate(params, prompts(params), DRAWN, **options)) == alone(params)
    assert (counted(params, options).preemptions > 0) == (way == "preemption")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES[1:])
def test_other_architectures_in_one_crowded_run(name, dtype, checkpoint, alone):
    """Sliding windows, odd sizes and experts; batch mates, chunks and preemption at once."""
    params = checkpoint(name, dtype)
    crowded = {**SURROUNDINGS, **WAYS["chunks of 7"], **WAYS["preemption"]}
    assert bits(fnllm.generate(params, prompts(params), DRAWN, **crowded)) == alone(params)
    assert counted(params, crowded).preemptions > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_prefix_hits(dtype, checkpoint, alone):
    params = checkpoint("qwen3-tiny", dtype)
    for _ in range(2):
        outs = fnllm.generate(params, prompts(params)[::-1], DRAWN, **SURROUNDINGS)[::-1]
        assert bits(outs) == alone(params)
    assert sum(out.cached_tokens for out in outs) > 30


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_fault_82_score_gives_generates_bits(name, dtype, checkpoint, alone):
    params = checkpoint(name, dtype)
    sequences = [p + list(ids) for p, (ids, _) in zip(prompts(params), alone(params), strict=True)]
    for limit in (16384, 40):  # other packs, other batch mates
        scored = fnllm.score(params, sequences, numerics="batch_invariant", max_batched_tokens=limit)
        for p, x, (_, logprobs) in zip(prompts(params), scored, alone(params), strict=True):
            assert x[len(p) - 1 :].tolist() == [one.logprob for one in logprobs]


def swapped(inside):
    """Functions of a caller around others, that change nothing themselves."""

    def linear(p, x, ctx):
        return inside.linear(p, x, ctx)

    def attend(q, k, v, ctx):
        return inside.attend(q, k, v, ctx)

    return fnllm.Layers(linear=linear, attend=attend)


def test_swapped_functions_around_the_modes_own_keep_the_bits(checkpoint, alone):
    """And around the usual ones they do not, so that the test can fail."""
    params = checkpoint("qwen3-tiny")
    sequences = [p + list(ids) for p, (ids, _) in zip(prompts(params), alone(params), strict=True)]
    new = [[one.logprob for one in logprobs] for _, logprobs in alone(params)]
    for inside, keeps in ((fnllm.numerics, True), (fnllm.Layers(), False)):
        scored = fnllm.score(params, sequences, numerics="batch_invariant", layers=swapped(inside))
        found = [x[len(p) - 1 :].tolist() for p, x in zip(prompts(params), scored, strict=True)]
        assert (found == new) == keeps


def test_the_default_mode_does_depend_on_the_batch(checkpoint, alone):
    """So the tests above can fail. What holds is equality within rounding."""
    params = checkpoint("qwen3-tiny")
    greedy = fnllm.Sampling(temperature=0, max_tokens=10, logprobs=0, ignore_eos=True)
    apart = [fnllm.generate(params, [p], greedy, **SMALL)[0] for p in prompts(params)]
    beside = fnllm.generate(params, prompts(params), greedy, **SMALL)
    assert [a.token_ids for a in apart] == [b.token_ids for b in beside]
    ours, theirs = ([x.logprob for out in outs for x in out.logprobs] for outs in (apart, beside))
    assert ours != theirs and ours == pytest.approx(theirs, abs=1e-4)
    for p, out in zip(prompts(params), beside, strict=True):
        scored = fnllm.score(params, [p + list(out.token_ids)])[0][len(p) - 1 :]
        assert scored.tolist() == pytest.approx([x.logprob for x in out.logprobs], abs=1e-4)


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen2-window"])  # with and without norms of q and k
def test_q_and_k_by_generations_kernel_are_the_plain_ones_with_their_gradients(name, checkpoint):
    def attention(p, x, ctx):
        return fnllm.layers.attention(p, x, ctx, heads_by_kernel)

    found = []
    for layers in (None, fnllm.Layers()._replace(attention=attention)):
        params = checkpoint(name)
        leaves = [p["qkv"].detach().clone().requires_grad_() for p in params.tree["layers"]]
        tree = {**params.tree, "layers": [{**p, "qkv": x} for p, x in zip(params.tree["layers"], leaves, strict=True)]}
        scored = fnllm.score(params._replace(tree=tree), prompts(params)[2:4], layers=layers)
        sum(x.sum() for x in scored).backward()
        found.append([*(x.detach() for x in scored), *(x.grad for x in leaves)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_invariant_gradients_are_the_plain_ones(tiny):
    def gradient(numerics):
        leaf = tiny.tree["layers"][1]["gate_up"].detach().clone().requires_grad_()
        layers = [p if i != 1 else {**p, "gate_up": leaf} for i, p in enumerate(tiny.tree["layers"])]
        params = tiny._replace(tree={**tiny.tree, "layers": layers})
        fnllm.score(params, prompts(tiny)[1:4], numerics=numerics)[0].sum().backward()
        return leaf.grad

    torch.testing.assert_close(gradient("batch_invariant"), gradient("default"), rtol=1e-3, atol=1e-5)


def test_invariant_derivatives_of_every_kind_are_the_plain_ones(checkpoint):
    """Second ones by autograd (which needs an attention that has them), and first ones by torch.func."""
    params = checkpoint("qwen3-tiny", torch.float64)
    norm = params.tree["layers"][1]["input_norm"]

    def of(numerics):
        def scores(norm):
            layers = [p if i != 1 else {**p, "input_norm": norm} for i, p in enumerate(params.tree["layers"])]
            changed = params._replace(tree={**params.tree, "layers": layers})
            return fnllm.score(changed, [[5, 6, 7, 8]], numerics=numerics)[0]

        return scores

    def hessian(f):
        return lambda x: torch.autograd.functional.hessian(lambda x: f(x).sum(), x)

    for derivative in (torch.func.jacrev, hessian):
        with sdpa_kernel(SDPBackend.MATH):
            plain, invariant = (derivative(of(numerics))(norm) for numerics in ("default", "batch_invariant"))
        assert plain.abs().max() > 0.1
        torch.testing.assert_close(invariant, plain, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
def test_a_row_of_a_linear_map_is_alone(dtype):
    draw = random.Random(0)
    for _ in range(12):
        inputs, outputs = draw.randint(1, 300), draw.randint(1, 300)
        x = torch.randn(37, inputs, dtype=torch.float64).to(dtype)
        w = torch.randn(outputs, inputs, dtype=torch.float64).to(dtype)
        whole = invariant_linear(x, w)
        for first, last in ((0, 1), (3, 21), (36, 37), (16, 33)):
            assert torch.equal(invariant_linear(x[first:last], w), whole[first:last]), (inputs, outputs, first)
        bound = 1e-10 if dtype == torch.float64 else 1e-4 if dtype == torch.float32 else 0.02
        exact = x.double() @ w.double().T
        assert ((whole.double() - exact).abs() <= bound * (1 + x.double().abs() @ w.double().abs().T)).all()


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 16), (9, 3, 24), (5, 1, 10)])
def test_a_query_of_attention_is_alone(heads, kv_heads, dim, window):
    """One pass over 150 tokens against a query at a time, in blocks of another size; and against the plain form."""
    generator = torch.Generator().manual_seed(0)
    length = 150
    q, k, v = (torch.randn(length, n, dim, generator=generator) for n in (heads, kv_heads, kv_heads))

    def run(queries, context, block, backend="triton_invariant"):
        blocks = -(-length // block)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(block))
        cache = []
        for x in (k, v):
            pool = torch.full((blocks, block, kv_heads, dim), float("nan"))
            padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, blocks * block - length), value=float("nan"))
            pool[order] = padded.view(blocks, block, kv_heads, dim)
            cache.append(pool)
        cu = torch.tensor([0, queries.shape[0]], dtype=torch.int32)
        lens = torch.tensor([context], dtype=torch.int32)
        return paged_attention(queries, *cache, order[None].int(), cu, lens, max_seqlen_q=queries.shape[0], scale=0.3,
                               window=window, backend=backend)  # fmt: skip

    whole = run(q, length, 4)
    for place in (0, 1, 63, 64, 65, 149):
        assert torch.equal(run(q[place : place + 1], place + 1, 16)[0], whole[place])
    assert torch.equal(run(q[20:90], 90, 1), whole[20:90])
    torch.testing.assert_close(whole, run(q, length, 4, "reference"), rtol=1e-4, atol=1e-5)


def test_what_a_caller_swapped_stays_swapped():
    mine = fnllm.Layers()._replace(linear=max)
    assert layers_for(mine, "batch_invariant").linear is max
    assert layers_for(mine, "batch_invariant").attend is not mine.attend
    assert layers_for(mine, "default") == mine
    assert layers_for(mine, "batch_invariant", on_gpu=True)._replace(attention=mine.attention) == mine


def test_sums_over_ranks_are_in_rank_order():
    parts = [torch.randn(3, 7, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    run = fnllm.simulate(3, lambda tp, x: Ordered(tp).all_reduce(x), parts)
    assert all(torch.equal(x, (parts[0] + parts[1]) + parts[2]) for x in run.results)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"numerics": "exact"}, "numerics must be one of default, batch_invariant, found 'exact'"),
        ({"numerics": "batch_invariant", "compile": "inductor"}, "compile='none' or 'graphs'"),
        ({"numerics": "batch_invariant", "attention": "fa3"}, "its own attention backend"),
    ],
)
def test_options_that_contradict_are_refused(tiny, options, words):
    with pytest.raises(ValueError, match=words):
        fnllm.generate(tiny, [[3]], **options)
