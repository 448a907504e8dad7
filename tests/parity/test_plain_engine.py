"""Random runs of the whole engine against one without cache, blocks or batches: every token, every ending."""

import random

import pytest
import torch
from tiny_models import plain_logits, tiny

import fnllm
from fnllm import scheduler

SLACK = 1e-3  # two logits closer than this may change places with the order of a sum


def model(seed: int) -> fnllm.Params:
    """A few models, shared by all runs: plain, windowed, with experts."""
    kinds = (
        {},
        {"architectures": ("MistralForCausalLM",), "sliding_window": 6},
        {
            "architectures": ("Qwen3MoeForCausalLM",),
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 12,
            "decoder_sparse_step": 1,
            "mlp_only_layers": (),
        },
    )
    return tiny(0, **kinds[seed % len(kinds)])


def random_options(rng: random.Random) -> dict:
    block_size = rng.choice((1, 2, 3, 4, 16))
    chunked = rng.random() < 0.8
    return {
        "block_size": block_size,
        "num_blocks": -(-rng.choice((24, 30, 64)) // block_size),
        "max_num_seqs": rng.choice((1, 2, 4)),
        "max_num_batched_tokens": rng.choice((1, 3, 8, 64)) if chunked else 64,
        "max_model_len": rng.choice((20, 40)),
        "prefix_cache": rng.random() < 0.7,
        "chunked_prefill": chunked,
        "max_chunk": rng.choice((None, 1, 3)) if chunked else None,
    }


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """Prompts over few ids with common beginnings, so that prefixes are shared."""
    stem = [5, 6, 7, 5, 5, 6, 7, 6, 6, 5, 7, 7, 5, 6]
    kept = rng.randrange(len(stem))
    return (stem[:kept] + [rng.choice((5, 6, 7)) for _ in range(rng.randrange(1, 5))])[:longest]


def assert_greedy(params: fnllm.Params, tokens, start: int, min_tokens: int = 0, stops=()) -> None:
    """Each token from `start` on is the most likely one after those before it; no stop id is among the first few."""
    if len(tokens) == start:
        return
    logits = plain_logits(params, tokens)
    for place in range(start, len(tokens)):
        row = logits[place - 1]
        if place < start + min_tokens:
            row[list(stops)] = -torch.inf
        assert row[tokens[place]] > row.max() - SLACK, f"token {place} of {tokens} is not the most likely one"


@pytest.mark.parametrize("seed", range(30))
def test_generate_in_small_caches(seed):
    rng = random.Random(seed)
    params, options = model(seed), random_options(rng)
    limit = min(options["max_model_len"], options["num_blocks"] * options["block_size"])
    for _ in range(2):  # the second call starts with what the first left in the cache
        prompts = [random_prompt(rng, limit) for _ in range(rng.randrange(1, 7))]
        settings = [
            fnllm.Sampling(
                temperature=0,
                max_tokens=(most := rng.randrange(12)),
                min_tokens=rng.randrange(most + 1),
                stop_token_ids=[rng.randrange(41) for _ in range(4)],
            )
            for _ in prompts
        ]
        done = fnllm.generate(params, prompts, settings, **options)
        for prompt, setting, one in zip(prompts, settings, done, strict=True):
            text = [*prompt, *one.token_ids]
            assert_greedy(params, text, len(prompt), setting.min_tokens, setting.stop_token_ids)
            stops = [
                place
                for place, token in enumerate(one.token_ids)
                if token in setting.stop_token_ids and place >= setting.min_tokens
            ]
            assert stops in ([], [len(one.token_ids) - 1])
            assert one.finish_reason == ("stop" if stops else "length")
            if not stops:
                assert len(one.token_ids) == min(setting.max_tokens, limit - len(prompt))


def random_setting(rng: random.Random) -> fnllm.Sampling:
    most = rng.randrange(1, 12)
    chosen = {
        "temperature": rng.choice((0, 0.7, 1.5)),
        "top_k": rng.choice((0, 0, 5)),
        "top_p": rng.choice((1, 0.8)),
        "repetition_penalty": rng.choice((1, 1.3)),
        "presence_penalty": rng.choice((0, 0.5)),
        "frequency_penalty": rng.choice((0, 0.4)),
        "logit_bias": rng.choice(({}, {3: 2.0, 7: -1.0}, {5: 1.0})),
        "min_tokens": rng.randrange(most + 1),
        "stop_token_ids": [rng.randrange(41) for _ in range(rng.choice((0, 3)))],
        "logprobs": rng.choice((None, 0, 2)),
        "n": rng.choice((1, 1, 3)),
    }
    return fnllm.Sampling(seed=rng.randrange(1000), max_tokens=most, **chosen)


@pytest.mark.parametrize("seed", range(15))
def test_drawn_tokens_in_small_caches_are_those_of_large_ones(seed):
    """Preempted, chunked, cached or alone: a request with a seed draws the same tokens, whatever its settings."""
    rng = random.Random(1000 + seed)
    params, options = model(seed), random_options(rng)
    limit = min(options["max_model_len"], options["num_blocks"] * options["block_size"])
    prompts = [random_prompt(rng, limit) for _ in range(5)]
    settings = [random_setting(rng) for _ in prompts]
    found = [one.token_ids for one in fnllm.generate(params, prompts, settings, **options)]
    alone: list[tuple[int, ...]] = []
    for prompt, setting in zip(prompts, settings, strict=True):
        done = fnllm.generate(params, prompt, setting, max_model_len=limit, max_num_seqs=1, prefix_cache=False)
        alone += [one.token_ids for one in done]
    assert found == alone


class Player:
    """Makes random moves on an engine and remembers what each sequence was given."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.params = model(seed)
        options = random_options(self.rng)
        self.engine = fnllm.engine(self.params, **options)
        self.limit = min(options["max_model_len"], options["num_blocks"] * options["block_size"])
        self.state, self.given = self.engine.init(), {}  # sequence -> tokens before its own
        self.kept: list[tuple[fnllm.State, dict[int, int]]] = []

    def move(self) -> None:
        names = ("step",) * 6 + ("add",) * 2 + ("fork", "truncate", "append", "abort", "keep", "go_back")
        name = self.rng.choice(names)
        if name in ("fork", "truncate", "append", "abort"):
            if self.given:
                getattr(self, name)(self.rng.choice(sorted(self.given)))
        else:
            getattr(self, name)()
        scheduler.check(self.state.scheduler)

    def step(self) -> None:
        self.state, _ = self.engine.step(self.state)

    def add(self) -> None:
        prompt = random_prompt(self.rng, self.limit)
        setting = fnllm.Sampling(temperature=0, max_tokens=self.rng.randrange(12), ignore_eos=True)
        self.state, seq_id = fnllm.add(self.state, self.engine.request(prompt, setting))
        self.given[seq_id] = len(prompt)

    def fork(self, seq_id: int) -> None:
        self.state, new_id = fnllm.fork(self.state, seq_id)
        self.given[new_id] = self.given[seq_id]

    def truncate(self, seq_id: int) -> None:
        length = self.rng.randrange(1, len(fnllm.tokens(self.state, seq_id)) + 1)
        self.state = fnllm.truncate(self.state, seq_id, length)
        self.given[seq_id] = min(self.given[seq_id], length)

    def append(self, seq_id: int) -> None:
        known = len(fnllm.tokens(self.state, seq_id))
        tokens = [self.rng.choice((5, 6, 7)) for _ in range(self.rng.randrange(4))]
        if known + len(tokens) > self.limit:
            with pytest.raises(ValueError, match="could never run"):
                fnllm.append(self.state, seq_id, tokens)
            return
        self.check_one(seq_id)
        self.state = fnllm.append(self.state, seq_id, tokens)
        self.given[seq_id] = known + len(tokens)

    def abort(self, seq_id: int) -> None:
        self.state = fnllm.abort(self.state, seq_id)
        del self.given[seq_id]

    def keep(self) -> None:
        self.kept.append((self.state, dict(self.given)))

    def go_back(self) -> None:
        if self.kept:
            self.state, given = self.rng.choice(self.kept)
            self.given = dict(given)

    def check_one(self, seq_id: int) -> None:
        assert_greedy(self.params, fnllm.tokens(self.state, seq_id), self.given[seq_id])

    def finish(self) -> None:
        step = True
        while step is not None:
            self.state, step = self.engine.step(self.state)
        for seq_id in self.given:
            self.check_one(seq_id)


@pytest.mark.parametrize("seed", range(40))
def test_random_moves_on_states(seed):
    """Add, step, fork, truncate, append, abort, and going back to a state of before, in any order."""
    player = Player(seed)
    for _ in range(40):
        player.move()
    player.finish()
    for state, given in player.kept[-1:]:
        player.state, player.given = state, given
        player.finish()
