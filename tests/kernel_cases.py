"""Problems for the kernels with answers in float64, shared by the CPU, interpreter and GPU tests.

What must not be read is poisoned: unwritten cache slots, the queries of padding rows, table entries past a length.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionCase(NamedTuple):
    """One call: `sequences` are (new queries, keys in all); `padding` rows of q belong to no sequence."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    sequences: tuple[tuple[int, int], ...]
    window: int = 0
    padding: int = 0


DECODE = {
    "decode": AttentionCase(4, 2, 16, 4, ((1, 5), (1, 33), (1, 1))),
    "decode-padded": AttentionCase(4, 2, 16, 4, ((1, 7), (0, 0), (0, 0)), padding=2),
    "decode-window": AttentionCase(4, 2, 16, 4, ((1, 50), (1, 3)), window=5),
    "decode-odd-heads": AttentionCase(9, 3, 24, 4, ((1, 21), (1, 4))),
    "decode-head-dim-10": AttentionCase(6, 3, 10, 8, ((1, 70),)),
    "decode-split": AttentionCase(4, 4, 16, 64, ((1, 300), (1, 130), (1, 1))),
    "decode-one-head": AttentionCase(5, 1, 8, 32, ((1, 150), (1, 64))),
}
PREFILL = {
    "prefill": AttentionCase(4, 2, 16, 4, ((5, 5), (9, 9))),
    "chunk-behind-prefix": AttentionCase(4, 2, 16, 4, ((3, 20), (7, 40))),
    "prefill-window": AttentionCase(4, 2, 16, 4, ((40, 40), (3, 30)), window=6),
    "prefill-odd-heads": AttentionCase(9, 3, 24, 4, ((11, 13),)),
    "prefill-head-dim-10": AttentionCase(6, 3, 10, 64, ((20, 70),)),
    "mixed": AttentionCase(4, 2, 16, 8, ((1, 9), (1, 17), (6, 6), (0, 0), (4, 23)), padding=3),
}


def attention_inputs(case: AttentionCase, *, dtype: torch.dtype, device: str, seed: int, poison: float) -> dict:
    """The tensors of a case by argument name; lengths and tables are int32, blocks are scattered at random."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-length // case.block_size) for _, length in case.sequences]
    pool = sum(blocks) + 3
    order = torch.randperm(pool, generator=generator)
    tables = torch.full((len(blocks), max(blocks) + 1), -1, dtype=torch.int32)
    caches = [torch.full((pool, case.block_size, case.kv_heads, case.head_dim), poison) for _ in range(2)]
    used = 0
    for b, (count, (_, length)) in enumerate(zip(blocks, case.sequences, strict=True)):
        tables[b, :count] = order[used : used + count]
        used += count
        for cache in caches:
            for position in range(length):
                block = tables[b, position // case.block_size]
                cache[block, position % case.block_size] = torch.randn(cache.shape[2:], generator=generator)
    counts = torch.tensor([0] + [queries for queries, _ in case.sequences])
    total = int(counts.sum())
    q = torch.full((total + case.padding, case.heads, case.head_dim), poison)
    q[:total] = torch.randn(total, case.heads, case.head_dim, generator=generator)
    tensors = {
        "q": q.to(dtype),
        "k_cache": caches[0].to(dtype),
        "v_cache": caches[1].to(dtype),
        "block_tables": tables,
        "cu_seqlens_q": counts.cumsum(0).int(),
        "context_lens": torch.tensor([length for _, length in case.sequences], dtype=torch.int32),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def static_arguments(case: AttentionCase) -> dict:
    """The arguments of a case that are not tensors."""
    return {
        "max_seqlen_q": max(queries for queries, _ in case.sequences),
        "scale": case.head_dim**-0.5,
        "window": case.window,
    }


def exact_attention(inputs: dict, *, scale: float, window: int, max_seqlen_q: int = 0) -> Tensor:
    """Query by query in float64 on the CPU, straight from the definition."""
    q, k_cache, v_cache, tables, cu, lengths = (inputs[name].cpu() for name in inputs)
    out = torch.zeros(q.shape, dtype=torch.float64)
    group, block_size = q.shape[1] // k_cache.shape[2], k_cache.shape[1]
    for b, length in enumerate(lengths.tolist()):
        first, last = cu[b].item(), cu[b + 1].item()
        for row in range(first, last):
            position = length - (last - row)
            seen = range(max(0, position - window + 1) if window else 0, position + 1)
            where = [(int(tables[b, p // block_size]), p % block_size) for p in seen]
            keys = torch.stack([k_cache[at] for at in where]).double()
            values = torch.stack([v_cache[at] for at in where]).double()
            for head in range(q.shape[1]):
                scores = keys[:, head // group] @ q[row, head].double() * scale
                out[row, head] = scores.softmax(0) @ values[:, head // group]
    return out


def product_case(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """x [rows, inputs] and w [outputs, inputs], whose product has numbers of order 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator, dtype=torch.float64)
    w = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64) * inputs**-0.5
    return x.to(device, dtype), w.to(device, dtype)


