"""Weights that change under the engine: at once, everywhere, without another step built or a copy made."""

import dataclasses
import functools

import pytest
import torch
from examples_of import example
from tiny_models import fresh

import fnllm

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 33]
GREEDY = fnllm.Sampling(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
SMALL = {"num_blocks": 64, "block_size": 4}


def run(params):
    return fnllm.generate(params, [PROMPT], GREEDY, **SMALL)[0]


def change(tree, layer=1):
    with torch.no_grad():
        tree["layers"][layer]["down"].mul_(-2).add_(0.05)


def test_fault_11_weights_written_in_place_take_effect_at_once(tiny):
    params, expected = fresh(tiny), fresh(tiny)
    change(expected.tree)
    before = run(params)
    (machine,) = params.workspace.values()
    built, address = len(machine.runners), params.tree["layers"][1]["down"].data_ptr()
    pool = machine.resident.cache.k[0].data_ptr()
    change(params.tree)
    after = run(params)
    assert after.cached_tokens == 0
    assert after.token_ids == run(expected).token_ids != before.token_ids
    close = [x.logprob for x in run(expected).logprobs]
    assert [x.logprob for x in after.logprobs] == pytest.approx(close, abs=1e-5)
    assert (len(machine.runners), params.tree["layers"][1]["down"].data_ptr()) == (built, address)
    assert list(params.workspace.values()) == [machine] and machine.resident.cache.k[0].data_ptr() == pool
    assert run(params).cached_tokens == 8  # nothing changed since


def test_fault_11_a_replaced_tree_takes_effect_at_once(tiny):
    params, other = fresh(tiny), fresh(tiny)
    change(other.tree, layer=0)
    before = run(params)
    (machine,) = params.workspace.values()
    built = len(machine.runners)
    swapped = params._replace(tree=other.tree)  # the same workspace
    assert run(swapped).token_ids == run(other).token_ids != before.token_ids
    assert run(params).token_ids == before.token_ids  # and back
    assert len(machine.runners) == built and list(params.workspace.values()) == [machine]


def through_data(params):
    params.tree["layers"][1]["down"].data.mul_(-2).add_(0.05)


def through_numpy(params):
    weight = params.tree["layers"][1]["down"].detach().numpy()
    weight *= -2
    weight += 0.05


def in_inference_mode(params):
    with torch.inference_mode():
        params.tree["layers"][1]["down"].mul_(-2).add_(0.05)


@pytest.mark.parametrize("write", [through_data, through_numpy, in_inference_mode])
def test_writes_that_pytorch_does_not_count_are_told(tiny, write):
    params, expected = fresh(tiny), fresh(tiny)
    if write is in_inference_mode:
        with torch.inference_mode():
            params = fresh(tiny)
    change(expected.tree)
    before = run(params)
    write(params)
    fnllm.weights_changed(params)
    after = run(params)
    assert after.cached_tokens == 0 and after.token_ids == run(expected).token_ids != before.token_ids
    assert run(params).cached_tokens == 8  # told once, it is over


def test_an_optimizer_step_counts_as_a_change(tiny):
    params = fresh(tiny)
    weight = params.tree["layers"][2]["qkv"].requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=50.0)
    before = run(params)
    fnllm.score(params, [PROMPT])[0].sum().backward()
    optimizer.step()
    after = run(params)
    assert after.cached_tokens == 0 and after.logprobs != before.logprobs
    scored = fnllm.score(params, [PROMPT + list(after.token_ids)])[0][8:]
    torch.testing.assert_close(scored.detach(), torch.tensor([x.logprob for x in after.logprobs]), atol=1e-4, rtol=1e-4)


class OneOfAnother(torch.optim.Optimizer):
    """An optimizer of somebody's own, who writes through `.data`."""

    def __init__(self, weights, lr):
        super().__init__(weights, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.data.sub_(group["lr"] * weight.grad)


OPTIMIZERS = [
    functools.partial(getattr(torch.optim, name), **how)
    for name in ("Adam", "AdamW", "SGD", "Adagrad")
    for how in ({}, {"foreach": True}, {"fused": True})
]


@pytest.mark.parametrize("make", [*OPTIMIZERS, OneOfAnother], ids=lambda make: str(getattr(make, "keywords", "own")))
@pytest.mark.parametrize("closure", [False, True])
def test_steps_of_all_optimizers_are_counted_as_writes(make, closure):
    """Those of kernels of their own too, whose writes PyTorch does not count."""
    weight, other = (torch.ones(3, requires_grad=True) for _ in range(2))
    optimizer = make([weight, other], lr=0.1)

    def loss():
        optimizer.zero_grad()
        (total := (weight * 2).sum()).backward()
        return total

    squares = other.square().sum()
    if not closure:
        loss()
    before = weight._version
    optimizer.step(loss) if closure and make is not OneOfAnother else (loss(), optimizer.step())
    assert weight._version > before and not torch.equal(weight.detach(), torch.ones(3))
    squares.backward()  # the other was not written, so that its graph is whole
    counted = weight._version
    optimizer.register_step_post_hook(lambda *args: optimizer.zero_grad())
    optimizer.step()
    assert weight._version > counted


@pytest.mark.parametrize("make", [m for m in OPTIMIZERS if "fused" in m.keywords], ids=lambda m: m.func.__name__)
def test_a_fused_step_counts_as_a_change(tiny, make):
    params = fresh(tiny)
    weight = params.tree["layers"][2]["qkv"].requires_grad_()
    optimizer = make([weight], lr=0.3)
    before = run(params)
    fnllm.score(params, [PROMPT])[0].sum().backward()
    optimizer.step()
    after = run(params)
    assert after.cached_tokens == 0 and after.logprobs != before.logprobs
    assert after.logprobs[0].logprob == pytest.approx(run(fresh(params)).logprobs[0].logprob, abs=1e-5)
    assert run(params).cached_tokens == 8


@pytest.mark.compiled
def test_a_compiled_fused_step_is_counted_too():
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight], lr=torch.tensor(0.1), fused=True)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(2):
        before = weight._version
        step()
        assert weight._version > before


