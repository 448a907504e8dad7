"""`sample` as a whole: temperatures side by side, filters, masks, log-probabilities, hooks, shards."""

from dataclasses import replace

import pytest
import torch
from unit.sampler.settings import FILTERS, NOISE, Settings, kept_by_sorting

from fnllm.sampler import (
    History,
    SamplerFeatures,
    default_rows,
    draw,
    features_of,
    gumbel_noise,
    log_normaliser,
    needs_logits,
    rounded,
    rows_from_sampling,
    sample,
    take_rows,
    token_logprobs,
)
from fnllm.tensor_parallel import Call, simulate

torch.set_num_threads(1)
BOTH = pytest.mark.parametrize("kernels", [False, True])


def rows_with(n, **columns):
    rows = default_rows(n)
    return rows._replace(
        **{k: torch.as_tensor(v, dtype=getattr(rows, k).dtype).expand(n).clone() for k, v in columns.items()}
    )


def draw_many(logits, n, features, **columns):
    """Ids drawn at n positions from one row of logits."""
    rows = rows_with(n, **columns)
    return sample(logits.expand(n, -1), rows, torch.arange(n), features=features, vocab_limit=logits.shape[-1]).ids


@BOTH
def test_fault_33_small_temperatures_give_the_argmax_never_nan(kernels):
    logits = torch.tensor([[6.0e4, 5.9e4, -6.0e4, 6.1e4, 0.0]]).half().repeat(4, 1)
    for features in (NOISE, FILTERS):
        rows = rows_with(4, temperature=[1e-4, 1e-6, 1e-12, 1e-45], top_p=0.9, top_k=3, min_p=0.1)
        out = sample(logits, rows, torch.arange(4), features=features, vocab_limit=5, kernels=kernels)
        assert out.ids.tolist() == [3, 3, 3, 3]


@BOTH
def test_fault_34_greedy_beside_temperature_is_the_argmax_of_the_raw_logits(kernels):
    torch.manual_seed(0)
    logits = torch.randn(2, 23)
    rows = rows_with(2, temperature=[0.0, 1.0], seed=[3, 4], top_p=[0.1, 0.9])
    seen = set()
    for position in range(30):
        for features in (NOISE, FILTERS):
            out = sample(logits, rows, torch.tensor([position] * 2), features=features, vocab_limit=23, kernels=kernels)
            assert out.ids[0] == logits[0].argmax()
            assert torch.equal(out.ids, draw(logits, rows, torch.tensor([position] * 2), features=features))
        seen.add(out.ids[1].item())
    assert len(seen) > 3


@BOTH
def test_fault_35_top_k_of_one_equals_temperature_zero(kernels):
    logits = torch.tensor([[1.0, 4.0, 4.0, 0.0]]).repeat(3, 1)
    rows = rows_with(3, temperature=[0.0, 1.0, 5.0], top_k=[0, 1, 1])
    for candidates in (False, True):
        features = SamplerFeatures(noise=True, top_k=True, candidates=candidates)
        for position in range(20):
            out = sample(logits, rows, torch.full((3,), position), features=features, vocab_limit=4, kernels=kernels)
            assert out.ids.tolist() == [1, 1, 1]
    assert sample(logits, default_rows(3), torch.arange(3), features=SamplerFeatures(), vocab_limit=4).ids.tolist() == [
        1, 1, 1,
    ]  # fmt: skip


def test_fault_39_a_seeded_row_draws_the_same_in_any_order_and_batch():
    torch.manual_seed(1)
    logits, positions = torch.randn(6, 40), torch.tensor([0, 5, 5, 9, 70000, 2])
    rows = rows_with(6, temperature=0.9, top_k=11, top_p=0.9, seed=[5, 5, 6, -1, 2**40, 0])
    want = sample(logits, rows, positions, features=FILTERS, vocab_limit=40).ids
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 4], [3]):
        index = torch.tensor(order)
        for kernels in (False, True):
            got = sample(
                logits[index], take_rows(rows, index), positions[index],
                features=FILTERS, vocab_limit=40, kernels=kernels,
            )  # fmt: skip
            assert torch.equal(got.ids, want[index])


