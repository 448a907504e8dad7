"""Random small models of every architecture, built and saved by transformers: its logits, and its greedy tokens."""

import random

import pytest
import torch
from tiny_models import plain_logits

import fnllm

transformers = pytest.importorskip("transformers")

ARCHITECTURES = ("Qwen3", "Qwen2", "Llama", "Mistral", "Qwen3Moe")
ORIGINAL = 32  # positions before scaling
# Prompts below go past ORIGINAL, so that a scaling which is ignored shows.
ROPES = (
    None,
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 1.0},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    {"rope_type": "dynamic", "factor": 2.0},
)
SEEDS = range(24)  # five architectures and eight ropes, so that most pairs meet


def random_fields(seed: int) -> tuple[str, dict]:
    """The name of an architecture and the fields of a small config."""
    rng = random.Random(seed)
    name, rope = ARCHITECTURES[seed % len(ARCHITECTURES)], ROPES[seed % len(ROPES)]
    kv_heads = rng.choice((1, 2, 3))
    heads = kv_heads * rng.choice((1, 2, 3))
    head_dim = rng.choice((6, 8, 12))
    # Without the field, head_dim is hidden_size / num_attention_heads; Qwen3 always has it.
    given = name.startswith("Qwen3") or name != "Qwen2" and rng.random() < 0.5
    fields = {
        "vocab_size": rng.randrange(30, 60),
        "hidden_size": rng.choice((20, 28)) if given else heads * head_dim,
        "intermediate_size": rng.choice((24, 36)),
        "num_hidden_layers": rng.choice((2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": rng.choice((1e-6, 1e-5)),
        "tie_word_embeddings": rng.random() < 0.5,
        "max_position_embeddings": ORIGINAL if rope and rope["rope_type"] == "dynamic" else 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    theta = rng.choice((10000.0, 5e5))
    scaling = dict(rope or {"rope_type": "default"}, rope_theta=theta)
    if scaling["rope_type"] == "longrope":
        scaling |= {f"{size}_factor": [rng.uniform(1, 3) for _ in range(head_dim // 2)] for size in ("short", "long")}
    fields["rope_parameters"] = scaling
    if given:
        fields["head_dim"] = head_dim
    if name != "Mistral" and name != "Qwen2":
        fields["attention_bias"] = rng.random() < 0.5
    if name == "Llama":
        fields["mlp_bias"] = rng.random() < 0.5
    if name == "Mistral":
        fields["sliding_window"] = rng.choice((None, 5, 16))
    if name in ("Qwen2", "Qwen3") and rng.random() < 0.5:
        fields |= {"use_sliding_window": True, "sliding_window": rng.choice((4, 9)), "max_window_layers": 1}
    if name == "Qwen3Moe":
        fields |= {
            "num_experts": 5,
            "num_experts_per_tok": rng.choice((1, 2, 3)),
            "moe_intermediate_size": 12,
            "norm_topk_prob": rng.random() < 0.5,
            "decoder_sparse_step": rng.choice((1, 2)),
        }
    return name, fields


def saved_model(seed: int, folder) -> "torch.nn.Module":
    """A model with large weights, norms and biases that are all different, saved in `folder`."""
    name, fields = random_fields(seed)
    config = getattr(transformers, f"{name}Config")(**fields)
    config.architectures = [f"{name}ForCausalLM"]
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.normal_(0, 0.3, generator=noise)
            if "norm" in key:
                weight.add_(1)
    model.save_pretrained(folder)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_and_greedy_tokens_are_transformers(seed, tmp_path):
    model = saved_model(seed, tmp_path)
    params = fnllm.load(tmp_path, dtype="float32", device="cpu")
    rng, vocab = random.Random(-seed), params.config.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(length)] for length in (3, 21, 50)]
    with torch.no_grad():
        for prompt in prompts:
            expected = model(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(plain_logits(params, prompt), expected, atol=2e-4, rtol=1e-5)
        if params.config.rope.rope_type == "dynamic":
            prompts = prompts[:2]  # a cached decode beyond the original length keeps old angles, a whole pass does not
        done = fnllm.generate(
            params,
            prompts,
            fnllm.Sampling(temperature=0, max_tokens=8, ignore_eos=True),
            max_model_len=64,
            max_num_seqs=2,
            block_size=4,
            max_chunk=16,
        )
        for prompt, completion in zip(prompts, done, strict=True):
            text = prompt + list(completion.token_ids)
            logits = model(torch.tensor([text])).logits[0, len(prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert len(chosen) == 8
            torch.testing.assert_close(chosen, logits.amax(1), atol=1e-4, rtol=0)
