"""Pieces that the decode kernels share: bf16 pairs, row-per-warp weight tiles, and what is done with them.

A weight matrix [O, H] is read as int32 pairs of bf16 numbers, [O, H / 2], in tiles [W, 1, P]: warp w of a program holds
one row of the matrix in each tile, and its 32 lanes share a run of P pairs, so that a lane reads 16 bytes at a time, a
row's sum needs only shuffles within its warp, and no program-wide barrier stands between a weight and its product. A
chunk is such a run of P pairs. A tuple holds the tiles of several rows and chunks, all chunks of a row together.
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
    def load_weights(w_ptr, row, last_row, first, WIDTH: tl.constexpr, PAIRS: tl.constexpr, CHUNKS: tl.constexpr,
                     R: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
        """Tiles of R rows from `row` [W, 1, 1] on, CHUNKS each from pair `first` on; zeros past a row's WIDTH pairs.

        Rows past the last read the last. Weights are read once a step, so they are marked as first to leave the cache.
        """
        column = first + tl.arange(0, PAIRS)[None, None, :]
        tiles = ()
        for r in tl.static_range(R):
            at = w_ptr + tl.minimum(row + r, last_row).to(tl.int64) * WIDTH + column
            for c in tl.static_range(CHUNKS):
                if EVEN:
                    tile = tl.load(at + c * PAIRS, eviction_policy="evict_first")
                else:
                    inside = (column + c * PAIRS < WIDTH) & (row >= 0)
                    tile = tl.load(at + c * PAIRS, mask=inside, other=0, eviction_policy="evict_first")
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
    def add_squares(total, evens, odds, CHUNKS: tl.constexpr):
        """total plus the squares of a row's tiles, unsummed over lanes."""
        for c in tl.static_range(CHUNKS):
            total += evens[c] * evens[c] + odds[c] * odds[c]
        return total

    @triton.jit
    def inverse_rms(evens, odds, eps, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
        """1 / the root mean square of a row of WIDTH pairs, [W, 1, 1]: the same in each warp."""
        total = evens[0] * evens[0] + odds[0] * odds[0]
        for c in tl.static_range(1, CHUNKS):
            total += evens[c] * evens[c] + odds[c] * odds[c]
        return tl.rsqrt(tl.sum(total, axis=2, keep_dims=True) / (2 * WIDTH) + eps)

    @triton.jit
    def weigh_row(evens, odds, norm, CHUNKS: tl.constexpr):
        """A row times the weights of its norm; the scale is a factor of the whole product, applied to its sums."""
        new_evens = ()
        new_odds = ()
        for c in tl.static_range(CHUNKS):
            n_even, n_odd = unpack(norm[c])
            new_evens = new_evens + (evens[c] * n_even,)
            new_odds = new_odds + (odds[c] * n_odd,)
        return new_evens, new_odds

    @triton.jit
    def zero_totals(WARPS: tl.constexpr, PAIRS: tl.constexpr, R: tl.constexpr):
        """R running totals [W, 1, P]."""
        totals = ()
        for _ in tl.static_range(R):
            totals = totals + (tl.zeros((WARPS, 1, PAIRS), tl.float32),)
        return totals

    @triton.jit
    def multiply_add(totals, weights, evens, odds, OFFSET: tl.constexpr, CHUNKS: tl.constexpr, R: tl.constexpr):
        """Totals of R rows from OFFSET on plus products of their weight tiles with a row's, unsummed over lanes."""
        new_totals = ()
        for r in tl.static_range(R):
            total = totals[OFFSET + r]
            for c in tl.static_range(CHUNKS):
                w_even, w_odd = unpack(weights[r * CHUNKS + c])
                total += w_even * evens[c]
                total += w_odd * odds[c]
            new_totals = new_totals + (total,)
        return new_totals

    @triton.jit
    def row_sums(totals, scale, OFFSET: tl.constexpr, R: tl.constexpr, WARPS: tl.constexpr, PAIRS: tl.constexpr):
        """The sums of R totals from OFFSET on, times scale: that of row r in column r of a tile [W, 1, P], where it can
        be stored beside its neighbours without moving to another thread."""
        column = tl.arange(0, PAIRS)[None, None, :]
        sums = tl.zeros((WARPS, 1, PAIRS), tl.float32)
        for r in tl.static_range(R):
            sums = tl.where(column == r, tl.sum(totals[OFFSET + r], axis=2, keep_dims=True) * scale, sums)
        return sums

    @triton.jit
    def load_beside(ptr, row, t, outputs, R: tl.constexpr, PAIRS: tl.constexpr, GIVEN: tl.constexpr):
        """The numbers that lie where store_sums will store, as float32 [W, 1, P]; zeros unless GIVEN."""
        column = tl.arange(0, PAIRS)[None, None, :]
        at = tl.multiple_of(row + column, [1, 1, 4])
        if GIVEN:
            inside = (column < R) & (row + column < outputs)
            old = tl.load(ptr + t * outputs + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        else:
            old = tl.zeros_like(at).to(tl.float32)
        return old

    @triton.jit
    def store_sums(sums, ups, bias, up_bias, residual, row, t, y_ptr, outputs, R: tl.constexpr, PAIRS: tl.constexpr,
                   GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr):  # fmt: skip
        """Finishes row_sums and stores row t of y, rounding where the model's separate layers round."""
        column = tl.arange(0, PAIRS)[None, None, :]
        # R numbers at a multiple of R: told as aligned, so that the layout stays that of the sums. The mask keeps an
        # access from being wider than R allows.
        at = tl.multiple_of(row + column, [1, 1, 4])
        inside = (column < R) & (row + column < outputs)
        y = rounded(sums + bias)
        if GATED:
            y = rounded(rounded(y / (1.0 + tl.exp(-y))) * rounded(ups + up_bias))
        if HAS_RESIDUAL:
            y += residual
        tl.store(y_ptr + t * outputs + at, y.to(tl.bfloat16), mask=inside)
