"""A forward pass on two tensor-parallel ranks, shape by shape, in one process: no GPU, no second process.

The toy model: vocabulary V = 32, hidden size H = 8, 4 query heads and 2 KV heads of D = 2, MLP width I = 16, one layer,
on TP = 2 ranks. The batch is three prompts with T = 5 tokens in total. Each rank holds 16 vocabulary rows, 2 query
heads, 1 KV head and 8 of the MLP's features.

    python examples/toy_tensor_parallel.py
"""

from typing import NamedTuple

import torch

import fnllm
from fnllm.layers import Layers
from fnllm.rope import make_rope
from fnllm.sampler import SamplerFeatures, default_rows, sample
from fnllm.scoring import context, packed_batch
from fnllm.tensor_parallel import TensorParallel
from fnllm_weights import ModelConfig, Shard
from fnllm_weights.init import init

CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=32,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    qk_norm=True,
)
PROMPTS = [[2, 19], [30, 7], [11]]


class Seen(NamedTuple):
    """What a function gave on one rank."""

    step: str
    shape: tuple[int, ...]


def noting(seen: list[Seen]) -> Layers:
    """The usual layer functions, which also note the shapes of what they give."""
    usual = Layers()
    names = iter(["qkv", "o: a partial sum of heads", "gate_up", "down: a partial sum of features", "head: own logits"])

    def note(step: str, x: torch.Tensor) -> torch.Tensor:
        seen.append(Seen(step, tuple(x.shape)))
        return x

    def attend(q, k, v, ctx):
        for step, x in (("q", q), ("k", k), ("v", v)):
            note(step, x)
        return note("attend", usual.attend(q, k, v, ctx))

    return usual._replace(
        embed=lambda p, ids, ctx: note("embed: summed over ranks", usual.embed(note("embedding rows", p), ids, ctx)),
        linear=lambda p, x, ctx: note(next(names), usual.linear(p, x, ctx)),
        attend=attend,
        attention=lambda p, x, ctx: note("attention: summed over ranks", usual.attention(p, x, ctx)),
        activation=lambda x, ctx: note("activation", usual.activation(x, ctx)),
        mlp=lambda p, x, ctx: note("mlp: summed over ranks", usual.mlp(p, x, ctx)),
    )


def forward_one_rank(tp: TensorParallel, seen: list[Seen]) -> tuple[torch.Tensor, torch.Tensor]:
    """What every rank runs: (greedy token of each prompt, all logits). The collectives are those of `tp`."""
    shard = Shard(tp.rank, tp.size)
    params = fnllm.Params(CONFIG, None, init(CONFIG, seed=3, dtype="float32", shard=shard), shard)
    ids = torch.tensor([token for prompt in PROMPTS for token in prompt])
    batch = packed_batch(ids, [len(prompt) for prompt in PROMPTS], make_rope(CONFIG, torch.device("cpu")))
    ctx = context(params, batch, noting(seen), tp=tp)
    hidden = fnllm.forward(params.tree, ctx)
    last = hidden[ctx.batch.cu_seqlens[1:] - 1]  # only these rows are sampled from
    logits = ctx.layers.lm_head(params.tree["lm_head"], last, ctx)
    # The head's one exchange: each rank's best token of each row, as one integer, and not the logits.
    tokens = sample(
        logits,
        default_rows(len(PROMPTS)),
        ctx.batch.context_lens,
        features=SamplerFeatures(),
        vocab_limit=CONFIG.vocab_size,
        vocab_start=ctx.sizes.vocab_start,
        tp=tp,
    ).ids
    return tokens, tp.all_gather(logits)  # gathered to be looked at; the engine never does


def main() -> None:
    seen: list[list[Seen]] = [[], []]
    (results, calls) = fnllm.simulate(2, forward_one_rank, seen)
    for step, shape in seen[0]:
        print(f"{step:36} {list(shape)}")
    print("\nexchanged, in this order:")
    for kind, shape in calls:
        print(f"{kind:36} {list(shape)}")
    one = fnllm.simulate(1, forward_one_rank, [[]]).results[0]
    print(f"\nnext tokens {results[0][0].tolist()}; on one rank {one[0].tolist()}")
    print(f"largest difference of a logit {float((results[0][1] - one[1]).abs().max()):.1e}")


if __name__ == "__main__":
    main()
