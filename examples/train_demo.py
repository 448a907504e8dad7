"""Train the small model that fnllm ships (fnllm/demo) with fnllm's own forward pass.

The layer functions of generation also train: a parameter tree goes in, gradients come out. Training swaps four of them:
`attend` for one over windows of equal length, and `embed`, `attention` and `mlp` for the same functions with dropout.

    python examples/demo_text.py data/                         # or any folder with a text.txt and a tokenizer.json
    python examples/train_demo.py data/ demo/ --minutes 4      # minutes on a GPU, hours on a CPU

`demo/` becomes a checkpoint folder, with losses.json beside the weights: nats per token, on training and held-out text.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fnllm.context import Context
from fnllm.layers import Layers
from fnllm.model import forward
from fnllm.rope import make_rope
from fnllm.scoring import context, packed_batch
from fnllm_weights import ModelConfig, Params, Shard, init, save

DOCUMENT_BREAK = "\f"
END_OF_TEXT = "<|endoftext|>"
HELD_OUT_EVERY = 40  # of the documents, one in so many is never trained on
REPORTS = 50  # in a run

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 0,
}
GENERATION = {"temperature": 0.7, "top_p": 0.9, "eos_token_id": 0}
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "model_max_length": 1024}


class Recipe(NamedTuple):
    """What a training run is made of, besides the text and the model."""

    epochs: float = 24.0
    minutes: float = 240.0  # the schedule ends at whichever comes first
    context: int = 1024  # tokens in a window
    batch: int = 16  # windows in a step
    learning_rate: float = 2e-3  # at its peak
    weight_decay: float = 0.1
    dropout: float = 0.1
    warmup: float = 0.02  # share of the run
    clip: float = 1.0  # largest norm of a step's gradient
    seed: int = 0


def split_tokens(text: str, tokenizer: Tokenizer) -> tuple[Int[Tensor, " train"], Int[Tensor, " held_out"]]:
    """Token streams to train on and to hold out: documents, each with an end-of-text token before and after."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    streams: tuple[list[int], list[int]] = ([end], [end])
    for index, encoding in enumerate(tokenizer.encode_batch(text.split(DOCUMENT_BREAK))):
        streams[index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].extend([*encoding.ids, end])
    return torch.tensor(streams[0]), torch.tensor(streams[1])


def attend_windows(
    q: Float[Tensor, "T N D"], k: Float[Tensor, "T K D"], v: Float[Tensor, "T K D"], ctx: Context
) -> Float[Tensor, "T N D"]:
    """Causal attention over windows of equal length: a view takes the place of a cache."""
    q, k, v = (rearrange(x, "(B L) N D -> B N L D", L=ctx.batch.max_seqlen) for x in (q, k, v))
    return rearrange(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), "B N L D -> (B L) N D")


def with_dropout(layers: Layers, rate: float) -> Layers:
    """The same layers, with a share of what each sublayer adds to the residual stream dropped."""

    def drop(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda p, x, ctx: F.dropout(function(p, x, ctx), rate)

    return layers._replace(embed=drop(layers.embed), attention=drop(layers.attention), mlp=drop(layers.mlp))


def next_token_loss(
    tree: dict, windows: Int[Tensor, "B L_plus_1"], ctx: Context, dtype: torch.dtype
) -> Float[Tensor, ""]:
    """Mean cross-entropy, in nats, of each window's tokens given those before them, computed in `dtype`."""
    tree = tree_map(lambda p: p.to(dtype), tree)
    ctx = ctx._replace(batch=ctx.batch._replace(token_ids=windows[:, :-1].flatten()))
    logits = ctx.layers.lm_head(tree["lm_head"], forward(tree, ctx), ctx)
    return F.cross_entropy(logits.float(), windows[:, 1:].flatten())


def held_out_loss(loss: Callable[..., Tensor], tree: dict, stream: Int[Tensor, " S"], recipe: Recipe) -> float:
    """Mean loss over the stream cut into windows, less the tail that fills no batch."""
    size = recipe.batch * recipe.context
    batches = max((len(stream) - 1) // size, 1)
    losses = []
    with torch.no_grad():
        for first in range(0, batches * size, size):
            starts = first + torch.arange(recipe.batch, device=stream.device) * recipe.context
            losses.append(loss(tree, windows_at(stream, starts, recipe.context)))
    return torch.stack(losses).mean().item()


def windows_at(stream: Int[Tensor, " S"], starts: Int[Tensor, " B"], length: int) -> Int[Tensor, "B L_plus_1"]:
    """`length` + 1 tokens from each start; a stream that is too short goes round."""
    return stream[(starts[:, None] + torch.arange(length + 1, device=stream.device)) % len(stream)]


def rate_at(progress: float, recipe: Recipe) -> float:
    """Learning rate at a share of the run: a linear warm-up, then half a cosine down to zero."""
    warm = min(1.0, progress / recipe.warmup) if recipe.warmup else 1.0
    return recipe.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * progress))


