"""A stand-in for the request's `Sampling`, and plain references for the sampler's tests."""

from dataclasses import dataclass, field

import torch

from fnllm.sampler import SamplerFeatures

NOISE = SamplerFeatures(noise=True)
FILTERS = SamplerFeatures(noise=True, top_k=True, top_p=True, min_p=True)


@dataclass(frozen=True)
class Settings:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict = field(default_factory=dict)
    seed: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logits_fn: object = None


def kept_by_sorting(logits, temperature, top_k, top_p, min_p):
    """The ids that one row keeps: float64, a full sort by (logit falling, id rising), one rule after the other."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i].item(), i))
    weights = torch.exp((logits.double() - logits.double().max()) / temperature)
    kept = order[:top_k] if top_k > 0 else order
    if top_p < 1:
        total, before, nucleus = sum(weights[i].item() for i in kept), 0.0, []
        for i in kept:
            if nucleus and before >= top_p * total:
                break
            nucleus.append(i)
            before += weights[i].item()
        kept = nucleus
    return {i for i in kept if weights[i] >= min_p * weights.max()}
