"""Norm, rotation and store in one: float64, padding, transformers' rotation, registration."""

import kernel_cases as cases
import pytest
import torch

from fnllm_kernels.qk_norm_rope_store import qk_norm_rope_store

SHAPES = [(4, 2, 8), (9, 3, 24), (3, 1, 10), (2, 2, 2)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_equals_float64(heads, kv_heads, head_dim, norm, dtype, bound):
    case = cases.rope_case(heads, kv_heads, head_dim, 7, norm=norm, dtype=dtype, device="cpu", seed=heads)
    want_q, want_k, want_v = cases.exact_rope_store(case)
    q = qk_norm_rope_store(*case)
    assert cases.relative_error(q, want_q) < bound and q.dtype == dtype
    assert cases.relative_error(case.k_cache, want_k) < bound
    assert torch.equal(case.v_cache.double(), want_v)
    assert ((case.k_cache == 7) == (want_k == 7)).all()  # slots no token names keep their 7


def test_fault_74_padding_tokens_store_nothing():
    case = cases.rope_case(4, 2, 8, 5, norm=True, dtype=torch.float32, device="cpu", seed=0)
    qk_norm_rope_store(*case._replace(slots=torch.full_like(case.slots, -1)))
    assert (case.k_cache == 7).all() and (case.v_cache == 7).all()


def test_rotates_as_transformers_does():
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    case = cases.rope_case(4, 2, 8, 5, norm=False, dtype=torch.float32, device="cpu", seed=1)
    heads = case.qkv.unflatten(1, (-1, 8))[None].transpose(1, 2)
    cos, sin = (torch.cat([x, x], -1)[None] for x in (case.cos, case.sin))
    want, _ = qwen3.apply_rotary_pos_emb(heads[:, :4], heads[:, 4:6], cos, sin)
    assert torch.allclose(qk_norm_rope_store(*case), want[0].transpose(0, 1), atol=1e-6)


def test_refuses_what_does_not_belong_together(unchecked):
    case = cases.rope_case(4, 2, 8, 5, norm=True, dtype=torch.float32, device="cpu", seed=0)
    odd = torch.zeros(5, 4, 2, 9)
    with pytest.raises(ValueError, match="head_dim is 9; it must be even"):
        qk_norm_rope_store(*case._replace(k_cache=odd, v_cache=odd))
    with pytest.raises(ValueError, match=r"with 3 heads and 2 KV heads of 8 they must be \[T, 56\]"):
        qk_norm_rope_store(*case._replace(num_heads=3))
    with pytest.raises(ValueError, match="dtype of qkv"):
        qk_norm_rope_store(*case._replace(qkv=case.qkv.half()))
    with pytest.raises(ValueError, match=r"both must be \[T, D / 2\]"):
        qk_norm_rope_store(*case._replace(cos=case.cos[:, :3]))


@pytest.mark.compiled
@pytest.mark.parametrize("norm", [True, False])
def test_op_is_registered_right(norm):
    case = cases.rope_case(4, 2, 8, 5, norm=norm, dtype=torch.float32, device="cpu", seed=0)
    torch.library.opcheck(torch.ops.fnllm.qk_norm_rope_store.default, tuple(case))


@pytest.mark.compiled
def test_traces_whole_and_equals_eager():
    case = cases.rope_case(4, 2, 8, 5, norm=True, dtype=torch.float32, device="cpu", seed=0)
    fresh = case._replace(k_cache=case.k_cache.clone(), v_cache=case.v_cache.clone())
    compiled = torch.compile(lambda c: qk_norm_rope_store(*c), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(case), qk_norm_rope_store(*fresh))
    assert torch.equal(case.k_cache, fresh.k_cache) and torch.equal(case.v_cache, fresh.v_cache)
