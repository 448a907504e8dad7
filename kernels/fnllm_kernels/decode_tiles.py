"""Pieces that the one-row decode kernels share: bf16 pairs, row-per-warp weight tiles, RMSNorm of a row.

A weight matrix [O, H] is read as int32 pairs of bf16 numbers, [O, H / 2], in tiles [W, R, P]: warp w of a program holds
R rows of the matrix and 32 lanes share each run of P pairs, so that a lane reads 16 bytes at a time, a row's sum needs
only shuffles within its warp, and no program-wide barrier stands between a weight and its product.
A chunk is such a run of P pairs; a tuple of tiles holds several chunks of the same rows.
"""

try:
    import triton
    import triton.language as tl
except ImportError:  # the plain-torch references need neither
    triton = None

if triton is not None:

    @triton.jit
    def unpack(pairs):
        """Two float32 tensors from int32 pairs of bf16 numbers: the even and the odd elements, exactly."""
        even = (pairs << 16).to(tl.float32, bitcast=True)
        odd = (pairs & -65536).to(tl.float32, bitcast=True)
        return even, odd

    @triton.jit
    def pack(even, odd):
        """int32 pairs of bf16 numbers from two float32 tensors, rounded to nearest even; the inverse of unpack."""
        low = even.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = odd.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        return low | high

    @triton.jit
    def rounded(x):
        """x rounded to bf16 and back, as an intermediate that the plain model keeps in bf16."""
        return x.to(tl.bfloat16).to(tl.float32)

    @triton.jit
    def load_weights(w_ptr, rows, first, width, PAIRS: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr):
        """CHUNKS tiles [W, R, P] of the given rows from pair `first` on; `width` pairs a row, zeros past the row's end.

        The weights are read once a step, so they are marked as first to leave the cache.
        """
        column = first + tl.arange(0, PAIRS)[None, None, :]
        tiles = ()
        for c in tl.static_range(CHUNKS):
            at = w_ptr + rows.to(tl.int64) * width + (column + c * PAIRS)
            if EVEN:
                tile = tl.load(at, eviction_policy="evict_first")
            else:
                tile = tl.load(at, mask=(column + c * PAIRS < width) & (rows >= 0), other=0, eviction_policy="evict_first")
            tiles = tiles + (tile,)
        return tiles

    @triton.jit
    def load_row(x_ptr, warp, first, width, PAIRS: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr):
        """CHUNKS tiles [W, 1, P] of one row of activations, every warp its own copy; read past the first-level cache,
        since other programs wrote them a moment ago."""
        column = first + tl.arange(0, PAIRS)[None, None, :]
        tiles = ()
        for c in tl.static_range(CHUNKS):
            at = x_ptr + (column + c * PAIRS) + warp * 0
            if EVEN:
                tile = tl.load(at, cache_modifier=".cg")
            else:
                tile = tl.load(at, mask=(column + c * PAIRS < width) & (warp >= 0), other=0, cache_modifier=".cg")
            tiles = tiles + (tile,)
        return tiles

    @triton.jit
    def unpack_all(x, CHUNKS: tl.constexpr):
        """The float32 numbers of a tuple of pairs: tuples of even and of odd elements."""
        evens = ()
        odds = ()
        for c in tl.static_range(CHUNKS):
            even, odd = unpack(x[c])
            evens = evens + (even,)
            odds = odds + (odd,)
        return evens, odds

    @triton.jit
    def inverse_rms(evens, odds, eps, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
        """1 / the root mean square of a row of WIDTH pairs, [W, 1]: the same in each warp."""
        total = evens[0] * evens[0] + odds[0] * odds[0]
        for c in tl.static_range(1, CHUNKS):
            total += evens[c] * evens[c] + odds[c] * odds[c]
        return tl.rsqrt(tl.sum(total, axis=2) / (2 * WIDTH) + eps)

    @triton.jit
    def load_inverse_rms(
        x_ptr, warp, eps, WIDTH: tl.constexpr, PAIRS: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr
    ):
        """inverse_rms of a row too long to keep in registers."""
        evens, odds = unpack_all(load_row(x_ptr, warp, 0, WIDTH, PAIRS, CHUNKS, EVEN), CHUNKS)
        return inverse_rms(evens, odds, eps, WIDTH, CHUNKS)

    @triton.jit
    def weigh_row(evens, odds, norm, CHUNKS: tl.constexpr):
        """A row times the weights of its norm; the scale is a factor of the whole product and is applied to its sums."""
        new_evens = ()
        new_odds = ()
        for c in tl.static_range(CHUNKS):
            n_even, n_odd = unpack(norm[c])
            new_evens = new_evens + (evens[c] * n_even,)
            new_odds = new_odds + (odds[c] * n_odd,)
        return new_evens, new_odds

    @triton.jit
    def multiply_add(total, weights, evens, odds, OFFSET: tl.constexpr, CHUNKS: tl.constexpr):
        """total [W, R, P] + the products of the weight tiles from OFFSET on and a row's tiles, unsummed over the lanes."""
        for c in tl.static_range(CHUNKS):
            w_even, w_odd = unpack(weights[OFFSET + c])
            total += w_even * evens[c]
            total += w_odd * odds[c]
        return total
