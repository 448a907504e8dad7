"""Cache writes: only the named slots change, padding never becomes an index."""

import pytest
import torch

from fnllm_kernels.kv_store import copy_blocks, store_kv


def caches(blocks=2, block_size=4, heads=3, width=5, dtype=torch.float32):
    k_cache = torch.randn(blocks, block_size, heads, width).to(dtype)
    return k_cache, torch.randn_like(k_cache)


@pytest.mark.parametrize("slots", [[5, -1, -1], [0, -1, 7], [-1, -1, -1], [3, 2, 1]])
@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64])
def test_fault_74_only_named_slots_change(slots, slot_type):
    k_cache, v_cache = caches()
    k, v = torch.randn(2, 3, 3, 5)
    want_k, want_v = k_cache.clone().flatten(0, 1), v_cache.clone().flatten(0, 1)
    for row, slot in enumerate(slots):
        if slot >= 0:
            want_k[slot], want_v[slot] = k[row], v[row]
    store_kv(k, v, k_cache, v_cache, torch.tensor(slots, dtype=slot_type))
    assert torch.equal(k_cache.flatten(0, 1), want_k) and torch.equal(v_cache.flatten(0, 1), want_v)


def test_copy_blocks_copies_whole_blocks_and_skips_padding():
    k_cache, v_cache = caches(blocks=5)
    old_k, old_v = k_cache.clone(), v_cache.clone()
    copy_blocks(k_cache, v_cache, torch.tensor([3, -1, 0], dtype=torch.int32), torch.tensor([1, -1, 4]).int())
    for new, old in ((k_cache, old_k), (v_cache, old_v)):
        assert torch.equal(new[[0, 1, 2, 3, 4]], old[[0, 3, 2, 3, 0]])


def test_refuses_what_does_not_belong_together(unchecked):
    k_cache, v_cache = caches()
    k, v = torch.randn(2, 3, 3, 5)
    with pytest.raises(ValueError, match=r"must be \[T, K, D\], \[T, K, D\] and \[T\]"):
        store_kv(k, v, k_cache, v_cache, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="dtype of k"):
        store_kv(k.half(), v.half(), k_cache, v_cache, torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="give each src its dst"):
        copy_blocks(k_cache, v_cache, torch.tensor([1]), torch.tensor([1, 0]))


@pytest.mark.compiled
def test_ops_are_registered_right():
    k_cache, v_cache = caches()
    k, v = torch.randn(2, 3, 3, 5)
    torch.library.opcheck(torch.ops.fnllm.store_kv.default, (k, v, k_cache, v_cache, torch.tensor([5, -1, 0])))
    torch.library.opcheck(torch.ops.fnllm.copy_blocks.default, (k_cache, v_cache, torch.tensor([1]), torch.tensor([0])))


@pytest.mark.compiled
def test_traces_whole_and_writes_in_place():
    k_cache, v_cache = caches()
    k, v = torch.randn(2, 3, 3, 5)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(k, v, k_cache, v_cache, slots):
        store_kv(k * 2, v, k_cache, v_cache, slots)
        return k_cache.sum()

    before = k_cache.clone()
    total = step(k, v, k_cache, v_cache, torch.tensor([5, -1, -1]))
    assert torch.equal(k_cache[1, 1], k[0] * 2) and torch.equal(k_cache[0], before[0])
    assert total == k_cache.sum()