def test_a_weight_given_another_storage_is_noticed(tiny):
    params, expected = fresh(tiny), fresh(tiny)
    run(params)
    weight = params.tree["layers"][1]["down"]
    weight.data = -2 * weight.data + 0.05
    change(expected.tree)
    assert run(params).token_ids == run(expected).token_ids and run(params).cached_tokens == 8


def by_another_tensor(tree):
    tree["layers"][1]["down"] = -2 * tree["layers"][1]["down"] + 0.05


@pytest.mark.parametrize("write", [change, by_another_tensor])
def test_running_sequences_go_on_with_new_weights_and_the_keys_they_have(tiny, write):
    """As the last token does over a prompt that the older weights computed, whichever way the weights came."""
    params, old, new = fresh(tiny), fresh(tiny), fresh(tiny)
    engine = fnllm.engine(params, **SMALL)
    state, seq_id = fnllm.add(engine.init(), engine.request(PROMPT, GREEDY))
    state, _ = engine.step(state)
    write(params.tree)
    state, step = engine.step(state)
    found = step.results.logprob.item()
    keys = fnllm.generate(old, [PROMPT], GREEDY, capture=["*.k", "*.v"], **SMALL)[0]
    write(new.tree)
    given = [fnllm.patch(site, rows[: len(PROMPT)], 0) for site, rows in keys.captured.items()]
    tokens = [*PROMPT, keys.token_ids[0]]
    expected = fnllm.generate(new, [tokens], dataclasses.replace(GREEDY, max_tokens=1), edits=given, **SMALL)[0]
    assert found == pytest.approx(expected.logprobs[0].logprob, abs=1e-5)


@pytest.mark.parametrize("write", [change, by_another_tensor])
def test_no_prefix_is_found_that_a_sequence_made_while_a_weight_was_another_for_a_while(tiny, write):
    params = fresh(tiny)
    kept = params.tree["layers"][1]["down"], params.tree["layers"][1]["down"].clone()
    engine = fnllm.engine(params, **SMALL)
    state, seq_id = fnllm.add(engine.init(), engine.request(PROMPT, dataclasses.replace(GREEDY, max_tokens=12)))
    state, _ = engine.step(state)
    write(params.tree)
    for _ in range(8):
        state, _ = engine.step(state)
    params.tree["layers"][1]["down"] = kept[0].copy_(kept[1]) if write is change else kept[0]
    tokens = fnllm.tokens(state, seq_id)
    state, second = fnllm.add(state, engine.request(tokens, GREEDY))
    while (stepped := engine.step(state))[1] is not None:
        state = stepped[0]
    expected = fnllm.generate(fresh(tiny), [tokens], GREEDY, **SMALL)[0]
    assert fnllm.tokens(state, second)[len(tokens) :] == expected.token_ids


def test_weights_that_an_edit_holds_are_weights_too(tiny):
    params, by = fresh(tiny), torch.tensor(2.0)
    edit = fnllm.Edit("layers.0.resid_post", lambda x, ctx: x * by)
    before = fnllm.generate(params, [PROMPT], GREEDY, edits=edit, **SMALL)[0]
    by += 1
    after = fnllm.generate(params, [PROMPT], GREEDY, edits=edit, **SMALL)[0]
    assert after.cached_tokens == 0 and before.logprobs != after.logprobs


def test_the_example_learns(tiny):
    """Twelve rounds on the three-layer model: more of the tokens it draws lie in the upper half of the vocabulary."""
    policy = example("on_policy")
    params = fresh(tiny)
    history = policy.train(
        params,
        [PROMPT, PROMPT[:4]],
        lambda out: sum(i >= 80 for i in out.token_ids) / len(out.token_ids),
        rounds=12,
        samples=16,
        length=6,
        rate=1e-2,
        max_num_seqs=32,
        **SMALL,
    )
    assert sum(one.reward for one in history[-3:]) > sum(one.reward for one in history[:3]) + 0.45
    assert max(one.gap for one in history) < 1e-3
    (machine,) = params.workspace.values()
    assert len(machine.runners) == 1


def test_words_in_s():
    assert example("on_policy").words_in_s("She sees the sea, sea side 9") == 4 / 6
