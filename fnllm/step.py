"""One step of the engine as a pure function: batch, forward, head, sampling, and the advanced rows."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fnllm.batch import Batch, Rows, StepInputs, advance, decode_batch, entry_choices, ragged_batch
from fnllm.cache import KVCache
from fnllm.context import Context
from fnllm.edits import Channel
from fnllm.layers import Layers
from fnllm.model import forward, head_logits
from fnllm.rope import Rope
from fnllm.sampler import Sampled, SamplerFeatures, take_history, take_rows
from fnllm.taps import Taps, whole_sites
from fnllm.tensor_parallel import TensorParallel
from fnllm_kernels.attention import ReferencePlan, attention_metadata
from fnllm_weights import LocalSizes, ModelConfig, ParamTree


@dataclass(frozen=True)
class StepSpec:
    """The static settings of a compiled step. Two equal specs may share one compiled function."""

    config: ModelConfig
    sizes: LocalSizes
    layers: Layers
    tp: TensorParallel
    backends: tuple[str, str]  # of paged attention: in decode steps, and in steps with prefill chunks
    block_size: int
    vocab_limit: int  # ids from here on are never sampled
    features: SamplerFeatures
    capture: tuple[str, ...] = ()
    edits: tuple[Channel, ...] = ()


class StepOutput(NamedTuple):
    """What leaves a step for the host."""

    sampled: Sampled
    captured: dict[str, Tensor]  # per captured site, the activations of the tokens asked for


def step(
    tree: ParamTree,
    cache: KVCache,
    rows: Rows,
    inputs: StepInputs,
    rope: Rope,
    *,
    spec: StepSpec,
    max_seqlen: int,
    max_context: int = 0,
) -> tuple[Rows, StepOutput]:
    """Run the batch that `inputs` describes and sample one token for each of its entries.

    `max_seqlen` bounds the queries of an entry, `max_context` (0: the block tables' width) its keys. Pure except for
    the cache, into which `fnllm::store_kv`, or a fused op, writes the new keys and values.
    """
    decode = inputs.token_ids is None
    if decode:
        batch = decode_batch(rows, inputs, rope, spec.block_size)
    else:
        batch = ragged_batch(rows, inputs, rope, spec.block_size, max_seqlen)
    backend = spec.backends[0 if decode else 1]
    captured: dict[str, Tensor] = {}
    ctx = Context(
        config=spec.config,
        sizes=spec.sizes,
        tp=spec.tp,
        layers=spec.layers,
        batch=batch,
        cache=cache,
        backend=backend,
        max_context=max_context,
        metadata=plan_attention(batch, rows, spec, tree["norm"].dtype, backend, max_context),
        taps=Taps(spec.capture, spec.edits, entry_choices(rows, inputs.row), inputs.captured, captured),
    )
    tokens = head_tokens(inputs, ctx.taps)
    logits = entry_logits(tree, forward(tree, ctx, tokens), tokens, inputs, ctx)
    sampled = draw(logits, rows, inputs, batch.context_lens, spec)
    moved = advance(rows, inputs, sampled.ids, keep_history=looks_back(spec.features))
    return moved, StepOutput(sampled, whole_sites(captured, spec.config, spec.tp))


def head_tokens(inputs: StepInputs, taps: Taps) -> Int[Tensor, " W"] | None:
    """The tokens that need the head: each entry's last, followed by those whose logits are captured; None: all."""
    if inputs.token_ids is not None:
        entries = (inputs.cu_seqlens[1:] - 1).clamp(min=0)
    elif "logits" in taps.capture:
        entries = torch.arange(inputs.row.shape[0], device=inputs.row.device)
    else:
        return None
    return torch.cat([entries, inputs.captured]) if "logits" in taps.capture else entries


def entry_logits(
    tree: ParamTree,
    hidden: Float[Tensor, "W H"],
    tokens: Int[Tensor, " W"] | None,
    inputs: StepInputs,
    ctx: Context,
) -> Float[Tensor, "B V"]:
    """Logits of each entry's last token, from the hidden states of `head_tokens`."""
    count = inputs.row.shape[0]
    if tokens is not None:
        ctx = ctx._replace(batch=ctx.batch.take(tokens))
    if "logits" in ctx.taps.capture:
        behind = torch.arange(count, hidden.shape[0], device=hidden.device)
        ctx = ctx._replace(taps=ctx.taps._replace(tokens=behind))
    return head_logits(tree, hidden, ctx)[:count]


def plan_attention(
    batch: Batch, rows: Rows, spec: StepSpec, dtype: torch.dtype, backend: str, max_context: int
) -> dict[int, Tensor | ReferencePlan | None]:
    """What the attention backend divides its work by, once for each sliding window that the layers have."""
    return {
        window: attention_metadata(
            batch.context_lens,
            batch.cu_seqlens,
            num_tokens=batch.token_ids.shape[0],
            num_heads=spec.sizes.heads,
            num_kv_heads=spec.sizes.kv_heads,
            head_dim=spec.config.head_dim,
            block_size=spec.block_size,
            max_blocks=rows.block_table.shape[1],
            max_seqlen_q=batch.max_seqlen,
            dtype=dtype,
            backend=backend,
            window=window,
            max_context=max_context,
            block_tables=batch.block_tables,
        )
        for window in {window or 0 for window in spec.config.sliding_window}
    }


def draw(
    logits: Float[Tensor, "B V"], rows: Rows, inputs: StepInputs, positions: Int[Tensor, " B"], spec: StepSpec
) -> Sampled:
    """Sample each entry by its row's settings; the noise depends only on seed, position and token id."""
    return spec.layers.sample(
        logits,
        take_rows(rows.sampler, inputs.row, spec.features),
        positions,
        features=spec.features,
        history=take_history(rows.history, inputs.row) if looks_back(spec.features) else None,
        vocab_start=spec.sizes.vocab_start,
        vocab_limit=spec.vocab_limit,
        vocab_size=spec.config.vocab_size,
        tp=spec.tp,
        kernels=logits.is_cuda,
    )


def looks_back(features: SamplerFeatures) -> bool:
    """Whether sampling needs the tokens so far."""
    return features.penalties or bool(features.logits_fns)
