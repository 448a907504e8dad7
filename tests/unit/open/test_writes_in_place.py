"""Functions of one request that write to their arguments, in cases that no trial covers, change no other request."""

from dataclasses import replace

import pytest
import torch

import fnllm
from fnllm.sampler import History, SamplerFeatures, default_rows, sample

GREEDY = fnllm.Sampling(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
SMALL = {"num_blocks": 64, "block_size": 4}
PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7]]
SITE = "layers.1.resid_post"


def late_zeros(x, ctx):
    late = ctx.batch.positions > 5
    if late.any():
        x[late, :24] = 0
    return x


def late_ban(logits, history):
    late = history.lengths - history.prompt_lengths >= 3
    if late.any():
        logits[late, :80] = -torch.inf
    return logits


def wide_zeros(x, ctx):
    if ctx.batch.max_seqlen > 3:
        x[:, :24] = 0
    return x


def ban_of_two(logits, history):
    if logits.shape[0] == 2:
        logits[:, :80] = -torch.inf
    return logits


def eager_and_compiled(by_values, by_sizes):
    """A function that branches on values runs in eager steps alone."""
    compiled, marks = {"compile": "inductor", "max_num_seqs": 4}, (pytest.mark.compiled, pytest.mark.slow)
    cases = [(by_values, {}), (by_sizes, {}), pytest.param(by_sizes, compiled, marks=marks)]
    return pytest.mark.parametrize("function, options", cases)


@eager_and_compiled(late_zeros, wide_zeros)
def test_an_edit_leaves_the_request_beside_it_alone(tiny, function, options):
    plain = fnllm.generate(tiny, PROMPTS, GREEDY, **SMALL)
    edits = [[fnllm.Edit(SITE, function)], None]
    edited, beside = fnllm.generate(tiny, PROMPTS, GREEDY, edits=edits, **SMALL, **options)
    assert beside.token_ids == plain[1].token_ids and edited.token_ids != plain[0].token_ids


@eager_and_compiled(late_ban, ban_of_two)
def test_a_logits_fn_leaves_other_requests_and_reported_logprobs_alone(tiny, function, options):
    plain = fnllm.generate(tiny, PROMPTS, GREEDY, **SMALL)
    sampling = [replace(GREEDY, logits_fn=function), GREEDY]
    banned, beside = fnllm.generate(tiny, PROMPTS, sampling, **SMALL, **options)
    assert beside.token_ids == plain[1].token_ids and banned.token_ids != plain[0].token_ids
    scores = fnllm.score(tiny, [PROMPTS[0] + list(banned.token_ids)])[0][4:]
    assert [one.logprob for one in banned.logprobs] == pytest.approx(scores.tolist(), abs=1e-4)


def writes_over_all(logits, history):
    logits.fill_(-torch.inf)[:, 0] = 0.0
    history.tokens.zero_()
    history.lengths.zero_()
    return logits


def unlike_the_last(logits, history):
    last = history.tokens.gather(1, history.lengths[:, None] - 1)
    return logits.scatter(1, last.long(), -torch.inf)


def test_each_logits_fn_has_logits_and_history_of_its_own():
    """Also beside penalties, which look at the history after them."""
    features = SamplerFeatures(logits_fns=(writes_over_all, unlike_the_last), penalties=True, logprobs=0)
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]]).repeat(3, 1)
    rows = default_rows(3, features=features)._replace(
        temperature=torch.zeros(3),
        logits_fn=torch.tensor([0, 1, -1], dtype=torch.int32),
        presence_penalty=torch.tensor([0.0, 0.0, 9.0]),
    )
    one = torch.ones(3, dtype=torch.int64)
    history = History(torch.full((3, 4), 2, dtype=torch.int32), prompt_lengths=one, lengths=2 * one)
    got = sample(logits, rows, 2 * one, features=features, vocab_limit=4, history=history)
    assert got.ids.tolist() == [0, 3, 3]
    expected = torch.tensor([0.0, 1.0, 3.0, 2.0]).log_softmax(0)[[0, 3, 3]]
    torch.testing.assert_close(got.logprob, expected)
