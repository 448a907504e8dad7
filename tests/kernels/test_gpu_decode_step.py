"""A decode step's kernels on a CUDA device: attention from the qkv projection on, dependent launch, compiled."""

import kernel_cases as cases
import pytest
import torch
from gpu_cases import BOUND, REAL, captured, fast_inputs, metadata_of, new_inputs

from fnllm_kernels.attention import paged_attention
from fnllm_kernels.dependent_launch import dependent_launch
from fnllm_kernels.norm import _norm_triton
from fnllm_kernels.qk_norm_rope_attention import qk_norm_rope_attention, qk_norm_rope_attention_triton
from fnllm_kernels.qk_norm_rope_store import qk_norm_rope_store
from fnllm_kernels.silu_mul import _silu_mul_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("unwritten_is_nan"),
]


def copied(arguments):
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


def apart(arguments):
    """Output of the store's kernel and decode attention's, one after the other."""
    rest = dict(arguments)
    first = [rest.pop(name) for name in ("qkv", "q_norm", "k_norm", "eps", "cos", "sin")]
    slots, heads, caches = rest.pop("slots"), rest.pop("num_heads"), (rest["k_cache"], rest["v_cache"])
    q = qk_norm_rope_store(*first, *caches, slots, heads, caches[0].shape[2])
    return paged_attention(q, **rest, max_seqlen_q=1, backend="triton")


def plan_of(arguments):
    """The plan that a step makes for these arguments, and no plan."""
    q = arguments["qkv"].unflatten(1, (-1, arguments["k_cache"].shape[3]))[:, : arguments["num_heads"]]
    static = {"max_seqlen_q": 1, "window": arguments["window"]}
    return metadata_of(arguments | {"q": q}, static, "triton"), None


@pytest.mark.parametrize("name", cases.DECODE_NEW)
@pytest.mark.parametrize(("norm", "dtype"), [(True, torch.bfloat16), (True, torch.float32), (False, torch.float16)])
@pytest.mark.parametrize("direct", [True, False])
def test_qk_norm_rope_attention(name, norm, dtype, direct, monkeypatch):
    if direct:
        monkeypatch.setattr("fnllm_kernels.attention_triton_plan.MANY_PAIRS", 1)
    options = {"norm": norm, "dtype": dtype, "device": "cuda", "seed": 6, "poison": float("nan")}
    arguments = cases.decode_step_case(cases.DECODE_NEW[name], **options)
    want, want_k, want_v = cases.exact_decode_step(arguments)
    for metadata in plan_of(arguments):
        out = qk_norm_rope_attention(**arguments, metadata=metadata)
        assert cases.relative_error(out, want) < BOUND[dtype]
        assert (out[int(arguments["cu_seqlens_q"][-1]) :] == 0).all()
        for cache, wanted in ((arguments["k_cache"], want_k), (arguments["v_cache"], want_v)):
            assert torch.equal(cache.isnan().cpu(), wanted.isnan())
            assert cases.relative_error(cache.nan_to_num(), wanted.nan_to_num()) < BOUND[dtype]


NEW = [name for name, case in REAL.items() if all(queries <= 1 for queries, _ in case.sequences)]
MANY = {
    "256 rows": cases.AttentionCase(16, 8, 128, 128, tuple((1, 1 + 61 * i % 900) for i in range(256))),
    "256 rows of 8B": cases.AttentionCase(32, 8, 128, 16, tuple((1, 1 + 61 * i % 900) for i in range(256))),
}


@pytest.mark.parametrize("name", [*NEW, *MANY])
def test_qk_norm_rope_attention_is_the_store_and_the_attention(name):
    arguments = new_inputs((REAL | MANY)[name], norm=True, dtype=torch.bfloat16, seed=7)
    other = copied(arguments)
    out, want = qk_norm_rope_attention(**arguments), apart(other)
    assert cases.relative_error(out, want.double().cpu()) < 1e-2
    for cache in ("k_cache", "v_cache"):
        assert torch.equal(arguments[cache].isnan(), other[cache].isnan())
        assert cases.relative_error(arguments[cache].nan_to_num(), other[cache].nan_to_num().double().cpu()) < 1e-3


@pytest.mark.skipif(
    not torch.cuda.is_available() or not dependent_launch(torch.device("cuda")), reason="needs dependent launch"
)
def test_dependent_launch_changes_no_bit():
    """Norm, attention and gate one after the other, each reading what the one before wrote, in a graph many times."""
    arguments = new_inputs(MANY["256 rows"], norm=True, dtype=torch.bfloat16, seed=8)
    torch.use_deterministic_algorithms(False)  # its fills would stand between the kernels
    weight, width = torch.randn(4096, device="cuda").bfloat16(), arguments["qkv"].shape[1]

    def chain(pdl):
        x, out = arguments["qkv"], None
        for _ in range(6):
            x, _ = _norm_triton(x, x, weight[:width], 1e-6, pdl=pdl)
            out = qk_norm_rope_attention_triton(**arguments | {"qkv": x}, pdl=pdl).flatten(1)
            x = torch.cat((out, _silu_mul_triton(torch.cat((x, x), 1), pdl=pdl)[:, : width - out.shape[1]]), 1)
            x = _silu_mul_triton(_norm_triton(torch.cat((x, x), 1), None, weight.repeat(2), 1e-6, pdl=pdl)[0], pdl=pdl)
        return out

    want = chain(False)
    graph, out = captured(lambda: chain(True))
    for _ in range(100):
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.parametrize("direct", [True, False])
def test_captured_plan_orders_the_lengths_of_each_replay(direct):
    """Tables wider than any length, so that only the hint says whether sequences may be divided."""
    case = MANY["256 rows"]
    case = case._replace(sequences=case.sequences if direct else case.sequences[:100])
    inputs, static = fast_inputs(case, torch.bfloat16, 10, float("nan")), cases.static_arguments(case)
    torch.use_deterministic_algorithms(False)  # its fills would stand between the kernels
    tables = torch.full((len(case.sequences), 40), -1, dtype=torch.int32, device="cuda")
    tables[:, : inputs["block_tables"].shape[1]] = inputs["block_tables"]
    inputs["block_tables"], static["max_context"] = tables, 900
    changing = [inputs[name] for name in ("block_tables", "context_lens")]

    def step():
        return paged_attention(**inputs, **static, backend="triton", metadata=metadata_of(inputs, static, "triton"))

    graph, out = captured(step)
    for _ in range(3):
        for x in changing:
            x.copy_(x.roll(37, 0))
        want = paged_attention(**inputs, **static, backend="reference")
        for _ in range(2):
            graph.replay()
            assert cases.relative_error(out, want.double().cpu()) < BOUND[torch.bfloat16]


def test_compiled_decode_step_from_the_projection():
    arguments = new_inputs(MANY["256 rows"], norm=True, dtype=torch.bfloat16, seed=9)
    torch.use_deterministic_algorithms(False)
    other = copied(arguments)

    def step(a):
        return qk_norm_rope_attention(**a | {"qkv": a["qkv"] * 2}, metadata=plan_of(a)[0]) * 2

    want = step(other)
    assert cases.relative_error(torch.compile(step, fullgraph=True)(arguments), want.double().cpu()) < 1e-2
    for cache in ("k_cache", "v_cache"):
        assert torch.equal(arguments[cache].nan_to_num(9), other[cache].nan_to_num(9))
