"""The Triton kernels on the CPU, run by Triton's interpreter against float64.

The interpreter must be chosen before triton is imported, so the cases run in a process of their own: without
TRITON_INTERPRET=1 this file is one test, which starts pytest on this file with it.
"""

import kernel_cases as cases
import numpy as np
import pytest
import torch
from interpreted import INTERPRETING, interpreted_tests

triton = pytest.importorskip("triton")
ALL = cases.DECODE | cases.PREFILL

if not INTERPRETING:

    def test_kernels_in_the_interpreter():
        interpreted_tests(__file__)

else:
    from triton.runtime import interpreter

    from fnllm_kernels import attention_triton, attention_triton_plan, kv_store, norm, qk_norm_rope_store, silu_mul
    from fnllm_kernels.qk_norm_rope_attention import qk_norm_rope_attention_triton
    from fnllm_kernels.zero_tail import zero_tail

    pytestmark = pytest.mark.usefixtures("unwritten_is_nan")
    patch_tensor = interpreter._patch_lang_tensor

    @pytest.fixture(autouse=True)
    def loop_bounds_are_scalars(monkeypatch):
        """NumPy 2.4 refuses int() of the one-element arrays that the interpreter of Triton 3.6 uses as scalars."""

        def patched(tensor, scope):
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)

    def inputs_of(case, dtype=torch.float32):
        return cases.attention_inputs(case, dtype=dtype, device="cpu", seed=1, poison=float("nan"))

    @pytest.mark.parametrize("name", ALL)
    def test_attention(name):
        inputs, static = inputs_of(ALL[name]), cases.static_arguments(ALL[name])
        out = attention_triton.paged_attention_triton(**inputs, **static)
        assert cases.relative_error(out, cases.exact_attention(inputs, **static)) < 2e-6
        assert (out[inputs["cu_seqlens_q"][-1] :] == 0).all()

    def test_attention_takes_lengths_of_any_stride():
        for name, form in (("mixed", {}), ("decode-odd-heads", {}), ("mixed", {"invariant": True})):
            inputs, static = inputs_of(ALL[name]), cases.static_arguments(ALL[name]) | form
            want = attention_triton.paged_attention_triton(**inputs, **static)
            apart = {key: cases.apart(inputs[key]) for key in ("context_lens", "cu_seqlens_q")}
            assert torch.equal(attention_triton.paged_attention_triton(**inputs | apart, **static), want)

    @pytest.mark.parametrize("name", ["decode-odd-heads", "mixed"])
    def test_attention_of_float16(name):  # the interpreter truncates to bfloat16 where hardware rounds
        inputs, static = inputs_of(ALL[name], torch.float16), cases.static_arguments(ALL[name])
        out = attention_triton.paged_attention_triton(**inputs, **static)
        assert cases.relative_error(out, cases.exact_attention(inputs, **static)) < 1e-3

    UNSORTED = cases.AttentionCase(
        4,
        2,
        16,
        32,
        ((1, 5), (1, 150), (1, 33), (1, 300), (1, 1), (1, 300), (1, 97), (1, 33), (1, 150), (0, 0)),
        padding=2,
    )

    def planned(inputs, kv_heads, window, tiling, direct):
        """A plan's chunk, its items' sequences, and of each sequence the first item and the counters."""
        lengths, cu = inputs["context_lens"], inputs["cu_seqlens_q"]
        plan, batch = attention_triton_plan.decode_plan(lengths, cu, kv_heads, window, tiling, direct), len(lengths)
        items = attention_triton_plan.max_items(batch, kv_heads, lengths.device, tiling.programs)
        sizes = [4, batch] if direct else [4, items, batch, batch * kv_heads]
        fields = plan[: sum(sizes)].split(sizes)
        return int(fields[0][0]), *(field.numpy() for field in fields[1:])

    @pytest.mark.parametrize("programs", [2, 4])
    @pytest.mark.parametrize("window", [0, 130])
    @pytest.mark.parametrize("direct", [True, False])
    def test_items_of_the_longest_sequences_come_first(direct, window, programs):
        inputs = inputs_of(UNSORTED)
        lengths, queries = inputs["context_lens"].numpy(), inputs["cu_seqlens_q"].diff().numpy()
        tiling = attention_triton_plan.DecodeTiling(16, 4, 2, 48, programs)
        chunk, items, *rest = planned(inputs, UNSORTED.kv_heads, window, tiling, direct)
        keys = lengths - (np.maximum(lengths - window, 0) // 16 * 16 if window else 0)
        order = np.argsort(-keys, kind="stable")
        order = order[queries[order] > 0]
        pieces = np.ones_like(order) if direct else -(-keys[order] // chunk)
        assert items.tolist() == np.repeat(order, pieces).tolist() + [-1] * (len(items) - pieces.sum())
        if not direct:
            assert chunk % 16 == 0 and chunk >= 48 and pieces.max() > 1
            first, counters = rest
            assert first[order].tolist() == (pieces.cumsum() - pieces).tolist()
            assert (counters == 0).all()

    def test_plan_of_more_sequences_than_one_program_places():
        queries = torch.arange(301) < 290
        generator = torch.Generator().manual_seed(4)
        lengths = torch.randint(1, 40, (301,), generator=generator, dtype=torch.int32) * queries
        inputs = {"context_lens": lengths.int(), "cu_seqlens_q": torch.cat((torch.zeros(1), queries.cumsum(0))).int()}
        tiling = attention_triton_plan.DecodeTiling(16, 4, 2, 64, 4)
        _, items, first, counters = planned(inputs, 2, 0, tiling, False)
        order = np.argsort(-lengths[:290].numpy(), kind="stable")
        assert items.tolist() == order.tolist() + [-1] * (len(items) - 290)
        assert first[order].tolist() == list(range(290))
        assert (counters == 0).all()

    def test_decode_splits_long_sequences_and_leaves_counters_at_zero():
        inputs, static = inputs_of(UNSORTED), cases.static_arguments(UNSORTED)
        heads, lengths, cu = UNSORTED.kv_heads, inputs["context_lens"], inputs["cu_seqlens_q"]
        plan = torch.ops.fnllm.decode_plan(lengths, cu, heads, UNSORTED.head_dim, torch.float32, 0, 300)
        items = attention_triton_plan.max_items(len(lengths), heads, lengths.device, 4)
        assert (plan[4 : 4 + items] == 3).sum() > 1
        for _ in range(2):  # the plan serves every layer of a step
            out = attention_triton.paged_attention_triton(**inputs, **static, metadata=plan)
            assert cases.relative_error(out, cases.exact_attention(inputs, **static)) < 2e-6
            assert (plan[4 + items + len(lengths) :] == 0).all()

    @pytest.mark.parametrize("direct", [True, False])
    def test_the_same_step_serves_other_lengths(direct, monkeypatch):
        """As a captured graph does: the plan's op and attention run again on tensors that have changed in place."""
        if direct:
            monkeypatch.setattr(attention_triton_plan, "MANY_PAIRS", 1)
        inputs, static = inputs_of(UNSORTED), cases.static_arguments(UNSORTED)
        lengths, tables, cu = inputs["context_lens"], inputs["block_tables"], inputs["cu_seqlens_q"]
        plans = []
        for _ in range(2):
            shape = UNSORTED.kv_heads, UNSORTED.head_dim
            plans.append(torch.ops.fnllm.decode_plan(lengths, cu, *shape, torch.float32, 0, 300))
            out = attention_triton.paged_attention_triton(**inputs, **static, metadata=plans[-1], max_context=300)
            assert cases.relative_error(out, cases.exact_attention(inputs, **static)) < 2e-6
            assert (out[cu[-1] :] == 0).all()
            lengths[:9], tables[:9] = lengths[:9].roll(2), tables[:9].roll(2, 0)
        assert plans[0].shape == plans[1].shape
        assert not torch.equal(plans[0], plans[1])

    @pytest.mark.parametrize("invariant", [True, False])
    def test_padding_without_sequences_gives_zeros(invariant):
        inputs, static = inputs_of(ALL["decode-padded"]), cases.static_arguments(ALL["decode-padded"])
        inputs |= {name: inputs[name][:0] for name in ("block_tables", "context_lens")}
        inputs["cu_seqlens_q"] = inputs["cu_seqlens_q"][:1]
        out = attention_triton.paged_attention_triton(**inputs, **static, invariant=invariant)
        assert out.shape == inputs["q"].shape and (out == 0).all()

    @pytest.mark.parametrize("window", [0, 130])
    @pytest.mark.parametrize("direct", [True, False])
    def test_decode_of_unsorted_lengths(direct, window, monkeypatch):
        if direct:
            monkeypatch.setattr(attention_triton_plan, "MANY_PAIRS", 1)
        case = UNSORTED._replace(window=window)
        inputs, static = inputs_of(case), cases.static_arguments(case)
        out = attention_triton.paged_attention_triton(**inputs, **static)
        assert cases.relative_error(out, cases.exact_attention(inputs, **static)) < 2e-6
        assert (out[inputs["cu_seqlens_q"][-1] :] == 0).all()

    def test_decode_without_division(monkeypatch):
        monkeypatch.setattr(attention_triton_plan, "MANY_PAIRS", 1)
        inputs, static = inputs_of(ALL["decode-padded"]), cases.static_arguments(ALL["decode-padded"])
        out = attention_triton.paged_attention_triton(**inputs, **static)
        assert cases.relative_error(out, cases.exact_attention(inputs, **static)) < 2e-6
        assert (out[1:] == 0).all()

    def decode_step(name, *, norm=True, dtype=torch.float32, bound=2e-6):
        """Runs a case of the kernel that starts from the qkv projection, beside float64; the arguments after it."""
        options = {"device": "cpu", "seed": 2, "poison": float("nan")}
        arguments = cases.decode_step_case(cases.DECODE_NEW[name], norm=norm, dtype=dtype, **options)
        want, want_k, want_v = cases.exact_decode_step(arguments)
        out = qk_norm_rope_attention_triton(**arguments)
        assert cases.relative_error(out, want) < bound
        assert (out[int(arguments["cu_seqlens_q"][-1]) :] == 0).all()
        for cache, wanted in ((arguments["k_cache"], want_k), (arguments["v_cache"], want_v)):
            assert torch.equal(cache.isnan(), wanted.isnan())
            assert cases.relative_error(cache.nan_to_num(), wanted.nan_to_num()) < bound

    @pytest.mark.parametrize("name", cases.DECODE_NEW)
    def test_decode_from_the_projection(name):
        decode_step(name)

    def test_decode_from_the_projection_takes_vectors_of_any_stride():
        options = {"device": "cpu", "seed": 2, "poison": 7.0, "norm": True, "dtype": torch.float32}
        usual, strided = (cases.decode_step_case(cases.DECODE_NEW["decode"], **options) for _ in range(2))
        for name in ("q_norm", "k_norm", "slots", "context_lens", "cu_seqlens_q"):
            strided[name] = cases.apart(strided[name])
        assert torch.equal(qk_norm_rope_attention_triton(**strided), qk_norm_rope_attention_triton(**usual))
        assert torch.equal(strided["k_cache"], usual["k_cache"])

    @pytest.mark.parametrize("name", ["decode-odd-heads", "decode-split"])
    def test_decode_from_the_projection_of_float16_without_norms(name):
        decode_step(name, norm=False, dtype=torch.float16, bound=2e-3)

    @pytest.mark.parametrize("name", ["decode-padded", "decode-window", "decode-group-of-16"])
    def test_decode_from_the_projection_without_division(name, monkeypatch):
        monkeypatch.setattr(attention_triton_plan, "MANY_PAIRS", 1)
        decode_step(name)

    def test_decode_from_the_projection_without_a_slot_touches_nothing():
        options = {"norm": True, "dtype": torch.float32, "device": "cpu", "seed": 2, "poison": 7.0}
        arguments = cases.decode_step_case(cases.DECODE_NEW["decode"], **options)
        arguments["slots"].fill_(-1)
        before = arguments["k_cache"].clone(), arguments["v_cache"].clone()
        assert qk_norm_rope_attention_triton(**arguments).isfinite().all()
        assert torch.equal(arguments["k_cache"], before[0]) and torch.equal(arguments["v_cache"], before[1])

    @pytest.mark.parametrize("name", ["decode", "mixed"])
    def test_invariant_form(name):
        inputs, static = inputs_of(ALL[name]), cases.static_arguments(ALL[name])
        out = attention_triton.paged_attention_triton(**inputs, **static, invariant=True)
        assert cases.relative_error(out, cases.exact_attention(inputs, **static)) < 2e-6

    def test_invariant_form_gives_the_same_bits_in_any_chunk(monkeypatch):
        """A later chunk's tiles hold keys that its earlier rows may not see; all of them masked, they change no bit."""

        def once_rounded(exact, like):
            return interpreter.TensorHandle(exact.astype(like.data.dtype), like.dtype.scalar)

        def fma(self, x, y, z):  # as in hardware; the interpreter's own rounds the product too
            return once_rounded(x.data.astype(float) * y.data + z.data, z)

        def dot(self, a, b, d, *precision):  # BLAS sums by a row's place in the tile, which no rounding then shows
            return once_rounded(a.data.astype(float) @ b.data + d.data, d)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        case = cases.AttentionCase(4, 2, 16, 8, ((70, 70),))
        inputs, static = inputs_of(case), cases.static_arguments(case) | {"scale": 0.1303}
        whole = attention_triton.paged_attention_triton(**inputs, **static, invariant=True)
        for first in range(0, 70, 7):
            part = {"q": inputs["q"][first : first + 7], "cu_seqlens_q": torch.tensor([0, 7], dtype=torch.int32)}
            part["context_lens"] = torch.tensor([first + 7], dtype=torch.int32)
            out = attention_triton.paged_attention_triton(
                **inputs | part, **static | {"max_seqlen_q": 7}, invariant=True
            )
            assert torch.equal(out, whole[first : first + 7])

    def test_attention_refuses_what_the_kernels_cannot_take():
        inputs, static = inputs_of(ALL["decode"]), cases.static_arguments(ALL["decode"])
        with pytest.raises(ValueError, match="q is torch.float64; the kernels take float32"):
            attention_triton.paged_attention_triton(**inputs | {"q": inputs["q"].double()}, **static)
        turned = inputs["k_cache"].transpose(2, 3).contiguous().transpose(2, 3)
        with pytest.raises(ValueError, match="strides equal"):
            attention_triton.paged_attention_triton(**inputs | {"k_cache": turned}, **static)

    @pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (9, 3, 24), (3, 1, 10)])
    @pytest.mark.parametrize("with_norm", [True, False])
    def test_qk_norm_rope_store(heads, kv_heads, head_dim, with_norm):
        options = {"norm": with_norm, "dtype": torch.float32, "device": "cpu", "seed": 3}
        case = cases.rope_case(heads, kv_heads, head_dim, 4, **options)
        want_q, want_k, want_v = cases.exact_rope_store(case)
        q = qk_norm_rope_store._launch(*case)
        assert cases.relative_error(q, want_q) < 1e-6
        assert cases.relative_error(case.k_cache, want_k) < 1e-6
        assert torch.equal(case.v_cache.double(), want_v)
        assert ((case.k_cache == 7) == (want_k == 7)).all()

    def test_qk_norm_rope_store_takes_vectors_of_any_stride():
        options = {"norm": True, "dtype": torch.float32, "device": "cpu", "seed": 3}
        usual, strided = (cases.rope_case(4, 2, 8, 4, **options) for _ in range(2))
        strided = strided._replace(**{n: cases.apart(getattr(strided, n)) for n in ("q_norm", "k_norm", "slots")})
        assert torch.equal(qk_norm_rope_store._launch(*strided), qk_norm_rope_store._launch(*usual))
        assert torch.equal(strided.k_cache, usual.k_cache) and torch.equal(strided.v_cache, usual.v_cache)

    def test_norm_takes_a_weight_of_any_stride():
        x, weight = torch.randn(3, 16), torch.randn(16)
        want = norm._norm_triton(x, None, weight, 1e-5)[0]
        assert torch.equal(norm._norm_triton(x, None, cases.apart(weight), 1e-5)[0], want)

    @pytest.mark.parametrize("width", [8, 7, 300])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_norms(width, dtype):
        x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((3, width), (3, width), (width,)))
        y, total = norm._norm_triton(x, residual, weight, 1e-5)
        want_y, want_total = norm.add_rms_norm_reference(x, residual, weight, 1e-5)
        assert torch.equal(total, want_total)
        assert cases.relative_error(y, want_y.double()) < (1e-6 if dtype == torch.float32 else 2e-3)
        assert torch.equal(norm._norm_triton(total, None, weight, 1e-5)[0], y)

    @pytest.mark.parametrize("parts", [2, 3])
    @pytest.mark.parametrize("width", [8, 7, 300])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_norm_of_parts(dtype, width, parts):
        x, residual, weight = torch.randn(parts, 4, width), torch.randn(4, width), torch.randn(width).to(dtype)
        residual = residual.to(dtype)
        y, total = norm._norm_triton(x, residual, weight, 1e-5)
        product = x[0] + x[1] if parts == 2 else x[0] + x[1] + x[2]
        assert torch.equal(total, product.to(dtype) + residual)
        assert y.dtype == dtype and torch.equal(y, norm._norm_triton(total, None, weight, 1e-5)[0])
        turned = x.transpose(1, 2).contiguous().transpose(1, 2)  # rows that do not follow each other
        assert all(map(torch.equal, norm._norm_triton(turned, residual, weight, 1e-5), (y, total)))

    def test_norm_of_parts_of_a_single_row_whose_stride_says_nothing():
        x, residual, weight = torch.randn(2, 6, 8)[:1, :2].transpose(0, 1), torch.randn(1, 8), torch.randn(8)
        assert x.is_contiguous() and x.stride() == (8, 48, 1)
        assert torch.equal(norm._norm_triton(x, residual, weight, 1e-5)[1], x[0] + x[1] + residual)

    @pytest.mark.parametrize("width", [3, 300])
    def test_silu_mul(width):
        gate_up = torch.randn(4, 2 * width)
        want = silu_mul.silu_mul_reference(gate_up.double())
        assert cases.relative_error(silu_mul._silu_mul_triton(gate_up), want) < 1e-6

    def test_fault_74_store_skips_padding():
        k_cache, v_cache = torch.randn(2, 2, 4, 3, 5)
        k, v = torch.randn(2, 4, 3, 5)
        slots = torch.tensor([5, -1, 0, -1], dtype=torch.int32)
        for given in (slots, cases.apart(slots)):
            want = k_cache.clone(), v_cache.clone()
            kv_store.store_kv_reference(k, v, *want, slots)
            kv_store._store_kv_triton(k, v, k_cache, v_cache, given)
            assert torch.equal(k_cache, want[0]) and torch.equal(v_cache, want[1])
            k, v = k + 1, v + 1

    def test_copy_blocks():
        k_cache, v_cache = torch.randn(2, 5, 4, 3, 5)
        pairs = torch.tensor([3, -1, 0], dtype=torch.int32), torch.tensor([1, -1, 4], dtype=torch.int32)
        want = k_cache.clone(), v_cache.clone()
        kv_store.copy_blocks_reference(*want, *pairs)
        kv_store._copy_blocks_triton(k_cache, v_cache, *map(cases.apart, pairs))
        assert torch.equal(k_cache, want[0]) and torch.equal(v_cache, want[1])

    def test_zero_tail_clears_only_the_rows_past_the_end():
        out = torch.randn(7, 3, 5)
        want = out.clone()
        want[4:] = 0
        zero_tail(out, torch.tensor([0, 3, 4], dtype=torch.int32))
        assert torch.equal(out, want)
        out[4:] = 1
        zero_tail(out, cases.apart(torch.tensor([0, 3, 4], dtype=torch.int32)))
        assert torch.equal(out, want)
        zero_tail(out[:0], torch.tensor([0, 0], dtype=torch.int32))  # no rows, nothing to clear