@pytest.mark.parametrize(
    "own",
    [
        {"top_k": 3},
        {"top_p": 0.4},
        {"min_p": 0.3},
        {"presence_penalty": 2.0},
        {"logit_bias": {7: 5.0}},
        {"min_tokens": 9, "stop_token_ids": (3, 4)},
        {"logits_fn": lambda z, history: -z},
    ],
    ids=lambda own: next(iter(own)),
)
def test_rows_with_the_settings_that_are_read_draw_what_whole_rows_draw(own):
    torch.manual_seed(1)
    settings = [Settings(seed=row, **(own if row % 2 else {})) for row in range(6)]
    features, index = features_of(settings), torch.tensor([5, 1, 2, 3])
    rows, logits = rows_from_sampling(settings, features=features), torch.randn(4, 23)
    history = History(torch.arange(24, dtype=torch.int32).view(4, 6), torch.zeros(4).long(), torch.full((4,), 6))
    options = {"features": features, "vocab_limit": 23, "history": history}
    for position in range(5):
        whole, read = (
            sample(logits, taken, torch.full((4,), position), **options).ids
            for taken in (take_rows(rows, index), take_rows(rows, index, features))
        )
        assert torch.equal(read, whole)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"), [(0.6, 0, 1.0, 0.0), (1.5, 6, 1.0, 0.0), (1.0, 8, 0.8, 0.05)]
)
def test_draws_follow_the_filtered_softmax(temperature, top_k, top_p, min_p):
    torch.manual_seed(2)
    logits, n = torch.randn(1, 12) * 1.5, 20000
    drawn = draw_many(logits, n, FILTERS, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=9)
    kept = sorted(kept_by_sorting(logits[0], temperature, top_k, top_p, min_p))
    assert set(drawn.tolist()) <= set(kept)
    expected = (logits[0, kept].double() / temperature).softmax(0) * n
    counts = drawn.bincount(minlength=12)[kept]
    # Twice the degrees of freedom and 30 more is beyond one true sample in ten thousand for up to 12.
    assert ((counts - expected) ** 2 / expected).sum() < 2 * len(kept) + 30


def test_features_that_a_row_does_not_use_change_nothing():
    torch.manual_seed(3)
    logits, positions = torch.randn(5, 30) * 2, torch.arange(5)
    rows = rows_with(5, temperature=[0.0, 1.0, 0.5, 1.0, 2.0], seed=[1, 2, 3, 4, 5])
    want = sample(logits, rows, positions, features=NOISE, vocab_limit=30).ids
    for features in (FILTERS, SamplerFeatures(noise=True, top_p=True), SamplerFeatures(noise=True, min_p=True)):
        assert torch.equal(sample(logits, rows, positions, features=features, vocab_limit=30).ids, want)
    mixed = [Settings(top_k=5, seed=1), Settings(temperature=0.7, seed=2), Settings(temperature=0, seed=3)]
    for f in (features_of(mixed), rounded(features_of(mixed))):
        got = sample(logits[:3], rows_from_sampling(mixed, features=f), positions[:3], features=f, vocab_limit=30).ids
        alone = [
            sample(
                logits[i : i + 1], rows_from_sampling([s], features=features_of([s])), positions[i : i + 1],
                features=features_of([s]), vocab_limit=30,
            ).ids.item()
            for i, s in enumerate(mixed)
        ]  # fmt: skip
        assert got.tolist() == alone


@BOTH
def test_ids_past_the_limit_are_never_drawn(kernels):
    logits = torch.full((1, 9), -5.0)
    logits[0, 6:] = 50.0
    logits[0, 8] = torch.nan  # past the limit it is nobody's
    for features in (SamplerFeatures(), NOISE, FILTERS):
        rows = rows_with(300, temperature=2.0, top_p=0.99)
        drawn = sample(
            logits.expand(300, -1), rows, torch.arange(300), features=features, vocab_limit=6, kernels=kernels
        ).ids
        assert set(drawn.tolist()) == set(range(6)) or not features.noise and set(drawn.tolist()) == {0}
    rising = SamplerFeatures(logits_fns=(lambda z, history: torch.arange(9.0).expand_as(z),))
    rows = default_rows(1)._replace(logits_fn=torch.zeros(1, dtype=torch.int32))
    drawn = sample(logits, rows, torch.arange(1), features=rising, vocab_limit=6, vocab_size=9, kernels=kernels).ids
    assert drawn.tolist() == [5], "a function brings none of them back"


