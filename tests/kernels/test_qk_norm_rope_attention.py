"""A decode step from the qkv projection on: float64, padding, the two functions it stands for, registration."""

import kernel_cases as cases
import pytest
import torch
from torch import library

from fnllm_kernels.attention import paged_attention
from fnllm_kernels.qk_norm_rope_attention import qk_norm_rope_attention
from fnllm_kernels.qk_norm_rope_store import qk_norm_rope_store


def arguments_of(name, norm=True, dtype=torch.float32):
    return cases.decode_step_case(
        cases.DECODE_NEW[name], norm=norm, dtype=dtype, device="cpu", seed=2, poison=float("nan")
    )


@pytest.mark.parametrize("name", cases.DECODE_NEW)
@pytest.mark.parametrize(("norm", "dtype", "bound"), [(True, torch.float32, 2e-6), (False, torch.bfloat16, 1e-2)])
def test_equals_float64(name, norm, dtype, bound):
    arguments = arguments_of(name, norm, dtype)
    want, want_k, want_v = cases.exact_decode_step(arguments)
    out = qk_norm_rope_attention(**arguments)
    assert cases.relative_error(out, want) < bound and out.dtype == dtype
    for cache, wanted in ((arguments["k_cache"], want_k), (arguments["v_cache"], want_v)):
        assert torch.equal(cache.isnan(), wanted.isnan())
        assert cases.relative_error(cache.nan_to_num(), wanted.nan_to_num()) < bound


def test_is_the_store_and_the_attention():
    arguments = arguments_of("decode-padded")
    fresh = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    first = [fresh.pop(n) for n in ("qkv", "q_norm", "k_norm", "eps", "cos", "sin")]
    caches, slots, heads = (fresh["k_cache"], fresh["v_cache"]), fresh.pop("slots"), fresh.pop("num_heads")
    q = qk_norm_rope_store(*first, *caches, slots, heads, caches[0].shape[2])
    want = paged_attention(q, **fresh, max_seqlen_q=1, backend="reference")
    assert torch.equal(qk_norm_rope_attention(**arguments), want)
    assert torch.equal(arguments["k_cache"].nan_to_num(9), caches[0].nan_to_num(9))


def test_fault_74_padding_rows_store_nothing_and_give_zeros():
    arguments = arguments_of("decode-padded")
    stored = [int(slot) for slot in arguments["slots"] if slot >= 0]
    before = arguments["k_cache"].clone()
    out = qk_norm_rope_attention(**arguments)
    changed = (before.flatten(0, 1).nan_to_num(9) != arguments["k_cache"].flatten(0, 1).nan_to_num(9)).any(-1).any(-1)
    assert changed.nonzero().flatten().tolist() == sorted(stored)
    assert (out[int(arguments["cu_seqlens_q"][-1]) :] == 0).all()


def test_refuses_what_does_not_belong_together(unchecked):
    arguments = arguments_of("decode")
    with pytest.raises(ValueError, match=r"qk_norm_rope_attention: qkv is .* with 3 heads and 2 KV heads of 16"):
        qk_norm_rope_attention(**arguments | {"num_heads": 3})
    narrow = arguments["qkv"][:, : 7 * 16]
    with pytest.raises(ValueError, match="3 query heads over 2 KV heads"):
        qk_norm_rope_attention(**arguments | {"qkv": narrow, "num_heads": 3})
    with pytest.raises(ValueError, match=r"slots \(2,\) for 3 tokens"):
        qk_norm_rope_attention(**arguments | {"slots": arguments["slots"][:2]})


@pytest.mark.compiled
@pytest.mark.parametrize("norm", [True, False])
def test_op_is_registered_right(norm):
    arguments = arguments_of("decode-padded", norm) | {"metadata": None, "max_context": 0}
    order = [a.name for a in torch.ops.fnllm.qk_norm_rope_attention.default._schema.arguments]
    arguments["k_cache"].nan_to_num_(), arguments["v_cache"].nan_to_num_(), arguments["qkv"].nan_to_num_()
    library.opcheck(torch.ops.fnllm.qk_norm_rope_attention.default, tuple(arguments[name] for name in order))


@pytest.mark.compiled
def test_traces_whole_and_equals_eager():
    arguments = arguments_of("decode-padded")
    fresh = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    compiled = torch.compile(lambda a: qk_norm_rope_attention(**a), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(arguments), qk_norm_rope_attention(**fresh))
    for name in ("k_cache", "v_cache"):
        assert torch.equal(arguments[name].nan_to_num(9), fresh[name].nan_to_num(9))
