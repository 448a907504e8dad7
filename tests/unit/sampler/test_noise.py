"""The counter-based noise: exact integers, the right distribution, no visible dependence."""

import math

import pytest
import torch

from fnllm_kernels.noise import MIX_1, MIX_2, SEED_1, SEED_2, gumbel_noise, mix, row_keys, token_hash

torch.set_num_threads(1)
M = 2**32 - 1


def mix_of_ints(x, added=0):
    x ^= x >> 16
    x = x * MIX_1 & M
    x ^= x >> 15
    x = (x + added & M) * MIX_2 & M
    return x ^ x >> 15


def hash_of_ints(seed, position, token):
    seed, position = seed % 2**64, position % 2**32
    low, high = seed & M, seed >> 32
    key_1 = mix_of_ints(mix_of_ints(mix_of_ints(low ^ SEED_1) ^ high) ^ position)
    key_2 = mix_of_ints(mix_of_ints(mix_of_ints(position ^ SEED_2) ^ low) ^ high)
    return mix_of_ints(token ^ key_1, key_2)


SEEDS = [0, 1, -1, 2**62 + 12345, -(2**63), 2**63 - 1, 7]
POSITIONS = [0, 1, 2, 131072, 2**31 - 1, 2**31, 5]


def test_hash_equals_unbounded_integers():
    ids = torch.tensor([0, 1, 2, 151935, 2**31, 2**32 - 1])
    got = token_hash(*row_keys(torch.tensor(SEEDS), torch.tensor(POSITIONS)), ids)
    want = [[hash_of_ints(s, p, t) for t in ids.tolist()] for s, p in zip(SEEDS, POSITIONS, strict=True)]
    assert got.tolist() == want


def test_mix_is_a_bijection_on_a_sample():
    x = torch.arange(0, 2**32, 40009)
    assert mix(x).unique().numel() == x.numel() and mix(x).min() >= 0 and mix(x).max() <= M


def test_noise_is_finite_at_the_extreme_hashes(monkeypatch):
    from fnllm_kernels import noise

    extremes = torch.tensor([[0, 1, 2**31, M - 1, M]])
    monkeypatch.setattr(noise, "token_hash", lambda *_: extremes)
    got = noise.gumbel_from_keys(torch.zeros(1).long(), torch.zeros(1).long(), torch.arange(5))[0]
    want = [-math.log(-math.log1p(-(min(h, noise.LARGEST) + 0.5) / 2**32)) for h in extremes[0].tolist()]
    assert got.isfinite().all() and got[0] > 22 and got[-1] < -2.8
    # Near v = 1, where the noise is least, float32 leaves v four digits short; such a token hardly ever wins.
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-5, atol=2e-4)


def test_noise_of_a_token_does_not_depend_on_the_others():
    seeds, positions, ids = torch.tensor(SEEDS), torch.tensor(POSITIONS), torch.arange(101)
    whole = gumbel_noise(seeds, positions, ids)
    order = torch.randperm(len(SEEDS), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel_noise(seeds[order], positions[order], ids), whole[order])
    assert torch.equal(gumbel_noise(seeds[3:4], positions[3:4], ids[37:]), whole[3:4, 37:])
    assert torch.equal(gumbel_noise(seeds, positions.int(), ids.int()), whole)


def chi_square(counts, expected):
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("vary", ["position", "seed"])
def test_draws_follow_the_softmax_and_are_independent(vary):
    n, logits = 20000, torch.tensor([2.0, 0.0, 1.0, -1.0, 1.5, -3.0, 0.5])
    count = torch.arange(n)
    seeds, positions = (count, torch.full((n,), 11)) if vary == "seed" else (torch.full((n,), 11), count)
    drawn = (logits + gumbel_noise(seeds, positions, torch.arange(7))).argmax(-1)
    p = logits.softmax(0)
    # 6 degrees of freedom: 27.9 is passed by one true sample in ten thousand.
    assert chi_square(drawn.bincount(minlength=7), p * n) < 27.9
    pairs = (drawn[:-1] * 7 + drawn[1:]).bincount(minlength=49)
    likely = torch.outer(p, p).flatten() * (n - 1)
    # 48 degrees of freedom: 93.2 for one in ten thousand. Cells that expect few draws are put together.
    few = likely < 5
    pairs = torch.cat([pairs[~few], pairs[few].sum()[None]])
    likely = torch.cat([likely[~few], likely[few].sum()[None]])
    assert chi_square(pairs, likely) < 93.2


def test_uniform_bits_and_neighbouring_tokens():
    h = token_hash(*row_keys(torch.arange(50), torch.arange(50) * 3), torch.arange(2000))
    bits = torch.stack([(h >> b) & 1 for b in range(32)]).double()
    assert (bits.mean((1, 2)) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(h.numel())
    g = gumbel_noise(torch.arange(50), torch.arange(50) * 3, torch.arange(2000)).double()
    assert abs(g.mean() - 0.5772157) < 5 * 1.2825 / math.sqrt(g.numel())
    assert abs(g.std() - math.pi / math.sqrt(6)) < 0.02
    z = (g - g.mean()) / g.std()
    for a, b in ((z[:, 1:], z[:, :-1]), (z[1:], z[:-1]), (z[:, 1024:], z[:, :-1024])):
        assert abs((a * b).mean()) < 5 / math.sqrt(a.numel())


def test_rare_tokens_are_drawn_as_often_as_they_should():
    """With 100,000 equal tokens the winner's noise lies where a coarse uniform would have few values."""
    n, vocab = 60, 100_000
    g = gumbel_noise(torch.arange(n), torch.zeros(n, dtype=torch.long), torch.arange(vocab))
    top = g.topk(2, -1).values
    assert (top[:, 0] > top[:, 1]).all()
    halves = (g.argmax(-1) < vocab // 2).sum().item()
    assert abs(halves - n / 2) < 5 * math.sqrt(n) / 2
