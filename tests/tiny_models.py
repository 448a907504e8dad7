"""Small models that the tests of the whole engine share, and engines of the plainest kind to compare with."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from torch.utils._pytree import tree_map

import fnllm
from fnllm.layers import Layers
from fnllm.rope import make_rope
from fnllm.scoring import context, packed_batch
from fnllm.tensor_parallel import SINGLE, TensorParallel
from fnllm_weights import ModelConfig, Params
from fnllm_weights.init import init
from fnllm_weights.params import walk
from fnllm_weights.tokenizer import make_tokenizer

torch.set_num_threads(1)  # on tensors this small more threads only wait for one another

ORACLE = Path(__file__).parent / "oracle"
NAMES = sorted(folder.name for folder in ORACLE.iterdir() if (folder / "golden.safetensors").exists())
GREEDY = fnllm.Sampling(temperature=0, max_tokens=32, ignore_eos=True)
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 41,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@functools.cache
def checkpoint(name: str) -> Params:
    """An oracle's params in float32, the same value for all tests, so that they share its machines."""
    return fnllm.load(ORACLE / name, dtype="float32", device="cpu")


@functools.cache
def golden(name: str) -> Mapping[str, Any]:
    """An oracle's prompts, each with its greedy tokens."""
    return json.loads((ORACLE / name / "golden.json").read_text())["prompts"]


@functools.cache
def tiny(seed: int = 0, **fields: Any) -> Params:
    """Random params whose greedy texts wander: weights far larger than a fresh model's, so that logits lie apart."""
    config = ModelConfig.from_dict({**TINY, **fields}, None)
    tree = init(config, seed=seed, dtype="float32")
    for path, leaf in walk(tree):
        leaf.mul_(1 if "norm" in str(path[-1]) else 12)
    return Params(config, None, tree, workspace={})


WORDS = ("<s>", "</s>", "<end>", "x", "ab", "cd", "e", "a", "b", "c", "d", ",", " ", "Ã", "©")  # the last two spell é


@functools.cache
def speller(follow: tuple[int, ...], eos: tuple[int, ...] = (1,), defaults: tuple[tuple[str, Any], ...] = ()) -> Params:
    """A model that says `follow[token]` after each token, however long the text, with a tokenizer of WORDS.

    Its layers add nothing to the stream, and the head gives the successor's row the stream's own direction.
    """
    size = len(WORDS)
    fields = {**TINY, "vocab_size": size, "hidden_size": 16, "bos_token_id": 0, "eos_token_id": list(eos)}
    config = ModelConfig.from_dict(fields, dict(defaults))
    tree = init(config, dtype="float32")
    for layer in tree["layers"]:
        layer["o"].zero_()
        layer["down"].zero_()
    tree["embed"].copy_(torch.eye(size, 16))
    tree["lm_head"].zero_()
    for token, successor in enumerate(follow):
        tree["lm_head"][successor, token] = 4.0
    return Params(config, spelling_tokenizer(), tree, workspace={})


@functools.cache
def spelling_tokenizer():
    """A byte-level tokenizer of WORDS; the first three are special."""
    words = [word.replace(" ", "Ġ") for word in WORDS]
    vocab = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b"), ("c", "d")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(word, special=True) for word in WORDS[:3]])
    return make_tokenizer(backend)


def greedy(count: int) -> fnllm.Sampling:
    """The most likely token, so many times."""
    return replace(GREEDY, max_tokens=count)


def plain_logits(params: Params, ids: Sequence[int], tp: TensorParallel = SINGLE) -> Tensor:
    """Logits of every position by one forward pass over the whole sequence: no cache, no blocks, no batch."""
    with torch.no_grad():
        rope = make_rope(params.config, params.tree["norm"].device)
        ctx = context(params, packed_batch(torch.tensor(ids), [len(ids)], rope), Layers(), tp=tp)
        local = ctx.layers.lm_head(params.tree["lm_head"], fnllm.forward(params.tree, ctx), ctx)
        return tp.all_gather(local)[:, : params.config.vocab_size]


def plain_greedy(params: Params, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` greedy tokens, each from the whole text computed anew."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(plain_logits(params, ids)[-1].argmax()))
    return tuple(ids[len(prompt) :])


def drain(engine: fnllm.Engine, state: fnllm.State) -> fnllm.State:
    """Step until nothing is left to do."""
    while True:
        state, step = engine.step(state)
        if step is None:
            return state


def fresh(params: Params) -> Params:
    """The same weights as new tensors, without engines."""
    made: dict[int, Tensor] = {}  # a tied head stays the embedding
    tree = tree_map(lambda x: made.setdefault(id(x), x.detach().clone()), params.tree)
    return params._replace(tree=tree, workspace={})
