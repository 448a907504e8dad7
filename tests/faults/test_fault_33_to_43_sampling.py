"""Reported faults of sampling and determinism, through `generate` on models whose logits are known."""

import dataclasses

import pytest
import torch
from tiny_models import plain_greedy, speller, tiny

import fnllm
from fnllm import Sampling

SIZES = {"num_blocks": 60, "block_size": 4, "max_model_len": 40, "max_num_seqs": 4}
PROMPTS = [[5, 6, 7], [8], [5, 6, 7, 9, 10, 11, 12], [3, 1, 2, 4], [9, 9], [20, 21, 22]]


def fixed(logits, dtype=torch.float32) -> fnllm.Params:
    """A model whose logits are these after every token."""
    params = speller((3,))
    head = torch.zeros(16, len(params.tree["embed"]))
    head[0, : len(logits)] = torch.tensor(logits, dtype=torch.float32)
    head[0, len(logits) :] = min(logits) - 1e4
    embed = torch.zeros_like(params.tree["embed"])
    embed[:, 0] = 0.25  # the norm makes it sqrt(16) = 4
    tree = {**params.tree, "embed": embed, "lm_head": head.T.contiguous() / 4}
    return params._replace(tree=cast(tree, dtype), tokenizer=None, workspace={})


def cast(tree, dtype):
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype)
    return [cast(x, dtype) for x in tree] if isinstance(tree, list) else {k: cast(x, dtype) for k, x in tree.items()}


def drawn(params: fnllm.Params, count: int = 200, **setting) -> list[int]:
    """First tokens of many samples."""
    setting = Sampling(n=count, max_tokens=1, ignore_eos=True, seed=7, **setting)
    return [one.token_ids[0] for one in fnllm.generate(params, [[3]], setting, **{**SIZES, "max_num_seqs": 64})]


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-12, 1e-300, 0])
def test_fault_33_a_tiny_temperature_takes_the_largest(temperature):
    params = fixed([-6e4, 5.9e4, 6e4, 1.0], torch.float16)
    assert set(drawn(params, 20, temperature=temperature)) == {2}
    assert set(drawn(params, 20, temperature=temperature, top_p=0.9, top_k=3, min_p=0.01)) == {2}


@pytest.mark.parametrize("setting", [{}, {"top_p": 0.9}, {"min_p": 0.01}, {"repetition_penalty": 1.0}])
def test_fault_34_greedy_beside_others_is_greedy(setting):
    hot = Sampling(temperature=1.5, max_tokens=8, ignore_eos=True, seed=1, **setting)
    cold = Sampling(temperature=0, max_tokens=8, ignore_eos=True)
    done = fnllm.generate(tiny(), [PROMPTS[0], PROMPTS[0], PROMPTS[3]], [cold, hot, cold], **SIZES)
    assert [done[i].token_ids for i in (0, 2)] == [plain_greedy(tiny(), PROMPTS[i], 8) for i in (0, 3)]
    assert done[1].token_ids != done[0].token_ids


def test_fault_35_the_lowest_id_wins_a_tie():
    params = fixed([1.0, 4.0, 4.0, 0.0])
    assert set(drawn(params, 30, temperature=0)) == {1}
    assert set(drawn(params, 30, temperature=1, top_k=1)) == {1}


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.4}, {0}),
        ({"top_p": 0.8}, {0, 1, 2}),
        ({"min_p": 0.29}, {0, 1, 2}),
        ({"min_p": 0.31}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2}),
    ],
)
def test_fault_37_the_token_that_crosses_the_threshold_stays(setting, kept):
    params = fixed([float(x) for x in torch.tensor([0.5, 0.25, 0.15, 0.1]).log()])
    assert set(drawn(params, temperature=1.0, **setting)) == kept