def test_bias_and_min_tokens():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.5, -1.0]]).repeat(4, 1)
    settings = [
        Settings(temperature=0, min_tokens=2),
        Settings(temperature=0, logit_bias={4: 9.0, 1: -9.0}),
        Settings(temperature=0, min_tokens=2, stop_token_ids=(3,)),
        Settings(temperature=0, min_tokens=2, ignore_eos=True),
    ]
    features = features_of(settings, eos_token_ids=(1,))
    rows = rows_from_sampling(settings, features=features, prompt_lengths=[4, 4, 4, 4], eos_token_ids=(1,))
    draws = [
        sample(logits, rows, torch.full((4,), p), features=features, vocab_limit=5).ids.tolist() for p in (4, 5, 6)
    ]
    assert draws == [[3, 4, 2, 1], [3, 4, 2, 1], [1, 4, 1, 1]]
    first = [Settings(temperature=0, logit_bias={0: 9.0})]
    rows = rows_from_sampling(first, features=features_of(first))
    assert sample(logits[:1], rows, torch.arange(1), features=features_of(first), vocab_limit=5).ids.tolist() == [0]


def test_logits_fn_sees_the_whole_vocabulary_and_only_its_rows():
    def only_even(z, history):
        return torch.where(torch.arange(z.shape[1]) % 2 == 0, z, -torch.inf)

    def double(z, history):
        return z * 2

    torch.manual_seed(4)
    logits = torch.randn(3, 11)
    logits[:, 7] = 9.0
    settings = [Settings(temperature=0), Settings(temperature=0, logits_fn=only_even), Settings(logits_fn=double)]
    features = features_of(settings)
    rows = rows_from_sampling(settings, features=features, seeds=[0, 0, 5])
    out = sample(logits, rows, torch.arange(3), features=features, vocab_limit=11)
    assert out.ids[0] == 7 and out.ids[1] % 2 == 0
    noise = gumbel_noise(torch.tensor([5]), torch.tensor([2]), torch.arange(11))
    assert out.ids[2] == (logits[2] * 2 + noise[0]).argmax()
    widths = []
    hook = SamplerFeatures(logits_fns=(lambda z, h: (widths.append(z.shape[1]), z)[1],))

    def local(tp, z):
        return sample(
            z, default_rows(3)._replace(logits_fn=torch.zeros(3, dtype=torch.int32)), torch.arange(3),
            features=hook, vocab_limit=10, vocab_size=11, vocab_start=tp.rank * 4, tp=tp,
        )  # fmt: skip

    padded = torch.nn.functional.pad(logits, (0, 1), value=99.0)
    for result in simulate(3, local, padded.chunk(3, 1)).results:
        assert result.ids.tolist() == [7, 7, 7]
    assert widths == [11, 11, 11]


def test_logprobs_are_those_of_the_raw_logits():
    torch.manual_seed(5)
    logits = torch.randn(4, 50) * 4
    settings = [Settings(temperature=0.5, top_k=3, logit_bias={1: 5.0}, logprobs=2, seed=i) for i in range(4)]
    features = features_of(settings)
    rows = rows_from_sampling(settings, features=features)
    out = sample(logits, rows, torch.arange(4), features=features, vocab_limit=47)
    want = logits[:, :47].double().log_softmax(-1)
    torch.testing.assert_close(out.logprob.double(), want.gather(1, out.ids[:, None]).squeeze(1), rtol=0, atol=2e-6)
    top = want.topk(2)
    assert torch.equal(out.top_ids, top.indices)
    torch.testing.assert_close(out.top_logprobs.double(), top.values, rtol=0, atol=2e-6)
    assert torch.equal(out.logprob, token_logprobs(logits, out.ids, vocab_limit=47))
    ties = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    out = sample(ties, default_rows(1), torch.arange(1), features=SamplerFeatures(logprobs=2), vocab_limit=4)
    assert out.top_ids.tolist() == [[1, 2]]


