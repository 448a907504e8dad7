"""Rows that cannot draw: NaN or infinity among the logits, or nothing that may be drawn. Others never notice."""

import pytest
import torch
from unit.sampler.settings import FILTERS, NOISE, Settings

from fnllm.sampler import (
    NAN_ID,
    NOTHING_ID,
    SamplerFeatures,
    default_rows,
    empty_history,
    features_of,
    rows_from_sampling,
    sample,
)
from fnllm.tensor_parallel import SINGLE, simulate

torch.set_num_threads(1)
EVERYTHING = SamplerFeatures(
    noise=True, top_k=True, top_p=True, min_p=True, penalties=True, bias=1, logprobs=2, logits_fns=(lambda z, h: z,)
)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("features", [SamplerFeatures(), NOISE, FILTERS, EVERYTHING], ids=["none", "noise", "f", "all"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_row_with_nan_or_nothing_to_draw_says_so_and_the_others_draw_as_ever(kernels, features, ranks):
    torch.manual_seed(0)
    logits = torch.randn(6, 30)
    rows = default_rows(6, features=features)._replace(
        temperature=torch.tensor([0.0, 1.0, 0.0, 1.0, 0.7, 0.7]), top_p=torch.full((6,), 0.9), seed=torch.arange(6)
    )
    history = empty_history(6, 4)

    def drawn(logits):
        def local(tp, z):
            return sample(
                z, rows, torch.arange(6), features=features, vocab_limit=28, vocab_size=29, vocab_start=10 * tp.rank,
                history=history, tp=tp, kernels=kernels,
            ).ids  # fmt: skip

        if ranks == 1:
            return local(SINGLE, logits[:, :29]).tolist()
        first, *others = simulate(ranks, local, logits.chunk(ranks, 1)).results
        assert all(torch.equal(first, other) for other in others)
        return first.tolist()

    healthy = drawn(logits)
    broken = logits.clone()
    broken[1] = torch.nan
    broken[2, 13] = torch.nan
    broken[5, 0] = torch.inf
    broken[3] = -torch.inf
    broken[4, 28] = torch.nan  # not to be drawn
    assert drawn(broken) == [healthy[0], NAN_ID, NAN_ID, NOTHING_ID, healthy[4], NAN_ID]


def test_a_logits_fn_that_makes_nan_or_forbids_all_fails_its_rows_alone():
    def less_the_mean(z, history):  # of -inf past the limit, too: all others become inf
        return z - z.mean(-1, keepdim=True)

    def nothing(z, history):
        return torch.full_like(z, -torch.inf)

    torch.manual_seed(1)
    settings = [Settings(temperature=0), Settings(logits_fn=less_the_mean), Settings(logits_fn=nothing)]
    features = features_of(settings)
    rows = rows_from_sampling(settings, features=features)
    logits = torch.randn(3, 11)
    sizes = {"vocab_limit": 9, "vocab_size": 11}
    out = sample(logits, rows, torch.arange(3), features=features, history=empty_history(3, 2), **sizes)
    assert out.ids.tolist() == [int(logits[0, :9].argmax()), NAN_ID, NOTHING_ID]


@pytest.mark.parametrize("features", [FILTERS, EVERYTHING], ids=["filters", "all"])
def test_float64_logits_draw_as_float32_ones_and_keep_their_digits_in_log_probabilities(features):
    torch.manual_seed(3)
    logits = torch.randn(40, 30)
    rows = default_rows(40, features=features)._replace(
        temperature=torch.full((40,), 0.8), top_p=torch.full((40,), 0.5), seed=torch.arange(40)
    )
    options = {"features": features, "vocab_limit": 28, "vocab_size": 30, "history": empty_history(40, 2)}
    single, double = (sample(z, rows, torch.arange(40), **options) for z in (logits, logits.double()))
    assert torch.equal(single.ids, double.ids)
    if features.logprobs:
        want = logits.double().log_softmax(-1).gather(1, double.ids[:, None])[:, 0]
        torch.testing.assert_close(double.logprob, want, rtol=0, atol=1e-9)
