"""The Triton kernels on the CPU, run by Triton's interpreter against float64.

The interpreter must be chosen before triton is imported, so the cases run in a process of their own: without
TRITON_INTERPRET=1 this file is one test, which starts pytest on this file with it.
"""

import kernel_cases as cases
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

    patch_tensor = interpreter._patch_lang_tensor

    @pytest.fixture(autouse=True)
    def loop_bounds_are_scalars(monkeypatch):
        """NumPy 2.4 refuses int() of the one-element arrays that the interpreter of Triton 3.6 uses as scalars."""

        def patched(tensor, scope):
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)

    @pytest.fixture(autouse=True)
    def unwritten_is_nan():
        """torch.empty gives NaN or the largest integer, so what a kernel fails to write shows."""
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)

    def inputs_of(case, dtype=torch.float32):
        return cases.attention_inputs(case, dtype=dtype, device="cpu", seed=1, poison=float("nan"))

    @pytest.mark.parametrize("name", ALL)
    def test_attention(name):
        inputs, static = inputs_of(ALL[name]), cases.static_arguments(ALL[name])
        out = attention_triton.paged_attention_triton(**inputs, **static)
        assert cases.relative_error(out, cases.exact_attention(inputs, **static)) < 2e-6
        assert (out[inputs["cu_seqlens_q"][-1] :] == 0).all()

    @pytest.mark.parametrize("name", ["decode-odd-heads", "mixed"])
    def test_attention_of_float16(name):  # the interpreter truncates to bfloat16 where hardware rounds
        inputs, static = inputs_of(ALL[name], torch.float16), cases.static_arguments(ALL[name])
        out = attention_triton.paged_attention_triton(**inputs, **static)
        assert cases.relative_error(out, cases.exact_attention(inputs, **static)) < 1e-3

    def test_decode_splits_long_sequences_and_leaves_counters_at_zero():
        case = ALL["decode-split"]
        inputs, static = inputs_of(case), cases.static_arguments(case)
        lengths, cu = inputs["context_lens"], inputs["cu_seqlens_q"]
        tiling = attention_triton_plan.decode_tiling(torch.float32, case.head_dim, 3, case.kv_heads)
        plan = attention_triton_plan.decode_plan(lengths, cu, case.kv_heads, 0, tiling)
        items = attention_triton_plan.max_items(3, case.kv_heads, lengths.device)
        chunk = int(plan[0])
        owners = plan[4 : 4 + items].tolist()
        pieces = [-(-length // chunk) for length in lengths.tolist()]
        assert pieces[0] > 1
        assert owners == sum(([b] * n for b, n in enumerate(pieces)), []) + [-1] * (items - sum(pieces))
        assert plan[4 + items : 4 + items + 3].tolist() == [0, pieces[0], pieces[0] + pieces[1]]
        for _ in range(2):  # the plan serves every layer of a step
            out = attention_triton.paged_attention_triton(**inputs, **static, metadata=plan)
            assert cases.relative_error(out, cases.exact_attention(inputs, **static)) < 2e-6
            assert plan[4 + items + 3 :].tolist() == [0] * (3 * case.kv_heads)

    def test_decode_without_a_plan(monkeypatch):
        monkeypatch.setattr(attention_triton, "MANY_PAIRS", 1)
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

    @pytest.mark.parametrize("name", ["decode-odd-heads", "decode-split"])
    def test_decode_from_the_projection_of_float16_without_norms(name):
        decode_step(name, norm=False, dtype=torch.float16, bound=2e-3)

    @pytest.mark.parametrize("name", ["decode-padded", "decode-window", "decode-group-of-16"])
    def test_decode_from_the_projection_without_a_plan(name, monkeypatch):
        monkeypatch.setattr(attention_triton, "MANY_PAIRS", 1)
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

    @pytest.mark.parametrize("width", [8, 7, 300])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_norms(width, dtype):
        x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((3, width), (3, width), (width,)))
        y, total = norm._norm_triton(x, residual, weight, 1e-5)
        want_y, want_total = norm.add_rms_norm_reference(x, residual, weight, 1e-5)
        assert torch.equal(total, want_total)
        assert cases.relative_error(y, want_y.double()) < (1e-6 if dtype == torch.float32 else 2e-3)
        assert torch.equal(norm._norm_triton(total, None, weight, 1e-5)[0], y)

    @pytest.mark.parametrize("width", [3, 300])
    def test_silu_mul(width):
        gate_up = torch.randn(4, 2 * width)
        want = silu_mul.silu_mul_reference(gate_up.double())
        assert cases.relative_error(silu_mul._silu_mul_triton(gate_up), want) < 1e-6

    def test_fault_74_store_skips_padding():
        k_cache, v_cache = torch.randn(2, 2, 4, 3, 5)
        k, v = torch.randn(2, 4, 3, 5)
        slots = torch.tensor([5, -1, 0, -1], dtype=torch.int32)
        want = k_cache.clone(), v_cache.clone()
        kv_store.store_kv_reference(k, v, *want, slots)
        kv_store._store_kv_triton(k, v, k_cache, v_cache, slots)
        assert torch.equal(k_cache, want[0]) and torch.equal(v_cache, want[1])

    def test_copy_blocks():
        k_cache, v_cache = torch.randn(2, 5, 4, 3, 5)
        pairs = torch.tensor([3, -1, 0], dtype=torch.int32), torch.tensor([1, -1, 4], dtype=torch.int32)
        want = k_cache.clone(), v_cache.clone()
        kv_store.copy_blocks_reference(*want, *pairs)
        kv_store._copy_blocks_triton(k_cache, v_cache, *pairs)
        assert torch.equal(k_cache, want[0]) and torch.equal(v_cache, want[1])

    def test_zero_tail_clears_only_the_rows_past_the_end():
        out = torch.randn(7, 3, 5)
        want = out.clone()
        want[4:] = 0
        zero_tail(out, torch.tensor([0, 3, 4], dtype=torch.int32))
        assert torch.equal(out, want)
