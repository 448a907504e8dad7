"""Checks of the open step on ranks: captures, edits, swaps and states give the results of one rank."""

import itertools
import sys
from pathlib import Path

import torch

import fnllm

sys.path.append(str(Path(__file__).parents[1]))

from examples_of import example

ORACLE = Path(__file__).parents[1] / "oracle"
SWAPS = example("swap_layers")
NAMES = ("qwen3-odd", "qwen2-window", "qwen3-moe-mixed")  # of 3 and 2 KV heads, of experts
BOUND = 1e-4  # for activations of order 1 to 10 behind edits of order 1
SHARED = [3, 14, 15, 92, 65, 35, 89, 79]
PROMPTS = [[*SHARED, 33, 7], [8, 9, 79], [*SHARED, 41], [31, 41, 59, 26, 53]]
GREEDY = fnllm.Sampling(temperature=0, max_tokens=5, ignore_eos=True)
WARM = fnllm.Sampling(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
SIZES = {"num_blocks": 32, "block_size": 4, "max_num_seqs": 4, "max_model_len": 64, "max_chunk": 5}
EVERYWHERE = fnllm.Capture(("layers.*", "final_norm", "logits"))


def vector(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def doubled(x, ctx):
    return 2 * x


def edits_of(config: fnllm.ModelConfig) -> list:
    """Of each prompt: some at whole sites, some at those of which a rank sees its part, none, several."""
    width = config.hidden_size
    steered = fnllm.steer("layers.1.resid_post", vector(width, 1), 0.5)
    rows = vector(2 * width, 2).view(2, width)
    return [
        [steered, fnllm.Edit("layers.1.q", doubled), fnllm.Edit("logits", doubled)],
        None,
        [fnllm.ablate("layers.1.resid_mid", vector(width, 3))],
        [fnllm.patch("layers.0.attn_out", rows, 1), fnllm.steer("layers.1.resid_post", vector(width, 4))],
    ]


def swapped() -> fnllm.Layers:
    return fnllm.Layers()._replace(attend=SWAPS.windowed_with_sinks, activation=relu2)


def relu2(gate_up, ctx):
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.relu().square() * up


def captured(params: fnllm.Params, **options) -> list:
    """A mixed batch twice, the second time over what the first left cached: tokens, and activations of each."""
    looked = [EVERYWHERE, fnllm.Capture(("layers.0.k", "layers.1.v", "logits"), "output"), None, EVERYWHERE]
    edits = edits_of(params.config)
    outs = [
        out
        for _ in range(2)
        for out in fnllm.generate(params, PROMPTS, GREEDY, edits=edits, capture=looked, **SIZES, **options)
    ]
    return [(out.token_ids, out.cached_tokens, out.captured_at, out.captured) for out in outs]


def plain_and_swapped(params: fnllm.Params, **options) -> list:
    """Tokens of all prompts, and how many were cached: as they are, with edits, and with other layers."""
    variants = [{}, {"edits": edits_of(params.config)}, {"layers": swapped()}, {}]
    outs = [fnllm.generate(params, PROMPTS, GREEDY, **one, **SIZES, **options) for one in variants]
    return [(out.token_ids, out.cached_tokens) for out in itertools.chain(*outs)]


def states(params: fnllm.Params, **options) -> list:
    """A log with forks and cuts, its second half replayed twice from a snapshot, between them others on its blocks."""
    event = fnllm.event
    edit = fnllm.steer("layers.1.resid_post", vector(params.config.hidden_size, 1), 0.5)
    log = [
        event("add", PROMPTS[0], WARM, seed=3), event("add", PROMPTS[1], WARM, edits=()), *[event("step")] * 4,
        event("fork", 0, seed=9), event("fork", 1), *[event("step")] * 2, event("truncate", 1, 5),
        event("append", 1, [50, 51], max_tokens=4), event("finish", 0, "stop"), *[event("step")] * 9,
    ]  # fmt: skip
    engine = fnllm.engine(params, edits=[edit], **SIZES, **options)
    kept, _ = fnllm.replay(engine, log[:8])
    first, _ = fnllm.replay(engine, log[8:], kept)
    fnllm.replay(engine, [*[event("add", prompt, WARM) for prompt in PROMPTS], *[event("step")] * 6])
    again, _ = fnllm.replay(engine, log[8:], kept)
    whole, _ = fnllm.replay(engine, log)
    return [
        (fnllm.show(state), [fnllm.tokens(state, i) for i, _ in state.scheduler.sequences.items()])
        for state in (kept, first, again, whole)
    ]


def expect(found, expected, where: str = "") -> None:
    """Equal values, and tensors of equal shape within the bound."""
    assert type(found) is type(expected), where
    if isinstance(found, torch.Tensor):
        assert found.shape == expected.shape, (where, found.shape, expected.shape)
        difference = float((found - expected).abs().max()) if found.numel() else 0.0
        assert difference < BOUND, (where, difference)
    elif isinstance(found, dict):
        assert found.keys() == expected.keys(), where
        for key in found:
            expect(found[key], expected[key], f"{where}.{key}")
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected), where
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            expect(a, b, f"{where}[{index}]")
    else:
        assert found == expected, (where, found, expected)


def shapes(config: fnllm.ModelConfig) -> dict[str, tuple[int, ...]]:
    """What the documentation says of a token's activation at the sites that are split between ranks."""
    q, kv = (config.num_attention_heads, config.head_dim), (config.num_key_value_heads, config.head_dim)
    return {"layers.1.q": q, "layers.0.k": kv, "layers.1.v": kv, "logits": (config.vocab_size,)}


def on_one_rank() -> dict:
    return {(name, cache): all_of(name, prefix_cache=cache) for name in NAMES for cache in (True, False)}


def all_of(name: str, **options) -> list:
    params = fnllm.load(ORACLE / name)
    return [captured(params, **options), plain_and_swapped(params, **options), states(params, **options)]


def check_captures_edits_swaps_and_states_are_those_of_one_rank(expected: dict) -> None:
    for (name, cache), one in expected.items():
        many = all_of(name, prefix_cache=cache)
        expect(many, one, f"{name}, prefix cache {cache}")
        hits = [cached for _, cached, *_ in many[0]] + [cached for _, cached in many[1]]
        assert (max(hits) > 0) == cache, (name, cache)
        seen = many[0][0][-1]
        for site, shape in shapes(fnllm.load(ORACLE / name).config).items():
            assert seen[site].shape[1:] == shape, site
        plain, edited, other = (many[1][4 * i : 4 * i + 4] for i in range(3))
        changed = [a[0] != b[0] for a, b in zip(plain, edited, strict=True)]
        assert changed[0] and changed[3] and not changed[1], (name, changed)
        assert [tokens for tokens, _ in plain] != [tokens for tokens, _ in other], name
