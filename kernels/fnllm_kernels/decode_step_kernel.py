"""The Triton kernel behind `decode_step`: every layer of one token's forward pass in one launch.

Programs stay for the whole step, one to a multiprocessor. Each layer is five phases with a grid-wide barrier after
each: norm and qkv; attention; o and residual; norm, gate_up and SiLU * up; down and residual. A phase's first weights,
or its first keys, are asked for before the barrier that it waits at, so that memory works on while the programs wait.
PHASES is a mask of the phases to run: with all set and BARRIER the kernel does the whole step; one phase at a time, it
is an ordinary kernel for a launch of its own, with no barrier.
"""

from fnllm_kernels.decode_tiles import triton

EMBED, QKV, ATTEND, O, GATE_UP, DOWN = 1, 2, 4, 8, 16, 32
ALL_PHASES = 63
# Columns of the table of layers: data pointers, and the window (0: none).
COLUMNS = (
    "input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "post_norm", "gate_up", "down", "k_cache", "v_cache",
)  # fmt: skip
WIDTH_OF_TABLE = 16
WINDOW_COLUMN = 11

if triton is not None:
    import triton.language as tl

    from fnllm_kernels.decode_attend import attention_piece, load_head_tables, load_keys, split_range
    from fnllm_kernels.decode_tiles import (
        inverse_rms,
        load_beside,
        load_inverse_rms,
        load_row,
        load_weights,
        multiply_add,
        row_sums,
        store_sums,
        unpack_all,
        weigh_row,
        zero_totals,
    )

    @triton.jit
    def grid_arrive(counter_ptr):
        """Counts this program in, once all its threads' writes are done; returns the count it found, for grid_wait.

        Only thread 0 holds that count. Its fence waits for the loads it has under way too, so a program arrives first
        and asks for the next weights afterwards.
        """
        return tl.inline_asm_elementwise(
            """
            {
            .reg .pred p;
            .reg .u32 t;
            mov.u64 $0, 0;
            bar.sync 0;
            mov.u32 t, %tid.x;
            setp.eq.u32 p, t, 0;
            @p atom.release.gpu.global.add.u64 $0, [$1], 1;
            }
            """,
            "=&l,l",
            [counter_ptr],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def grid_wait(counter_ptr, found, PROGRAMS: tl.constexpr):
        """Waits until every program has arrived; what each wrote before, all may read afterwards.

        The count is never reset: the multiple of PROGRAMS (a power of 2) above the count found ends the round.
        """
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred p;
            .reg .u32 t;
            .reg .u64 goal, seen;
            mov.u32 t, %tid.x;
            setp.ne.u32 p, t, 0;
            @p bra DONE;
            or.b64 goal, $2, $3;
            LOOK:
            ld.acquire.gpu.global.u64 seen, [$1];
            setp.le.u64 p, seen, goal;
            @p bra LOOK;
            DONE:
            bar.sync 0;
            mov.u32 $0, 0;
            }
            """,
            "=r,l,l,l",
            [counter_ptr, found, tl.full((), PROGRAMS - 1, tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def layer_pointer(table_ptr, layer, COLUMN: tl.constexpr, kind: tl.constexpr):
        """A column of the table of layers as a pointer to `kind`; all are multiples of 16 bytes."""
        return tl.multiple_of(tl.load(table_ptr + layer * 16 + COLUMN).to(tl.pointer_type(kind)), 16)

    @triton.jit
    def piece_weights(w_ptr, first_row, step, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
                      R: tl.constexpr, CHUNKS: tl.constexpr, UNITS: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
        """The weight tiles of one step: step // UNITS is the group of R rows, step % UNITS the piece of H."""
        EVEN: tl.constexpr = WIDTH % (PAIRS * CHUNKS) == 0
        row = first_row + (step // UNITS) * R
        first = (step % UNITS) * (CHUNKS * PAIRS)
        tiles = load_weights(w_ptr, row, OUTPUTS - 1, first, WIDTH, PAIRS, CHUNKS, R, EVEN)
        if GATED:
            tiles = tiles + load_weights(
                w_ptr + OUTPUTS * WIDTH, row, OUTPUTS - 1, first, WIDTH, PAIRS, CHUNKS, R, EVEN
            )
        return tiles

    @triton.jit
    def norm_tiles(norm_ptr, warp, WIDTH: tl.constexpr, PAIRS: tl.constexpr, CHUNKS: tl.constexpr):
        return load_row(norm_ptr, warp, 0, WIDTH, PAIRS, CHUNKS, WIDTH % (PAIRS * CHUNKS) == 0)

    @triton.jit
    def linear_phase(tiles, norm, x_ptr, norm_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, first_row, warp, eps,
                     OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, WARPS: tl.constexpr,
                     R: tl.constexpr, CHUNKS: tl.constexpr, UNITS: tl.constexpr, GROUPS: tl.constexpr,
                     GATED: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
                     HAS_RESIDUAL: tl.constexpr):  # fmt: skip
        """One linear layer of one row: GROUPS groups of R rows a warp, H in UNITS pieces of CHUNKS chunks.

        tiles: the weights of step 0, already loaded; norm: with UNITS = 1 the norm's weights.
        """
        EVEN: tl.constexpr = WIDTH % (PAIRS * CHUNKS) == 0
        RR: tl.constexpr = 2 * R if GATED else R
        STEPS: tl.constexpr = GROUPS * UNITS
        if UNITS == 1:
            evens, odds = unpack_all(load_row(x_ptr, warp, 0, WIDTH, PAIRS, CHUNKS, EVEN), CHUNKS)
            scale = 1.0
            residual = load_beside(residual_ptr, first_row, 0, OUTPUTS, R, PAIRS, HAS_RESIDUAL)
            if NORM:
                scale = inverse_rms(evens, odds, eps, WIDTH, CHUNKS)
                evens, odds = weigh_row(evens, odds, norm, CHUNKS)
            for group in tl.static_range(GROUPS):
                row = first_row + group * R
                if group > 0:
                    residual = load_beside(residual_ptr, row, 0, OUTPUTS, R, PAIRS, HAS_RESIDUAL)
                new_tiles = tiles
                if group + 1 < GROUPS:
                    new_tiles = piece_weights(
                        w_ptr, first_row, group + 1, OUTPUTS, WIDTH, PAIRS, R, CHUNKS, UNITS, GATED
                    )
                totals = multiply_add(zero_totals(WARPS, PAIRS, RR), tiles, evens, odds, 0, CHUNKS, RR)
                sums = row_sums(totals, scale, 0, R, WARPS, PAIRS)
                ups = row_sums(totals, scale, RR - R, R, WARPS, PAIRS)
                bias = load_beside(bias_ptr, row, 0, OUTPUTS, R, PAIRS, HAS_BIAS)
                store_sums(sums, ups, bias, bias, residual, row, 0, y_ptr, OUTPUTS, R, PAIRS, GATED, HAS_RESIDUAL)
                tiles = new_tiles
        else:
            scale = 1.0
            if NORM:
                scale = load_inverse_rms(x_ptr, warp, eps, WIDTH, PAIRS, UNITS * CHUNKS, EVEN)
            for group in range(GROUPS):
                row = first_row + group * R
                residual = load_beside(residual_ptr, row, 0, OUTPUTS, R, PAIRS, HAS_RESIDUAL)
                bias = load_beside(bias_ptr, row, 0, OUTPUTS, R, PAIRS, HAS_BIAS)
                totals = zero_totals(WARPS, PAIRS, RR)
                x = load_row(x_ptr, warp, 0, WIDTH, PAIRS, CHUNKS, EVEN)
                for unit in range(UNITS):
                    step = group * UNITS + unit
                    new_tiles = piece_weights(
                        w_ptr, first_row, tl.minimum(step + 1, STEPS - 1), OUTPUTS, WIDTH, PAIRS, R, CHUNKS, UNITS,
                        GATED,
                    )  # fmt: skip
                    first = unit * (CHUNKS * PAIRS)
                    ahead = tl.minimum(unit + 1, UNITS - 1) * (CHUNKS * PAIRS)
                    new_x = load_row(x_ptr, warp, ahead, WIDTH, PAIRS, CHUNKS, EVEN)
                    evens, odds = unpack_all(x, CHUNKS)
                    if NORM:
                        weights = load_row(norm_ptr, warp, first, WIDTH, PAIRS, CHUNKS, EVEN)
                        evens, odds = weigh_row(evens, odds, weights, CHUNKS)
                    totals = multiply_add(totals, tiles, evens, odds, 0, CHUNKS, RR)
                    tiles = new_tiles
                    x = new_x
                sums = row_sums(totals, scale, 0, R, WARPS, PAIRS)
                ups = row_sums(totals, scale, RR - R, R, WARPS, PAIRS)
                store_sums(sums, ups, bias, bias, residual, row, 0, y_ptr, OUTPUTS, R, PAIRS, GATED, HAS_RESIDUAL)

    @triton.jit
    def decode_step_kernel(
        table_ptr, token_ptr, embed_ptr, cos_ptr, sin_ptr, blocks_ptr, context_ptr, slot_ptr, h_ptr, mid_ptr, qkv_ptr,
        attended_ptr, act_ptr, part_ptr, stat_ptr, counters_ptr, barrier_ptr, eps, scale, layer_first, layer_last,
        layers,
        H: tl.constexpr, I: tl.constexpr, G: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_PAIRS: tl.constexpr,
        BLOCK_SIZE: tl.constexpr, QK_NORM: tl.constexpr, QKV_BIAS: tl.constexpr, PROGRAMS: tl.constexpr,
        NS: tl.constexpr, WARPS: tl.constexpr, PAIRS: tl.constexpr, KW: tl.constexpr, KI: tl.constexpr,
        LEAST: tl.constexpr,
        QKV_R: tl.constexpr, QKV_C: tl.constexpr, QKV_U: tl.constexpr, QKV_G: tl.constexpr,
        O_R: tl.constexpr, O_C: tl.constexpr, O_U: tl.constexpr, O_G: tl.constexpr,
        UP_R: tl.constexpr, UP_C: tl.constexpr, UP_U: tl.constexpr, UP_G: tl.constexpr,
        DOWN_R: tl.constexpr, DOWN_C: tl.constexpr, DOWN_U: tl.constexpr, DOWN_G: tl.constexpr,
        PHASES: tl.constexpr, BARRIER: tl.constexpr,
    ):  # fmt: skip
        """Layers [layer_first, layer_last) of `layers`; h and mid [H] bf16 carry the residual stream, h in the end."""
        QKV_ROWS: tl.constexpr = (G + 2) * KV_HEADS * 2 * HEAD_PAIRS
        Y_PAIRS: tl.constexpr = G * KV_HEADS * HEAD_PAIRS
        program = tl.program_id(0)
        warp = tl.arange(0, WARPS)[:, None, None]
        lane_row = program * WARPS + warp
        h_pairs = h_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        mid_pairs = mid_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        qkv_pairs = qkv_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        attended_pairs = attended_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        act_pairs = act_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        pair = tl.arange(0, HEAD_PAIRS)[None, None, :] + 0 * tl.arange(0, KW)[:, None, None]
        head = program % KV_HEADS
        split = program // KV_HEADS
        context = tl.load(context_ptr)
        slot = tl.load(slot_ptr)

        qkv_w = layer_pointer(table_ptr, layer_first, 1, tl.int32)
        norm_ptr = layer_pointer(table_ptr, layer_first, 0, tl.int32)
        if PHASES & 2:
            tiles = piece_weights(
                qkv_w, lane_row * (QKV_R * QKV_G), 0, QKV_ROWS, H // 2, PAIRS, QKV_R, QKV_C, QKV_U, False
            )
            norm = norm_tiles(norm_ptr, warp, H // 2, PAIRS, QKV_C)
        if PHASES & 1:
            column = program * (WARPS * 32) + tl.arange(0, WARPS * 32)
            row = tl.load(token_ptr).to(tl.int64) * (H // 2)
            for first in range(0, H // 2, PROGRAMS * WARPS * 32):
                inside = first + column < H // 2
                tl.store(h_pairs + first + column, tl.load(embed_ptr + row + first + column, mask=inside), mask=inside)
        if BARRIER:
            found = grid_arrive(barrier_ptr)
            grid_wait(barrier_ptr, found, PROGRAMS)

        for layer in range(layer_first, layer_last):
            following = tl.minimum(layer + 1, layers - 1)
            o_w = layer_pointer(table_ptr, layer, 5, tl.int32)
            post_norm = layer_pointer(table_ptr, layer, 6, tl.int32)
            up_w = layer_pointer(table_ptr, layer, 7, tl.int32)
            down_w = layer_pointer(table_ptr, layer, 8, tl.int32)
            next_qkv = layer_pointer(table_ptr, following, 1, tl.int32)
            next_norm = layer_pointer(table_ptr, following, 0, tl.int32)
            cache_k = layer_pointer(table_ptr, layer, 9, tl.int32)
            cache_v = layer_pointer(table_ptr, layer, 10, tl.int32)
            window = tl.load(table_ptr + layer * 16 + 11).to(tl.int32)
            if PHASES & 2:
                bias_ptr = h_ptr
                if QKV_BIAS:
                    bias_ptr = layer_pointer(table_ptr, layer, 2, tl.bfloat16)
                linear_phase(
                    tiles, norm, h_pairs, norm_ptr, qkv_w, bias_ptr, h_ptr, qkv_ptr, lane_row * (QKV_R * QKV_G), warp,
                    eps, QKV_ROWS, H // 2, PAIRS, WARPS, QKV_R, QKV_C, QKV_U, QKV_G, False, True, QKV_BIAS, False,
                )  # fmt: skip
            if BARRIER:
                found = grid_arrive(barrier_ptr)
            if PHASES & 4:
                lower, first, last, count = split_range(context, window, split, NS, KW * KI, LEAST)
                keys, values = load_keys(
                    cache_k, cache_v, blocks_ptr, head, first, last, pair, KW, KI, HEAD_PAIRS, KV_HEADS, BLOCK_SIZE
                )
                q_norm = layer_pointer(table_ptr, layer, 3, tl.int32)
                k_norm = layer_pointer(table_ptr, layer, 4, tl.int32)
                q_tables = load_head_tables(q_norm, cos_ptr, sin_ptr, pair, HEAD_PAIRS, QK_NORM)
                k_tables = load_head_tables(k_norm, cos_ptr, sin_ptr, pair, HEAD_PAIRS, QK_NORM)
                if BARRIER:
                    grid_wait(barrier_ptr, found, PROGRAMS)
                if (split < count) & (split < NS):
                    attention_piece(
                        qkv_pairs, q_tables, k_tables, cache_k, cache_v, blocks_ptr, slot, attended_ptr,
                        part_ptr + head * (NS * G * 2 * HEAD_PAIRS), stat_ptr + head * (NS * G), counters_ptr + head,
                        keys, values, lower, first, last, count, split, head * G, eps, scale, pair,
                        G, NS, KW, KI, HEAD_PAIRS, G * KV_HEADS, KV_HEADS, BLOCK_SIZE, QK_NORM,
                    )  # fmt: skip
            if BARRIER:
                found = grid_arrive(barrier_ptr)
            if PHASES & 8:
                o_tiles = piece_weights(o_w, lane_row * (O_R * O_G), 0, H, Y_PAIRS, PAIRS, O_R, O_C, O_U, False)
                if BARRIER:
                    grid_wait(barrier_ptr, found, PROGRAMS)
                linear_phase(
                    o_tiles, o_tiles, attended_pairs, post_norm, o_w, h_ptr, h_ptr, mid_ptr, lane_row * (O_R * O_G),
                    warp, eps, H, Y_PAIRS, PAIRS, WARPS, O_R, O_C, O_U, O_G, False, False, False, True,
                )  # fmt: skip
            if BARRIER:
                found = grid_arrive(barrier_ptr)
            if PHASES & 16:
                up_tiles = piece_weights(up_w, lane_row * (UP_R * UP_G), 0, I, H // 2, PAIRS, UP_R, UP_C, UP_U, True)
                up_norm = norm_tiles(post_norm, warp, H // 2, PAIRS, UP_C)
                if BARRIER:
                    grid_wait(barrier_ptr, found, PROGRAMS)
                linear_phase(
                    up_tiles, up_norm, mid_pairs, post_norm, up_w, h_ptr, h_ptr, act_ptr, lane_row * (UP_R * UP_G),
                    warp, eps, I, H // 2, PAIRS, WARPS, UP_R, UP_C, UP_U, UP_G, True, True, False, False,
                )  # fmt: skip
            if BARRIER:
                found = grid_arrive(barrier_ptr)
            if PHASES & 32:
                down_tiles = piece_weights(
                    down_w, lane_row * (DOWN_R * DOWN_G), 0, H, I // 2, PAIRS, DOWN_R, DOWN_C, DOWN_U, False
                )
                if BARRIER:
                    grid_wait(barrier_ptr, found, PROGRAMS)
                linear_phase(
                    down_tiles, down_tiles, act_pairs, post_norm, down_w, h_ptr, mid_ptr, h_ptr,
                    lane_row * (DOWN_R * DOWN_G), warp, eps, H, I // 2, PAIRS, WARPS, DOWN_R, DOWN_C, DOWN_U, DOWN_G,
                    False, False, False, True,
                )  # fmt: skip
            if BARRIER:
                found = grid_arrive(barrier_ptr)
            if PHASES & 2:
                qkv_w = next_qkv
                norm_ptr = next_norm
                tiles = piece_weights(
                    qkv_w, lane_row * (QKV_R * QKV_G), 0, QKV_ROWS, H // 2, PAIRS, QKV_R, QKV_C, QKV_U, False
                )
                norm = norm_tiles(norm_ptr, warp, H // 2, PAIRS, QKV_C)
            if BARRIER:
                grid_wait(barrier_ptr, found, PROGRAMS)