def test_fault_41_logprobs_do_not_depend_on_the_batch():
    torch.manual_seed(6)
    logits, ids = torch.randn(5, 4001) * 3, torch.arange(5) * 7
    whole = token_logprobs(logits, ids, vocab_limit=4001)
    for row in range(5):
        assert torch.equal(
            token_logprobs(logits[row : row + 1], ids[row : row + 1], vocab_limit=4001), whole[row][None]
        )


@pytest.mark.parametrize("size", [2, 3])
def test_logprobs_of_every_id_are_those_of_the_whole_on_all_ranks(size):
    torch.manual_seed(6)
    logits, ids, width = torch.randn(37, 37) * 3, torch.arange(37), -(-37 // size)

    def local(tp, z):
        return token_logprobs(z, ids, vocab_start=tp.rank * width, vocab_limit=37, tp=tp)

    for got in simulate(size, local, local_slices(logits, size)).results:
        torch.testing.assert_close(got, logits.log_softmax(-1).diagonal(), rtol=0, atol=2e-6)


def test_float64_logits_draw_as_float32_and_keep_the_digits_of_logprobs():
    torch.manual_seed(6)
    logits, rows = torch.randn(4, 50, dtype=torch.float64), rows_with(4, temperature=0.8, top_k=[0, 9, 0, 3], top_p=0.7)
    features = replace(FILTERS, logprobs=0)
    got = sample(logits, rows, torch.arange(4), features=features, vocab_limit=47)
    assert torch.equal(got.ids, sample(logits.float(), rows, torch.arange(4), features=FILTERS, vocab_limit=47).ids)
    want = logits[:, :47].log_softmax(-1).gather(1, got.ids[:, None]).squeeze(1)
    assert got.logprob.dtype == torch.float64
    torch.testing.assert_close(got.logprob, want, rtol=0, atol=1e-6)
    close = torch.tensor([[0.0, 1.0, 1.0 + 1e-12]], dtype=torch.float64)  # one number in float32
    for few in (SamplerFeatures(logprobs=0), features):
        for kernels in (False, True):
            drawn = sample(close, rows_with(1), torch.arange(1), features=few, vocab_limit=3, kernels=kernels)
            assert drawn.ids.tolist() == [1]


def test_token_logprobs_have_the_softmax_gradient_and_the_same_value():
    torch.manual_seed(7)
    logits, ids = torch.randn(3, 13, requires_grad=True), torch.tensor([2, 0, 12])
    got = token_logprobs(logits, ids, vocab_limit=13)
    assert torch.equal(got.detach(), token_logprobs(logits.detach(), ids, vocab_limit=13))
    (gradient,) = torch.autograd.grad(got.sum(), logits)
    want = torch.nn.functional.one_hot(ids, 13) - logits.detach().softmax(-1)
    torch.testing.assert_close(gradient, want)
    assert log_normaliser(torch.zeros(1, 2)).item() == pytest.approx(0.6931472, abs=1e-7)


@pytest.mark.parametrize("grad", [True, False], ids=["", "no_grad"])
def test_forward_derivatives_are_those_of_log_softmax(grad):
    """By finite differences, by the reverse mode, and by torch's own function; `no_grad` leaves forward mode on."""
    torch.manual_seed(9)
    ids, (x, u) = torch.tensor([2, 0, 12]), torch.randn(2, 3, 13, dtype=torch.float64)

    def ours(z):
        return token_logprobs(z * z, ids, vocab_limit=13)

    def theirs(z):
        return torch.log_softmax(z * z, -1).gather(1, ids[:, None])[:, 0]

    with torch.set_grad_enabled(grad):
        value, tangent = torch.func.jvp(ours, (x,), (u,))
        assert torch.equal(value, ours(x))
        torch.testing.assert_close(tangent, (theirs(x + 1e-5 * u) - theirs(x - 1e-5 * u)) / 2e-5, rtol=0, atol=1e-8)
        rows = torch.func.jacfwd(ours)(x)
        torch.testing.assert_close(rows, torch.func.jacrev(ours)(x))
        torch.testing.assert_close(torch.func.vmap(lambda v: torch.func.jvp(ours, (x,), (v,))[1])(u[None])[0], tangent)
        with torch.autograd.forward_ad.dual_level():
            dual = ours(torch.autograd.forward_ad.make_dual(x, u))
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent)
    both = [torch.func.jacfwd(torch.func.jacfwd(f))(x) for f in (ours, theirs)]
    torch.testing.assert_close(*both)
    torch.testing.assert_close(torch.func.hessian(lambda z: ours(z).sum())(x), both[1].sum(0))


