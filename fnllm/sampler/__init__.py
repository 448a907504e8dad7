"""Sampling on the device: from logits to token ids, sharded over the vocabulary, inside the compiled step."""

from fnllm.sampler.features import SamplerFeatures, features_of, rounded, union
from fnllm.sampler.history import History, empty_history, take_history, token_counts, update_history
from fnllm.sampler.logprobs import log_normaliser, masked_logits, token_logprobs, top_tokens
from fnllm.sampler.rows import (
    SamplerRows,
    child_seed,
    default_rows,
    prompt_seed,
    rows_from_sampling,
    take_rows,
    widen_rows,
)
from fnllm.sampler.sample import Sampled, draw, needs_logits, sample
from fnllm_kernels.noise import gumbel_noise
from fnllm_kernels.order_keys import NAN_ID, NOTHING_ID

__all__ = [
    "NAN_ID",
    "NOTHING_ID",
    "History",
    "Sampled",
    "SamplerFeatures",
    "SamplerRows",
    "child_seed",
    "default_rows",
    "draw",
    "empty_history",
    "features_of",
    "gumbel_noise",
    "log_normaliser",
    "masked_logits",
    "needs_logits",
    "prompt_seed",
    "rounded",
    "rows_from_sampling",
    "sample",
    "take_history",
    "take_rows",
    "token_counts",
    "token_logprobs",
    "top_tokens",
    "union",
    "update_history",
    "widen_rows",
]