def loss_functions(
    params: Params, recipe: Recipe, device: str, compiled: bool
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """`(tree, windows) -> loss` for training (with dropout) and for testing; bfloat16 on a GPU, float32 on a CPU."""
    blank = torch.zeros(recipe.batch * recipe.context, dtype=torch.long, device=device)
    batch = packed_batch(blank, [recipe.context] * recipe.batch, make_rope(params.config, device))
    layers = Layers()._replace(attend=attend_windows)

    def bind(layers: Layers) -> Callable[..., Tensor]:
        ctx = context(params, batch, layers)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def loss(tree: dict, windows: Tensor) -> Tensor:
            return next_token_loss(tree, windows, ctx, dtype)

        return torch.compile(loss, fullgraph=True) if compiled else loss

    return bind(with_dropout(layers, recipe.dropout)), bind(layers)


def adamw(leaves: list[Tensor], recipe: Recipe) -> torch.optim.AdamW:
    """AdamW that decays the matrices and leaves the norms alone."""
    groups = [
        {"params": [leaf for leaf in leaves if leaf.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [leaf for leaf in leaves if leaf.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=leaves[0].is_cuda)


def train(
    config: ModelConfig, streams: tuple[Tensor, Tensor], recipe: Recipe, device: str, compiled: bool = True
) -> tuple[Params, dict]:
    """Train random weights on the first stream and test them on the second: (parameters in bfloat16, their record)."""
    params = Params(config, None, init(config, seed=recipe.seed, dtype=torch.float32, device=device), Shard())
    training_loss, testing_loss = loss_functions(params, recipe, device, compiled)
    # a tied embedding is one leaf in two places: it must reach the optimizer once
    leaves = list({id(leaf): leaf.requires_grad_() for leaf in tree_leaves(params.tree)}.values())
    optimizer = adamw(leaves, recipe)
    noise = torch.Generator(device).manual_seed(recipe.seed)
    torch.manual_seed(recipe.seed)  # dropout draws from torch's own generator
    stream, held_out = (s.to(device) for s in streams)

    def add_gradients() -> Tensor:
        starts = torch.randint(len(stream), (recipe.batch,), generator=noise, device=device)
        loss = training_loss(params.tree, windows_at(stream, starts, recipe.context))
        loss.backward()
        return loss.detach()

    add_gradients()  # this and the next line compile, so that the clock below times training alone
    held_out_loss(testing_loss, params.tree, held_out, recipe)
    optimizer.zero_grad()
    steps = math.ceil(recipe.epochs * len(stream) / (recipe.batch * recipe.context))
    started, recent, record = time.perf_counter(), [], []
    for step in range(steps + 1):
        seconds = time.perf_counter() - started
        progress = max(step / steps, seconds / (60 * recipe.minutes))
        if recent and (progress >= 1 or len(recent) * REPORTS >= steps):
            held_out_now = held_out_loss(testing_loss, params.tree, held_out, recipe)
            trained = torch.stack(recent).mean().item()
            record.append({"step": step, "trained": trained, "held_out": held_out_now, "seconds": seconds})
            recent.clear()
            print(json.dumps(record[-1]), flush=True)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate_at(progress, recipe)
        recent.append(add_gradients())
        torch.nn.utils.clip_grad_norm_(leaves, recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
    tree = tree_map(lambda leaf: leaf.detach().to(torch.bfloat16), params.tree)
    return params._replace(tree={**tree, "lm_head": tree["embed"]}), {"recipe": recipe._asdict(), "losses": record}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with text.txt (form feeds between documents), tokenizer.json")
    parser.add_argument("out", type=Path, help="checkpoint folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--eager", action="store_true", help="run without torch.compile")
    for name, default in Recipe._field_defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    recipe = Recipe(**{name: getattr(args, name) for name in Recipe._fields})
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    streams = split_tokens((args.data / "text.txt").read_text(encoding="utf-8"), tokenizer)
    config = ModelConfig.from_dict(MODEL, GENERATION)
    params, record = train(config, streams, recipe, args.device, compiled=not args.eager)
    save(params, args.out)
    shutil.copy(args.data / "tokenizer.json", args.out)
    for name, value in (("tokenizer_config", TOKENIZER), ("losses", record)):
        (args.out / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
