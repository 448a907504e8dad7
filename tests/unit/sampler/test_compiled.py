"""The sampler inside torch.compile: one graph for every batch size, and the tokens of eager mode."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fnllm.sampler import (
    History,
    SamplerFeatures,
    default_rows,
    empty_history,
    sample,
    token_logprobs,
    update_history,
)
from fnllm_kernels.noise import row_keys, token_hash

torch.set_num_threads(1)
pytestmark = pytest.mark.compiled
VOCAB = 203


def halve(z, history):
    return z / 2


FEATURES = {
    "greedy": SamplerFeatures(),
    "filters": SamplerFeatures(noise=True, top_k=True, top_p=True, min_p=True),
    "everything": SamplerFeatures(
        noise=True, top_k=True, top_p=True, candidates=True, penalties=True, bias=2, stops=2, logprobs=2,
        logits_fns=(halve,),
    ),
}  # fmt: skip


def batch_of(n, features):
    torch.manual_seed(n)
    rows = default_rows(n, features=features)._replace(
        temperature=torch.rand(n).round(decimals=1), top_k=torch.randint(1, 60, (n,), dtype=torch.int32),
        top_p=torch.rand(n), min_p=torch.rand(n) / 10, seed=torch.randint(-(2**62), 2**62, (n,)),
        repetition_penalty=torch.rand(n) + 1, logits_fn=torch.randint(-1, 1, (n,), dtype=torch.int32),
    )  # fmt: skip
    if features.bias:
        rows = rows._replace(bias_ids=torch.randint(-1, VOCAB, (n, 2)), bias_values=torch.randn(n, 2))
        rows = rows._replace(stop_ids=torch.randint(-1, VOCAB, (n, 2)), min_position=torch.randint(0, 9, (n,)))
    history = empty_history(n, 6)
    return (torch.randn(n, VOCAB) * 3).round(), rows, torch.arange(n), history


@pytest.mark.parametrize("name", FEATURES)
def test_compiled_equals_eager_in_one_graph(name):
    features = FEATURES[name]

    def step(logits, rows, positions, history: History):
        out = sample(logits, rows, positions, features=features, vocab_limit=VOCAB - 3, history=history)
        accept = torch.ones_like(out.ids, dtype=torch.bool)
        return out, positions + 1, update_history(history, torch.arange(out.ids.shape[0]), out.ids, accept)

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for n in (4, 7, 5):
        logits, rows, positions, history = batch_of(n, features)
        other = (positions, history)
        for _ in range(4):
            out, positions, history = step(logits, rows, positions, history)
            got, *other = compiled(logits, rows, *other)
            assert torch.equal(got.ids, out.ids)
            assert torch.equal(other[1].tokens, history.tokens)
            if features.logprobs:
                torch.testing.assert_close(got.logprob, out.logprob)
                assert torch.equal(got.top_ids, out.top_ids)
    assert counter.frame_count == 1


def test_plain_torch_noise_traces_to_the_same_integers_and_draws():
    features = SamplerFeatures(noise=True)

    def draw(logits, rows, positions):
        ids = torch.arange(logits.shape[1])
        hashes = token_hash(*row_keys(rows.seed, positions), ids)
        return hashes, sample(logits, rows, positions, features=features, vocab_limit=VOCAB, kernels=False).ids

    compiled = torch.compile(draw, fullgraph=True, dynamic=True)
    for n in (3, 6):
        logits, rows, positions, _ = batch_of(n, features)
        for got, want in zip(compiled(logits, rows, positions), draw(logits, rows, positions), strict=True):
            assert torch.equal(got, want)


def test_draw_and_scoring_trace():
    def both(hidden, weight, rows, positions, ids):
        logits = hidden @ weight.T
        out = sample(logits, rows, positions, features=SamplerFeatures(noise=True), vocab_limit=40, kernels=True)
        return out.ids, token_logprobs(logits, ids, vocab_limit=40)

    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    torch.manual_seed(0)
    weight = torch.randn(41, 8)
    for n in (3, 6):
        _, rows, positions, _ = batch_of(n, SamplerFeatures())
        args = (torch.randn(n, 8), weight, rows, positions, torch.arange(n))
        (ids, logprobs), (want_ids, want) = compiled(*args), both(*args)
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(logprobs, want, rtol=0, atol=1e-5)
