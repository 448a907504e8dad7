"""Top-k, top-p and min-p against a float64 sort and transformers; both searches; shards."""

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from unit.sampler.settings import kept_by_sorting

from fnllm.sampler import SamplerFeatures, default_rows
from fnllm.sampler.filters import Source, keep_mask
from fnllm.tensor_parallel import SINGLE, simulate
from fnllm_kernels.threshold import MASS_ONE, reach_among_few, reach_reference

torch.set_num_threads(1)
ALL = SamplerFeatures(noise=True, top_k=True, top_p=True, min_p=True)
CASES = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (0.7, 0, 0.8, 0.0),
    (1.5, 7, 0.9, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.6, 20, 0.95, 0.02),
    (1.0, 0, 0.0, 0.0),
    (1.0, 1, 0.5, 0.5),
    (2.0, 1000, 0.999, 0.0),
    (1e-12, 3, 0.9, 0.1),
]


def rows_of(cases):
    t, k, p, m = zip(*cases, strict=True)
    return default_rows(len(cases))._replace(
        temperature=torch.tensor(t), top_k=torch.tensor(k, dtype=torch.int32), top_p=torch.tensor(p),
        min_p=torch.tensor(m),
    )  # fmt: skip


def kept(logits, cases, features=ALL, tp=SINGLE, source=None):
    mask = keep_mask(logits, rows_of(cases), features=features, tp=tp, source=source)
    return [set(row.nonzero().flatten().tolist()) for row in mask]


def test_search_equals_a_sort_in_float64():
    torch.manual_seed(0)
    for scale in (0.1, 3.0, 30.0):
        logits = torch.randn(len(CASES), 61) * scale
        want = [kept_by_sorting(z, *case) for z, case in zip(logits, CASES, strict=True)]
        assert kept(logits, CASES) == want
        # One filter alone: what the others say is not read.
        for place, name in enumerate(("top_k", "top_p", "min_p"), 1):
            alone = [(0.9, *(0, 1.0, 0.0)[: place - 1], case[place], *(0, 1.0, 0.0)[place:]) for case in CASES]
            cases = [(0.9, *case[1:]) for case in CASES]
            want = [kept_by_sorting(z, *case) for z, case in zip(logits, alone, strict=True)]
            assert kept(logits, cases, SamplerFeatures(noise=True, **{name: True})) == want


def test_candidates_equal_the_search():
    torch.manual_seed(1)
    cases = [c for c in CASES if 1 <= c[1] <= 128 or (c[1] == 0 and c[2] == 1)]
    candidates = SamplerFeatures(noise=True, top_k=True, top_p=True, min_p=True, candidates=True)
    for vocab in (61, 300):
        logits = (torch.randn(len(cases), vocab) * 3).bfloat16().float()  # many equal logits
        assert kept(logits, cases, candidates) == kept(logits, cases)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_are_kept_by_lowest_id(dtype):
    torch.manual_seed(2)
    cases = CASES[:-1]
    raw = (torch.randn(len(cases), 90) * 2).to(dtype)
    raw[:, ::2] = raw[:, ::2].round()
    want = [kept_by_sorting(z.float(), *case) for z, case in zip(raw, cases, strict=True)]
    assert kept(raw.float(), cases) == want
    assert kept(raw.float(), cases, source=Source(raw, 90)) == want
    logits = torch.tensor([[1.0, 4.0, 0.0, 4.0, 4.0, -0.0]] * 3)
    assert kept(torch.zeros(3, 4), [(1.0, 0, 0.5, 0.0), (1.0, 0, 0.25, 0.0), (1.0, 2, 0.5, 0.0)]) == [{0, 1}, {0}, {0}]
    assert kept(logits, [(1.0, 2, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (1.0, 0, 0.5, 0.0)]) == [
        {1, 3},
        {0, 1, 2, 3, 4},
        {1, 3},
    ]


def test_equal_to_transformers_in_its_order():
    torch.manual_seed(3)
    for temperature, top_k, top_p, min_p in [(0.7, 12, 0.9, 0.05), (1.3, 40, 0.95, 0.01), (1.0, 50, 0.6, 0.2)]:
        logits = torch.randn(8, 200) * 3
        scores = TemperatureLogitsWarper(temperature)(None, logits)
        for warper in (TopKLogitsWarper(top_k), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)):
            scores = warper(None, scores)
        want = [set(row.isfinite().nonzero().flatten().tolist()) for row in scores]
        assert kept(logits, [(temperature, top_k, top_p, min_p)] * 8) == want


def test_fault_37_the_token_that_crosses_top_p_is_kept():
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    assert kept(logits, [(1.0, 0, 0.6, 0.0)]) == [{0, 1}]
    assert kept(logits, [(1.0, 3, 0.6, 0.0)]) == [{0, 1}]


def test_infinite_logits_neither_count_nor_break():
    inf = torch.inf
    logits = torch.tensor([[-inf, 2.0, -inf, 1.0], [-inf, -inf, -inf, -inf], [3.0, inf, inf, 1.0]])
    got = kept(logits, [(1.0, 3, 0.99, 0.0), (1.0, 2, 0.5, 0.1), (1.0, 3, 0.4, 0.0)])
    assert {1, 3} <= got[0] and got[1] and got[2] == {1}


def shards(logits, size):
    """Equal slices of padded logits; the padding is what must never be kept, so it is large here."""
    width = -(-logits.shape[1] // size)
    padded = torch.nn.functional.pad(logits, (0, width * size - logits.shape[1]), value=-torch.inf)
    return padded.chunk(size, 1)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("candidates", [False, True])
def test_shards_keep_what_the_whole_keeps(size, candidates):
    torch.manual_seed(4)
    cases = [c for c in CASES[:-1] if not candidates or 1 <= c[1] <= 128]
    features = SamplerFeatures(noise=True, top_k=True, top_p=True, min_p=True, candidates=candidates)
    logits = torch.randn(len(cases), 37).round()  # a handful of values: every cut falls among ties on several ranks

    def local(tp, z):
        return keep_mask(z, rows_of(cases), features=features, tp=tp)

    results, calls = simulate(size, local, shards(logits, size))
    whole = torch.cat(results, 1)[:, :37]
    assert torch.equal(whole, keep_mask(logits, rows_of(cases), features=ALL, tp=SINGLE))
    assert all(call.shape[-1] <= 37 and len(call.shape) <= 2 for call in calls)
    assert len(calls) == (3 if candidates else 19)


@pytest.mark.parametrize("by_mass", [False, True])
def test_sorting_few_logits_equals_sorting_all(by_mass):
    torch.manual_seed(5)
    logits = torch.randn(4, 9000).round(decimals=2)
    logits[1] *= 10
    logits[2, 300:] = -torch.inf
    top, temperature = logits.amax(-1), torch.tensor([1.0, 0.5, 2.0, 1e-30])
    for counts in ([1, 9, 100, 2], [255, 256, 301, 1], [5000, 2**62, 2**62, 8999], [2**62] * 4, [3000, 1, 2, 9000]):
        target = torch.tensor(counts)
        if by_mass:
            target = (target.double() * MASS_ONE / 20).clamp(1, 2.0**62).long()
        args = (logits, top, temperature, target, by_mass)
        for got, want in zip(reach_among_few(*args), reach_reference(*args, 9000), strict=True):
            assert torch.equal(got, want)