def local_slices(logits, size, garbage=99.0):
    width = -(-logits.shape[1] // size)
    return torch.nn.functional.pad(logits, (0, width * size - logits.shape[1]), value=garbage).chunk(size, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "settings",
    [
        [Settings(temperature=0), Settings(temperature=0), Settings(temperature=0)],
        [Settings(temperature=0), Settings(seed=1), Settings(temperature=0.3, seed=2)],
        [Settings(temperature=0, top_k=4), Settings(top_k=9, top_p=0.8, seed=1), Settings(top_k=2, seed=2, logprobs=3)],
        [
            Settings(top_p=0.7, seed=3, logprobs=0),
            Settings(min_p=0.1),
            Settings(top_k=30, top_p=0.9, logit_bias={36: 2}),
        ],
        [Settings(min_tokens=9, stop_token_ids=(0, 36), seed=4), Settings(min_p=0.3), Settings()],
    ],
    ids=["greedy", "temperature", "candidates", "search", "masks"],
)
def test_fault_43_shards_draw_what_the_whole_draws(size, settings):
    torch.manual_seed(8)
    features = features_of(settings)
    rows = rows_from_sampling(settings, features=features, prompt_lengths=[3, 3, 3])
    for trial in range(6):
        logits = (torch.randn(3, 37) * 2).round().bfloat16()  # ties, also across ranks
        args = {"features": features, "vocab_limit": 37}
        positions = torch.full((3,), 3 + trial)
        whole = sample(logits, rows, positions, **args)
        width = -(-37 // size)

        def local(tp, z, positions=positions, args=args, width=width):
            return sample(z, rows, positions, vocab_start=tp.rank * width, tp=tp, **args)

        for kernels in (False, True):
            args["kernels"] = kernels
            results, calls = simulate(size, local, local_slices(logits, size))
            for result in results:
                for got, want in zip(result, whole, strict=True):
                    assert (got is None and want is None) or torch.equal(got, want)
        if not (features.top_k or features.top_p or features.logprobs is not None):
            assert calls == [Call("all_reduce_max", (3,))] * (1 + features.min_p)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fault_66_head_and_draw_on_uneven_shards(size):
    torch.manual_seed(9)
    hidden, weight = torch.randn(4, 8), torch.randn(37, 8)
    rows = rows_with(4, temperature=[0.0, 1.0, 0.7, 1.2], seed=[1, 2, 3, 4])
    options = {"features": NOISE, "vocab_limit": 35, "kernels": True}
    whole = sample(hidden @ weight.T, rows, torch.arange(4), **options)
    width = -(-37 // size)
    slices = torch.nn.functional.pad(weight, (0, 0, 0, width * size - 37)).chunk(size, 0)

    def local(tp, w):
        return sample(hidden @ w.T, rows, torch.arange(4), vocab_start=tp.rank * width, tp=tp, **options)

    results, calls = simulate(size, local, slices)
    assert all(torch.equal(result.ids, whole.ids) for result in results)
    assert calls == [Call("all_reduce_max", (4,))]
    assert needs_logits(FILTERS) and not needs_logits(NOISE) and not needs_logits(SamplerFeatures())


def test_arguments_are_not_changed():
    torch.manual_seed(10)
    settings = [Settings(top_k=3, top_p=0.9, min_p=0.1, logit_bias={1: 1.0}, logprobs=1, seed=1)] * 2
    features = features_of(settings)
    rows, logits = rows_from_sampling(settings, features=features), torch.randn(2, 9)
    before = [x.clone() for x in (logits, *rows)]
    sample(logits, rows, torch.arange(2), features=features, vocab_limit=8)
    assert all(torch.equal(x, y) for x, y in zip((logits, *rows), before, strict=True))