def check_product(result: Tensor, x: Tensor, w: Tensor, relative: float) -> None:
    """Assert that it is x @ w.T but for roundings, each of this size relative to the terms that are summed."""
    exact = x.double() @ w.double().T
    bound = relative * (x.double().abs() @ w.double().abs().T)
    assert ((result.double() - exact).abs() <= bound + 1e-6).all()


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same vector with something else between its numbers."""
    return torch.stack((x, torch.full_like(x, 9)), 1)[:, 0]


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, NaN if anything is."""
    return ((got.double().cpu() - want).norm() / want.norm()).item()


class RopeCase(NamedTuple):
    """Tensors of one `qk_norm_rope_store` call, some slots -1."""

    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    cos: Tensor
    sin: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    num_heads: int
    num_kv_heads: int


def rope_case(
    heads: int, kv_heads: int, head_dim: int, tokens: int, *, norm: bool, dtype: torch.dtype, device: str, seed: int
) -> RopeCase:
    """Random inputs, caches full of 7, every third token padding."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    angle = normal(tokens, head_dim // 2) * 10
    slots = torch.randperm(4 * tokens, generator=generator)[:tokens].int()
    slots[2::3] = -1
    cache = torch.full((tokens, 4, kv_heads, head_dim), 7.0, dtype=dtype, device=device)
    return RopeCase(
        normal(tokens, (heads + 2 * kv_heads) * head_dim).to(device, dtype),
        (1 + normal(head_dim) / 4).to(device, dtype) if norm else None,
        (1 + normal(head_dim) / 4).to(device, dtype) if norm else None,
        1e-6,
        angle.cos().to(device),
        angle.sin().to(device),
        cache,
        cache.clone(),
        slots.to(device),
        heads,
        kv_heads,
    )


def exact_rope_store(case: RopeCase) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k cache, v cache) in float64 on the CPU, token by token; rotation by complex products."""
    qkv = case.qkv.cpu().double().unflatten(1, (-1, case.k_cache.shape[3]))
    turn = torch.complex(case.cos.cpu().double(), case.sin.cpu().double())
    caches = [cache.cpu().double().flatten(0, 1) for cache in (case.k_cache, case.v_cache)]

    def turned(head: Tensor, weight: Tensor | None, token: int) -> Tensor:
        if weight is not None:
            head = head / (head.square().mean() + case.eps).sqrt() * weight.cpu().double()
        half = head.shape[0] // 2
        pairs = torch.complex(head[:half], head[half:]) * turn[token]
        return torch.cat([pairs.real, pairs.imag])

    q = torch.empty(qkv.shape[0], case.num_heads, qkv.shape[2], dtype=torch.float64)
    for token, slot in enumerate(case.slots.tolist()):
        for head in range(case.num_heads):
            q[token, head] = turned(qkv[token, head], case.q_norm, token)
        if slot >= 0:
            for head in range(case.num_kv_heads):
                caches[0][slot, head] = turned(qkv[token, case.num_heads + head], case.k_norm, token)
                caches[1][slot, head] = qkv[token, case.num_heads + case.num_kv_heads + head]
    return q, *(cache.view(case.k_cache.shape) for cache in caches)


DECODE_NEW = DECODE | {
    "decode-window-of-one": AttentionCase(4, 2, 16, 4, ((1, 50), (1, 1)), window=1),
    "decode-group-of-16": AttentionCase(16, 1, 32, 16, ((1, 40), (1, 2)), padding=1),
    "decode-pieces-in-window": AttentionCase(2, 2, 16, 32, ((1, 700), (1, 3)), window=500),
}


def decode_step_case(
    case: AttentionCase, *, norm: bool, dtype: torch.dtype, device: str, seed: int, poison: float
) -> dict:
    """A call of `qk_norm_rope_attention`: the newest slot of each sequence is poisoned, and so are padding's rows."""
    inputs = attention_inputs(case, dtype=dtype, device="cpu", seed=seed, poison=poison)
    tokens = inputs.pop("q").shape[0]
    rope = rope_case(case.heads, case.kv_heads, case.head_dim, tokens, norm=norm, dtype=dtype, device="cpu", seed=seed)
    rope = rope._replace(slots=torch.full((tokens,), -1))
    for token, (b, (_, length)) in enumerate((b, s) for b, s in enumerate(case.sequences) if s[0]):
        block = int(inputs["block_tables"][b, (length - 1) // case.block_size])
        rope.slots[token] = block * case.block_size + (length - 1) % case.block_size
        for name in ("k_cache", "v_cache"):
            inputs[name].flatten(0, 1)[rope.slots[token]] = poison
    rope.qkv[int(inputs["cu_seqlens_q"][-1]) :] = poison
    arguments = rope._asdict() | inputs
    del arguments["num_kv_heads"]
    arguments = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    return arguments | {"scale": case.head_dim**-0.5, "window": case.window}


def exact_decode_step(arguments: dict) -> tuple[Tensor, Tensor, Tensor]:
    """(attention's output, k cache, v cache) in float64 on the CPU, from arguments that no call has changed yet."""
    rope = RopeCase(num_kv_heads=arguments["k_cache"].shape[2], **{
        name: arguments[name] for name in RopeCase._fields if name != "num_kv_heads"
    })  # fmt: skip
    q, k_cache, v_cache = exact_rope_store(rope)
    rest = {name: arguments[name] for name in ("block_tables", "cu_seqlens_q", "context_lens")}
    inputs = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **rest}
    return exact_attention(inputs, scale=arguments["scale"], window=arguments["window"]), k_cache, v_cache