def test_fault_39_a_seed_belongs_to_its_request():
    settings = [Sampling(temperature=1.2, max_tokens=6, ignore_eos=True, seed=index) for index in range(6)]
    expected = [fnllm.generate(tiny(), p, s, **SIZES)[0].token_ids for p, s in zip(PROMPTS, settings, strict=True)]
    for order, seqs in (((0, 1, 2, 3, 4, 5), 6), ((5, 3, 1, 0, 2, 4), 2), ((4, 5, 0, 2, 1, 3), 3)):
        sizes = {**SIZES, "max_num_seqs": seqs, "num_blocks": 12 if seqs == 3 else 60}
        done = fnllm.generate(tiny(), [PROMPTS[i] for i in order], [settings[i] for i in order], **sizes)
        assert [one.token_ids for one in done] == [expected[i] for i in order]
    four = dataclasses.replace(settings[0], n=4)
    first, again = ([one.token_ids for one in fnllm.generate(tiny(), PROMPTS[0], four, **SIZES)] for _ in range(2))
    assert first == again and len(set(first)) == 4


@pytest.mark.parametrize("options", [{}, {"max_chunk": 2}, {"max_num_batched_tokens": 3}, {"prefix_cache": False}])
def test_fault_40_greedy_text_does_not_depend_on_company(options):
    setting = Sampling(temperature=0, max_tokens=8, ignore_eos=True)
    alone = fnllm.generate(tiny(), PROMPTS[0], setting, **SIZES)[0].token_ids
    together = fnllm.generate(tiny(), [*PROMPTS, [1, 2]], setting, **{**SIZES, **options})
    assert together[0].token_ids == alone


@pytest.mark.parametrize("options", [{}, {"max_chunk": 2}, {"prefix_cache": False, "max_num_batched_tokens": 3}])
def test_fault_40_in_the_declared_mode_bits_do_not_either(options):
    setting = Sampling(temperature=0, max_tokens=5, ignore_eos=True)
    mode = {**SIZES, "numerics": "batch_invariant", "capture": fnllm.Capture("logits", "output")}
    alone = fnllm.generate(tiny(), PROMPTS[2], setting, **mode)[0].captured["logits"]
    together = fnllm.generate(tiny(), [*PROMPTS[:3], [1, 2]], setting, **{**mode, **options})[2].captured["logits"]
    assert len(alone) == 4 and torch.equal(alone, together)


def test_fault_41_scores_apart_and_together():
    apart = [fnllm.score(tiny(), [prompt])[0] for prompt in PROMPTS]
    for one, other in zip(apart, fnllm.score(tiny(), PROMPTS), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    mode = {"numerics": "batch_invariant"}
    apart = [fnllm.score(tiny(), [prompt], **mode)[0] for prompt in PROMPTS]
    assert all(torch.equal(*pair) for pair in zip(apart, fnllm.score(tiny(), PROMPTS, **mode), strict=True))


@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_fault_41_a_log_probability_is_of_the_raw_logits(temperature):
    """Whatever temperature and filters drew the token."""
    setting = Sampling(temperature=temperature, top_k=3, max_tokens=4, ignore_eos=True, logprobs=0, seed=2)
    one = fnllm.generate(tiny(), PROMPTS[2], setting, **SIZES)[0]
    expected = fnllm.score(tiny(), [[*PROMPTS[2], *one.token_ids]])[0][len(PROMPTS[2]) - 1 :]
    torch.testing.assert_close(torch.tensor([x.logprob for x in one.logprobs]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"max_chunk": 2}, {"num_blocks": 11}, {"prefix_cache": False}, {"numerics": "batch_invariant"}]
)
def test_fault_82_generated_and_scored_log_probabilities_agree(options):
    setting = Sampling(temperature=1.0, max_tokens=12, ignore_eos=True, logprobs=0)
    options = {**SIZES, **options}
    done = fnllm.generate(tiny(), PROMPTS, setting, seed=3, **options)
    numerics = options.get("numerics", "default")
    texts = [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, done, strict=True)]
    for prompt, one, scored in zip(PROMPTS, done, fnllm.score(tiny(), texts, numerics=numerics), strict=True):
        found = torch.tensor([x.logprob for x in one.logprobs])
        expected = scored[len(prompt) - 1 :]
        if numerics == "batch_invariant":
            assert torch.equal(found, expected)
        else:
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_token_without_probability_is_never_drawn():
    params = fixed([0.0, 0.0, 0.0, 0.0])
    banned = {0: -float("inf"), 2: -float("inf")}
    assert set(drawn(params, 300, temperature=5.0, logit_bias=banned)) == {1, 3}
