"""Checks that the ranks of one group give the results of one rank."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import fnllm
from fnllm.distributed import world
from fnllm.scoring import context, packed_batch

ORACLE = Path(__file__).parents[1] / "oracle"
CHECKPOINTS = sorted(folder.parent.name for folder in ORACLE.glob("*/config.json"))
# Together they reach all of the layers' code and of the rules by which ranks divide: no norms of heads, no biases, an
# untied head; a bias of q, k and v, a window; one of o, all with norms; dense layers and ones of experts; a tied head,
# heads and a vocabulary that ranks do not divide. Two ranks run all checkpoints, more need not.
UNLIKE = ("llama-tiny", "qwen2-window", "qwen3-bias", "qwen3-moe-mixed", "qwen3-odd")
# float32 logits are of order 1 here; transformers against itself differs by 1.2e-5.
BOUND = 5e-5
NEW = 8
DETAILED = ("llama-tiny", "qwen3-moe-mixed", "qwen3-odd")  # run more than the greedy tokens


def greedy(count: int = NEW) -> fnllm.Sampling:
    return fnllm.Sampling(temperature=0, max_tokens=count, ignore_eos=True)


def mixed() -> list[fnllm.Sampling]:
    """Every part of the sampler, seeded."""
    base = {"max_tokens": 6, "ignore_eos": True, "seed": 5}
    return [
        fnllm.Sampling(temperature=1.0, n=2, **base),
        fnllm.Sampling(temperature=0.8, top_k=7, logprobs=2, **base),
        fnllm.Sampling(temperature=1.3, top_p=0.8, min_p=0.02, **base),
        fnllm.Sampling(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, **base),
        fnllm.Sampling(temperature=0.0, logit_bias={3: 4.0, 40: -2.0}, logprobs=0, prompt_logprobs=1, **base),
        fnllm.Sampling(temperature=1.0, logits_fn=favour_even, **base),
    ]


def favour_even(logits, history):
    return logits + (torch.arange(logits.shape[1]) % 2 == 0)


def cases_of(golden: dict) -> list[dict]:
    """Prompts with their greedy continuations, the longest first, which leaves the others little room."""
    cases = [case for case in golden["prompts"].values() if case["greedy"] and len(case["prompt"]) > 1]
    return sorted(cases, key=lambda case: -len(case["prompt"]))


def tight(cases: list[dict]) -> dict:
    """Prompts in chunks of at most 13, a pool hardly larger than the longest sequence, and the prefix cache on."""
    longest = len(cases[0]["prompt"]) + NEW
    return {
        "block_size": 4, "num_blocks": -(-longest // 4) + 4, "max_num_seqs": 4, "max_num_batched_tokens": 32,
        "max_chunk": 13, "max_model_len": 128,
    }  # fmt: skip


def logits_of(params: fnllm.Params, ids: list[int]) -> torch.Tensor:
    """Logits of every position, whole on every rank."""
    tp = world(params.shard)
    batch = packed_batch(torch.tensor(ids), [len(ids)], fnllm.rope.make_rope(params.config, "cpu"))
    with torch.no_grad():
        ctx = context(params, batch, fnllm.Layers(), tp=tp)
        local = ctx.layers.lm_head(params.tree["lm_head"], fnllm.forward(params.tree, ctx), ctx)
        return tp.all_gather(local, -1)[:, : params.config.vocab_size]


def outcome(completions: list[fnllm.Completion]) -> list:
    return [
        (c.token_ids, c.text, c.finish_reason, [e.id for e in c.logprobs or ()], c.cached_tokens) for c in completions
    ]


def run_all(name: str, goldens: dict) -> dict:
    """Everything that is compared between one rank and many, for one checkpoint."""
    params = fnllm.load(ORACLE / name)
    cases = cases_of(goldens[name])
    prompts, options = [case["prompt"] for case in cases], tight(cases)
    p17 = goldens[name]["prompts"]["p17"]
    ids = p17["prompt"] + p17["greedy"]
    first = fnllm.generate(params, prompts, greedy(), **options)
    (machine,) = params.workspace.values()
    preemptions, again, drawn = machine.idle.scheduler.counters.preemptions, [], []
    captured = scores = torch.zeros(0)
    if name in DETAILED:
        again = fnllm.generate(params, prompts, greedy(), **options)  # over the prefixes that are cached now
        drawn = fnllm.generate(
            params, [prompts[-1]] * len(mixed()), mixed(), block_size=8, num_blocks=64, max_num_seqs=8
        )
        scores = fnllm.score(params, [ids])[0].detach()
        sites = ("layers.1.q", "layers.0.v", "layers.1.resid_post", "logits")
        (seen,) = fnllm.generate(params, [ids], greedy(2), capture=sites, block_size=8, num_blocks=64, max_num_seqs=8)
        captured = torch.cat([seen.captured[site].flatten() for site in sites])
    return {
        "first": outcome(first),
        "again": outcome(again),
        "drawn": outcome(drawn),
        "drawn_logprobs": torch.tensor([entry.logprob for c in drawn for entry in c.logprobs or ()]),
        "captured": captured,
        "prompt_logprobs": torch.tensor([e.logprob for c in drawn for e in c.prompt_logprobs or () if e is not None]),
        "preemptions": preemptions,
        "logits": logits_of(params, ids),
        "scores": scores,
    }


def on_one_rank() -> dict:
    goldens = {name: json.loads((ORACLE / name / "golden.json").read_text()) for name in CHECKPOINTS}
    return {"goldens": goldens, "one": {name: run_all(name, goldens) for name in CHECKPOINTS}}


def check_all_checkpoints_give_what_one_rank_gives(expected: dict) -> None:
    worst = 0.0
    for name in CHECKPOINTS if os.environ["WORLD_SIZE"] == "2" else UNLIKE:
        one, many = expected["one"][name], run_all(name, expected["goldens"])
        for case, (tokens, *_) in zip(cases_of(expected["goldens"][name]), many["first"], strict=True):
            assert list(tokens) == case["greedy"][:NEW], name
        for key in ("first", "again", "drawn", "preemptions"):
            assert many[key] == one[key], (name, key)
        assert many["preemptions"] > 0 or name == "qwen3-dynamic", name  # whose long prompt has no golden tokens
        assert name not in DETAILED or sum(cached for *_, cached in many["again"]) > 0, name
        for key in ("logits", "scores", "captured", "drawn_logprobs", "prompt_logprobs"):
            assert many[key].shape == one[key].shape, (name, key)
            if many[key].numel():
                difference = float((many[key] - one[key]).abs().max())
                worst = max(worst, difference)
                assert difference < BOUND, (name, key, difference)
        reference = load_file(ORACLE / name / "golden.safetensors")["p17.logits"]
        assert float((many["logits"] - reference).abs().max()) < 1e-4, name
    if os.environ["RANK"] == "0":
        print(f"largest difference of a logit: {worst:.2e}")


def check_without_a_seed_all_ranks_draw_the_same(expected: dict) -> None:
    params = fnllm.load(ORACLE / "qwen3-odd")
    texts: list = [None] * dist.get_world_size()
    wild = fnllm.Sampling(temperature=3.0, max_tokens=8)
    for _ in range(2):
        drawn = fnllm.generate(params, [[5, 6, 7]], wild, num_blocks=16)
        dist.all_gather_object(texts, drawn[0].token_ids)
        assert len(set(texts)) == 1, texts
    chunks = [c.token_ids for c in fnllm.stream(params, [[5, 6, 7]], wild, num_blocks=16)]
    dist.all_gather_object(texts, chunks)
    assert all(text == texts[0] for text in texts)


def check_a_shard_that_its_rank_alone_wrote_counts_for_all(expected: dict) -> None:
    """As of an embedding's row, which one rank holds: the others must not find what the old one computed."""
    params = fnllm.load(ORACLE / "qwen3-odd")
    prompt, options = [[3, 1, 4, 1, 5, 9, 2, 6]], {"block_size": 2, "num_blocks": 32}
    fnllm.generate(params, prompt, greedy(), **options)
    for row in (3, params.config.vocab_size - 1, 3):  # of the first rank and of the last
        embed = params.tree["embed"]
        place = row - dist.get_rank() * embed.shape[0]
        if 0 <= place < embed.shape[0]:
            with torch.no_grad():
                embed[place] *= -3
        (changed,) = fnllm.generate(params, prompt, greedy(), **options)
        (fresh,) = fnllm.generate(params._replace(workspace={}), prompt, greedy(), **options)
        assert changed.token_ids == fresh.token_ids and changed.cached_tokens == 0
        (again,) = fnllm.generate(params, prompt, greedy(), **options)
        assert again.token_ids == fresh.token_ids and again.cached_tokens == 6
        chunks = fnllm.stream(params, prompt, greedy(), **options)  # begins with the first that is asked for
        if dist.get_rank() == 0:
            with torch.no_grad():
                params.tree["norm"].mul_(1)
        assert [*chunks][-1].completion.cached_tokens == 0
