"""Cases for checks on GPUs: kernel problems of real shapes, made there; ways of running that may change no bit."""

import random

import kernel_cases as cases
import torch

import fnllm
from fnllm.scheduler import Counters
from fnllm_kernels.attention import attention_metadata

REAL = {
    "0.6B-decode": cases.AttentionCase(16, 8, 128, 16, tuple((1, 1 + 37 * i % 400) for i in range(64)), padding=8),
    "0.6B-decode-long": cases.AttentionCase(16, 8, 128, 256, ((1, 4000), (1, 1), (1, 700))),
    "8B-decode-window": cases.AttentionCase(32, 8, 128, 64, ((1, 900), (1, 100), (0, 0)), window=256, padding=1),
    "8B-prefill": cases.AttentionCase(32, 8, 128, 64, ((300, 300), (130, 700), (1, 90)), padding=5),
    "8B-prefill-window": cases.AttentionCase(32, 8, 128, 16, ((300, 300), (130, 700)), window=100),
    "head-dim-64": cases.AttentionCase(9, 3, 64, 16, ((70, 70), (1, 200))),
    "head-dim-256": cases.AttentionCase(8, 4, 256, 16, ((150, 290),)),
}
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def fast_inputs(case, dtype, seed, poison):
    """`attention_inputs` of large cases, built without a Python loop over keys."""
    generator = torch.Generator("cuda").manual_seed(seed)
    lengths = torch.tensor([length for _, length in case.sequences], dtype=torch.int32, device="cuda")
    counts = torch.tensor([0] + [queries for queries, _ in case.sequences], device="cuda")
    blocks = (lengths + case.block_size - 1) // case.block_size
    width, pool = int(blocks.max()) + 1, int(blocks.sum()) + 3
    order = torch.randperm(pool, generator=generator, device="cuda").int()
    column = torch.arange(width, device="cuda")
    first = blocks.cumsum(0) - blocks
    tables = torch.where(column < blocks[:, None], order[(first[:, None] + column).clamp(max=pool - 1)], -1)
    shape = (pool, case.block_size, case.kv_heads, case.head_dim)
    caches = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(2)]
    unused = torch.ones(pool, case.block_size, dtype=torch.bool, device="cuda")
    position = torch.arange(width * case.block_size, device="cuda").expand(len(case.sequences), -1)
    seen = position < lengths[:, None]
    owner = tables.long().gather(1, position // case.block_size)
    unused[owner[seen], (position % case.block_size)[seen]] = False
    for cache in caches:
        cache[unused] = poison
    total = int(counts.sum())
    q = torch.randn(total + case.padding, case.heads, case.head_dim, generator=generator, device="cuda").to(dtype)
    q[total:] = poison
    return {
        "q": q, "k_cache": caches[0], "v_cache": caches[1], "block_tables": tables.int().contiguous(),
        "cu_seqlens_q": counts.cumsum(0).int(), "context_lens": lengths,
    }  # fmt: skip


def metadata_of(inputs, static, backend):
    (_, block_size, kv_heads, head_dim), (tokens, heads, _) = inputs["k_cache"].shape, inputs["q"].shape
    return attention_metadata(
        inputs["context_lens"], inputs["cu_seqlens_q"], num_tokens=tokens, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, block_size=block_size, max_blocks=inputs["block_tables"].shape[1],
        max_seqlen_q=static["max_seqlen_q"], dtype=inputs["q"].dtype, window=static["window"], backend=backend,
        max_context=static.get("max_context", 0),
    )  # fmt: skip


def captured(work):
    """A CUDA graph of work(), which is called once before to compile and allocate, and what the graph writes."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    return graph, out


def new_inputs(case, *, norm, dtype, seed):
    """`decode_step_case` of large cases: queries, keys and values as a projection, the newest slots poisoned."""
    inputs = fast_inputs(case, dtype, seed, float("nan"))
    tokens = inputs.pop("q").shape[0]
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    qkv = normal(tokens, (case.heads + 2 * case.kv_heads) * case.head_dim).to(dtype)
    qkv[int(inputs["cu_seqlens_q"][-1]) :] = float("nan")
    angle = normal(tokens, case.head_dim // 2) * 10
    last = (inputs["context_lens"].long() - 1).clamp(min=0)
    block = inputs["block_tables"].long().gather(1, last[:, None] // case.block_size)[:, 0]
    slots = torch.full((tokens,), -1, device="cuda")
    queries = inputs["cu_seqlens_q"].diff() > 0
    slots[: int(queries.sum())] = (block * case.block_size + last % case.block_size)[queries]
    for name in ("k_cache", "v_cache"):
        inputs[name].flatten(0, 1)[slots[slots >= 0]] = float("nan")
    weights = [(1 + normal(case.head_dim) / 4).to(dtype) if norm else None for _ in range(2)]
    first = {"qkv": qkv, "q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6}
    rest = {"slots": slots, "num_heads": case.heads, "scale": case.head_dim**-0.5, "window": case.window}
    return first | {"cos": angle.cos(), "sin": angle.sin()} | inputs | rest


SURROUNDINGS = {"num_blocks": 64, "block_size": 4, "numerics": "batch_invariant"}
DRAWN = fnllm.Sampling(temperature=0.7, top_p=0.9, seed=3, max_tokens=8, logprobs=2, ignore_eos=True)
LONGEST = 27  # tokens of a prompt


def ways(longest=LONGEST):
    """Ways of running the prompts together, as engine options on top of SURROUNDINGS."""
    needed = -(-(longest + DRAWN.max_tokens) // SURROUNDINGS["block_size"])  # blocks of the longest sequence
    return {
        "batch mates": {},
        "chunks of 1": {"max_chunk": 1},
        "chunks of 7": {"max_chunk": 7},
        "steps of 9 tokens": {"max_num_batched_tokens": 9, "max_num_seqs": 4},
        # room for all prompts and one block more: they start together, and some must give way
        "preemption": {"num_blocks": needed + 7},
        "blocks of 16": {"block_size": 16, "num_blocks": 24 + needed},
        "rows for these alone": {"max_num_seqs": 5},  # so on a GPU their decode steps need no padding
    }


def prompts_of(vocab_size, longest=LONGEST):
    """Prompts of several lengths, the last two with a common prefix."""
    draw = random.Random(1)
    whole = [[draw.randrange(3, vocab_size) for _ in range(n)] for n in (1, 3, 17, longest)]
    return [*whole, whole[3][: longest - 6]]


def bits(completions):
    """All that may not depend on a request's surroundings: tokens, log-probabilities, the likeliest others."""
    return [(out.token_ids, out.logprobs) for out in completions]


def counted(params, options):
    """What the scheduler of these options has counted in `generate`'s calls so far."""
    idle = fnllm.engine(params, **options).machine.idle
    return Counters() if idle is None else idle.scheduler.counters
