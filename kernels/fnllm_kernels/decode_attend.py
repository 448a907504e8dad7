"""One new token's attention over a paged cache, in the pieces that `decode_attention` puts together.

A program works for one sequence, G query heads that share a KV head, and one split of the cached keys. Its tile of keys
is [KW, KI, P]: P pairs of bf16 numbers make up a head (D = 2 P), a thread reads 16 bytes of a key, KW keys lie side by
side over the program's threads and KI keys one after another in each thread. Each of the KW places keeps a softmax of
its own, so that nothing crosses warps until the end.
"""

from fnllm_kernels.decode_tiles import triton

if triton is not None:
    import triton.language as tl

    from fnllm_kernels.decode_tiles import pack, rounded, unpack

    @triton.jit
    def _unpack_wide(words):
        """Two float32 tensors from int64 words: the lower and the upper half."""
        low = words.to(tl.int32).to(tl.float32, bitcast=True)
        high = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        return low, high

    @triton.jit
    def load_head_tables(norm_ptr, cos_ptr, sin_ptr, pair, PAIRS: tl.constexpr, NORM: tl.constexpr):
        """What rotated_head needs beside the head itself: (norm, partner's norm, cos and sin as words)."""
        HALF: tl.constexpr = PAIRS // 2
        cos = tl.load(cos_ptr + pair % HALF)
        sin = tl.load(sin_ptr + pair % HALF)
        if NORM:
            tables = (tl.load(norm_ptr + pair), tl.load(norm_ptr + (pair + HALF) % PAIRS), cos, sin)
        else:
            tables = (pair, pair, cos, sin)
        return tables

    @triton.jit
    def rotated_head(x_ptr, tables, pair, eps, PAIRS: tl.constexpr, NORM: tl.constexpr):
        """One head's row after RMSNorm (if NORM) and rotation, float32 evens and odds, rounded as the model rounds.

        Element i turns with element i + D / 2, which lies P / 2 pairs away: both are read, and no lane asks another.
        """
        HALF: tl.constexpr = PAIRS // 2
        norm, norm_2, cos, sin = tables[0], tables[1], tables[2], tables[3]
        even, odd = unpack(tl.load(x_ptr + pair, cache_modifier=".cg"))
        even_2, odd_2 = unpack(tl.load(x_ptr + (pair + HALF) % PAIRS, cache_modifier=".cg"))
        if NORM:
            scale = tl.rsqrt(tl.sum(even * even + odd * odd, axis=2, keep_dims=True) / (2 * PAIRS) + eps)
            norm_even, norm_odd = unpack(norm)
            even = rounded(rounded(even * scale) * norm_even)
            odd = rounded(rounded(odd * scale) * norm_odd)
            norm_even, norm_odd = unpack(norm_2)
            even_2 = rounded(rounded(even_2 * scale) * norm_even)
            odd_2 = rounded(rounded(odd_2 * scale) * norm_odd)
        sign = tl.where(pair < HALF, -1.0, 1.0)
        cos_even, cos_odd = _unpack_wide(cos)
        sin_even, sin_odd = _unpack_wide(sin)
        return rounded(even * cos_even + even_2 * (sign * sin_even)), rounded(odd * cos_odd + odd_2 * (sign * sin_odd))

    @triton.jit
    def split_range(context, window, split, NS: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr):
        """(lower, first, last, count): the split's keys [first, last) of which those below `lower` are out of the
        window, and how many splits have work. The newest key is in none of them: it is not in the cache yet."""
        cached = context - 1
        lower = tl.where(window > 0, tl.maximum(context - window, 0), 0)
        begin = lower // TILE * TILE
        length = tl.maximum((cached - begin + NS - 1) // NS, LEAST)
        length = (length + TILE - 1) // TILE * TILE
        first = begin + split * length
        count = tl.maximum((cached - begin + length - 1) // length, 1)
        return lower, first, tl.minimum(first + length, cached), count

    @triton.jit
    def load_keys(cache_k, cache_v, table_ptr, head, at, last, pair, KW: tl.constexpr, KI: tl.constexpr,
                  PAIRS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
        """The tiles [KW, KI, P] of the keys and values at positions `at` up to `last`; zeros beyond."""
        key = tl.arange(0, KW)[:, None, None] * KI + tl.arange(0, KI)[None, :, None]
        inside = at + key < last
        if BLOCK_SIZE % (KW * KI) == 0:  # the whole tile lies in one block
            block = tl.load(table_ptr + at // BLOCK_SIZE, mask=at < last, other=0)
            slot = block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE + key
        else:
            block = tl.load(table_ptr + (at + key) // BLOCK_SIZE, mask=inside, other=0)
            slot = block.to(tl.int64) * BLOCK_SIZE + (at + key) % BLOCK_SIZE
        offset = (slot * KV_HEADS + head) * PAIRS + pair
        return tl.load(cache_k + offset, mask=inside, other=0), tl.load(cache_v + offset, mask=inside, other=0)

    @triton.jit
    def attend_keys(state, queries_even, queries_odd, keys, values, at, lower, last,
                    G: tl.constexpr, KW: tl.constexpr, KI: tl.constexpr):  # fmt: skip
        """The softmax states of G query heads, each (peak, sum [KW, 1, 1], evens, odds [KW, 1, P]), with one more tile
        of keys. All stays in three dimensions, so that no value has to move to another thread."""
        key = at + tl.arange(0, KW)[:, None, None] * KI + tl.arange(0, KI)[None, :, None]
        inside = (key < last) & (key >= lower)
        key_even, key_odd = unpack(keys)
        value_even, value_odd = unpack(values)
        new_state = ()
        for g in tl.static_range(G):
            score = tl.sum(key_even * queries_even[g] + key_odd * queries_odd[g], axis=2, keep_dims=True)
            score = tl.where(inside, score, -1.0e30)
            peak = tl.maximum(state[4 * g], tl.max(score, axis=1, keep_dims=True))
            weight = tl.where(inside, tl.exp2(score - peak), 0.0)
            shrink = tl.exp2(state[4 * g] - peak)
            total = state[4 * g + 1] * shrink + tl.sum(weight, axis=1, keep_dims=True)
            even = state[4 * g + 2] * shrink + tl.sum(weight * value_even, axis=1, keep_dims=True)
            odd = state[4 * g + 3] * shrink + tl.sum(weight * value_odd, axis=1, keep_dims=True)
            new_state = new_state + (peak, total, even, odd)
        return new_state

    @triton.jit
    def attention_piece(
        qkv_ptr, q_tables, k_tables, cache_k, cache_v, table_ptr, slot, y_ptr, part_ptr, stat_ptr, counter_ptr,
        keys, values, lower, first, last, count, split, query, eps, scale, pair,
        G: tl.constexpr, NS: tl.constexpr, KW: tl.constexpr, KI: tl.constexpr, PAIRS: tl.constexpr,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr,
    ):  # fmt: skip
        """One split of G query heads from `query` on, which share a KV head: norm, rotation, the new key's store,
        attention, and the merge by who comes last.

        qkv_ptr (pairs) and y_ptr (bf16) point at the sequence's row; part_ptr [NS, G, D] and stat_ptr [NS, G] at these
        heads' float32 scratch; counter_ptr at their count of finished splits, which is 0 before and after. keys and
        values are the first tile, already loaded.
        """
        GROUP: tl.constexpr = HEADS // KV_HEADS
        head = query // GROUP
        TILE: tl.constexpr = KW * KI
        queries_even = ()
        queries_odd = ()
        for g in tl.static_range(G):
            even, odd = rotated_head(qkv_ptr + (query + g) * PAIRS, q_tables, pair, eps, PAIRS, NORM)
            queries_even = queries_even + (even * (scale * 1.4426950408889634),)
            queries_odd = queries_odd + (odd * (scale * 1.4426950408889634),)
        k_even, k_odd = rotated_head(qkv_ptr + (HEADS + head) * PAIRS, k_tables, pair, eps, PAIRS, NORM)
        new_value = tl.load(qkv_ptr + (HEADS + KV_HEADS + head) * PAIRS + pair, cache_modifier=".cg")
        # The last split owns the newest key: its first place starts out with it, and that of the KV head's first
        # query heads stores it.
        first_place = (split == count - 1) & (tl.arange(0, KW)[:, None, None] == 0)
        owner = first_place & (pair < PAIRS)
        stores = owner & (slot >= 0) & (query % GROUP == 0)
        offset = (tl.maximum(slot, 0).to(tl.int64) * KV_HEADS + head) * PAIRS + pair
        tl.store(cache_k + offset, pack(k_even, k_odd), mask=stores)
        tl.store(cache_v + offset, new_value, mask=stores)
        v_even, v_odd = unpack(new_value)
        state = ()
        for g in tl.static_range(G):
            score = tl.sum(queries_even[g] * k_even + queries_odd[g] * k_odd, axis=2, keep_dims=True)
            state = state + (
                tl.where(first_place, score, -1.0e30),
                tl.where(first_place, 1.0, 0.0),
                tl.where(owner, v_even, 0.0),
                tl.where(owner, v_odd, 0.0),
            )
        for at in range(first, last, TILE):
            next_keys, next_values = load_keys(
                cache_k, cache_v, table_ptr, head, at + TILE, last, pair, KW, KI, PAIRS, KV_HEADS, BLOCK_SIZE
            )
            state = attend_keys(state, queries_even, queries_odd, keys, values, at, lower, last, G, KW, KI)
            keys = next_keys
            values = next_values
        element = tl.arange(0, 2 * PAIRS)
        for g in tl.static_range(G):
            top = tl.max(state[4 * g], axis=0, keep_dims=True)
            weight = tl.exp2(state[4 * g] - top)
            total = tl.sum(state[4 * g + 1] * weight, axis=0, keep_dims=True)
            even = tl.sum(state[4 * g + 2] * weight, axis=0, keep_dims=True) / total
            odd = tl.sum(state[4 * g + 3] * weight, axis=0, keep_dims=True) / total
            y = tl.reshape(tl.join(even, odd), (2 * PAIRS,))
            if count == 1:
                tl.store(y_ptr + (query + g) * (2 * PAIRS) + element, y.to(tl.bfloat16))
            else:
                tl.store(part_ptr + (split * G + g) * (2 * PAIRS) + element, y)
                tl.store(stat_ptr + split * G + g, tl.max(top + tl.log2(total)))
        if count > 1:
            tl.debug_barrier()  # the program's stores are complete before its count goes up
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == count - 1:
                tl.store(counter_ptr, 0)
                merge_splits(part_ptr, stat_ptr, y_ptr + query * (2 * PAIRS), count, G, NS, PAIRS)

    @triton.jit
    def merge_splits(part_ptr, stat_ptr, y_ptr, count, G: tl.constexpr, NS: tl.constexpr, PAIRS: tl.constexpr):
        """Stores the attention of G query heads [G, D] from their splits' outputs and log2 sums of exponentials."""
        GP: tl.constexpr = triton.next_power_of_2(G)
        split = tl.arange(0, NS)[:, None]
        group = tl.arange(0, GP)[None, :]
        used = (split < count) & (group < G)
        stat = tl.load(stat_ptr + split * G + group, mask=used, other=-1.0e30, cache_modifier=".cg")
        weight = tl.exp2(stat - tl.max(stat, axis=0, keep_dims=True))
        weight = weight / tl.sum(weight, axis=0, keep_dims=True)
        at = (split * G + group)[:, :, None] * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)[None, None, :]
        part = tl.load(part_ptr + at, mask=used[:, :, None], other=0.0, cache_modifier=".cg")
        y = tl.sum(part * weight[:, :, None], axis=0)
        at = group.reshape(GP, 1) * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)[None, :]
        tl.store(y_ptr + at, y.to(tl.bfloat16), mask=group.reshape(GP, 1) < G)
