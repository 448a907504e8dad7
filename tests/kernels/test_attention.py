"""The attention op on the CPU: against float64, under padding and poison, traced, and refused where it must be."""

from types import SimpleNamespace

import kernel_cases as cases
import pytest
import torch

from fnllm_kernels import attention_flash, attention_reference
from fnllm_kernels.attention import attention_metadata, default_backend, paged_attention
from fnllm_kernels.attention_triton_plan import HEADER, decode_tiling, max_items, plan_size, runs_direct
from fnllm_kernels.layouts import in_order

ALL = cases.DECODE | cases.PREFILL


def inputs_of(name, dtype=torch.float32, seed=0):
    return cases.attention_inputs(ALL[name], dtype=dtype, device="cpu", seed=seed, poison=float("nan"))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_equals_float64(name, dtype, bound):
    inputs, static = inputs_of(name, dtype), cases.static_arguments(ALL[name])
    out = paged_attention(**inputs, **static, backend="reference")
    assert cases.relative_error(out, cases.exact_attention(inputs, **static)) < bound
    assert out.dtype == dtype


def test_fault_78_three_kv_heads_of_24():
    inputs, static = inputs_of("prefill-odd-heads"), cases.static_arguments(ALL["prefill-odd-heads"])
    assert inputs["k_cache"].shape[2:] == (3, 24)
    out = paged_attention(**inputs, **static, backend="reference")
    assert cases.relative_error(out, cases.exact_attention(inputs, **static)) < 2e-6


@pytest.mark.parametrize("name", ["mixed", "decode-padded"])
def test_padding_rows_are_zero(name):
    inputs, static = inputs_of(name), cases.static_arguments(ALL[name])
    out = paged_attention(**inputs, **static, backend="reference")
    used = inputs["cu_seqlens_q"][-1]
    assert out.shape[0] > used
    assert (out[used:] == 0).all() and out.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "triton_invariant"])
@pytest.mark.parametrize("sequences", [((1, 5), (1, 0)), ((3, 20), (2, 0), (17, 17)), ((1, 0),)])
def test_queries_of_a_sequence_without_keys_get_zeros(backend, sequences):
    case = cases.AttentionCase(4, 2, 16, 4, sequences)
    inputs = cases.attention_inputs(case, dtype=torch.float32, device="cpu", seed=0, poison=float("nan"))
    out = paged_attention(**inputs, **cases.static_arguments(case), backend=backend)
    for (_, length), rows in zip(sequences, out.split([queries for queries, _ in sequences]), strict=True):
        assert rows.isfinite().all() and (rows == 0).all() == (length == 0)


def test_long_query_is_taken_in_steps(monkeypatch):
    case = cases.AttentionCase(4, 2, 8, 4, ((23, 31),), window=9)
    inputs, static = (
        cases.attention_inputs(case, dtype=torch.float32, device="cpu", seed=3, poison=float("nan")),
        cases.static_arguments(case),
    )
    monkeypatch.setattr(attention_reference, "_QUERY_STEP", 5)
    out = paged_attention(**inputs, **static, backend="reference")
    assert cases.relative_error(out, cases.exact_attention(inputs, **static)) < 2e-6


def test_similar_lengths_decode_in_one_product(monkeypatch):
    case = cases.AttentionCase(4, 2, 8, 4, tuple((1, 129 + i) for i in range(8)))
    inputs, calls = cases.attention_inputs(case, dtype=torch.float32, device="cpu", seed=0, poison=0.0), []
    attend = attention_reference.scaled_dot_product_attention
    monkeypatch.setattr(
        attention_reference,
        "scaled_dot_product_attention",
        lambda *args, **options: calls.append(1) or attend(*args, **options),
    )
    paged_attention(**inputs, **cases.static_arguments(case), backend="reference")
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["decode", "decode-window", "mixed"])
def test_a_sequence_does_not_depend_on_its_batch(name):
    inputs, static = inputs_of(name), cases.static_arguments(ALL[name])
    together = paged_attention(**inputs, **static, backend="reference")
    cu = inputs["cu_seqlens_q"].tolist()
    for b in range(len(cu) - 1):
        rows = slice(cu[b], cu[b + 1])
        alone = paged_attention(
            inputs["q"][rows],
            inputs["k_cache"],
            inputs["v_cache"],
            inputs["block_tables"][b : b + 1],
            torch.tensor([0, cu[b + 1] - cu[b]], dtype=torch.int32),
            inputs["context_lens"][b : b + 1],
            **static,
            backend="reference",
        )
        assert torch.equal(alone, together[rows])


def op_arguments(inputs, static):
    return (*inputs.values(), static["max_seqlen_q"], static["scale"], static["window"], "reference", None, 0)


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["decode-padded", "mixed"])
def test_op_is_registered_right(name):
    arguments = op_arguments(inputs_of(name), cases.static_arguments(ALL[name]))
    torch.library.opcheck(torch.ops.fnllm.paged_attention.default, arguments)


@pytest.mark.compiled
def test_traces_whole_and_equals_eager():
    inputs, static = inputs_of("mixed"), cases.static_arguments(ALL["mixed"])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(inputs):
        return paged_attention(**inputs, **static, backend="reference") * 2

    assert torch.equal(step(inputs), paged_attention(**inputs, **static, backend="reference") * 2)


def test_refuses_what_does_not_belong_together(unchecked):
    inputs, static = inputs_of("decode"), cases.static_arguments(ALL["decode"])
    with pytest.raises(ValueError, match=r"backend is 'fa4'; it must be one of reference, triton"):
        paged_attention(**inputs, **static, backend="fa4")
    with pytest.raises(ValueError, match=r"3 query heads over 2 KV heads"):
        paged_attention(**inputs | {"q": inputs["q"][:, :3]}, **static, backend="reference")
    with pytest.raises(ValueError, match=r"q is torch.float16, the caches torch.float32"):
        paged_attention(**inputs | {"q": inputs["q"].half()}, **static, backend="reference")
    with pytest.raises(ValueError, match=r"must be \[B, M\], \[B \+ 1\] and \[B\]"):
        paged_attention(**inputs | {"context_lens": inputs["context_lens"][:2]}, **static, backend="reference")
    with pytest.raises(ValueError, match=r"must be \[T, N, D\] and twice \[P, S, K, D\]"):
        paged_attention(**inputs | {"q": inputs["q"][..., :8]}, **static, backend="reference")


def test_cpu_needs_no_metadata_and_runs_the_reference():
    inputs = inputs_of("decode")
    assert default_backend("cpu", torch.bfloat16, 128) == "reference"
    made = attention_metadata(
        inputs["context_lens"], inputs["cu_seqlens_q"], num_tokens=3, num_heads=4, num_kv_heads=2, head_dim=16,
        block_size=4, max_blocks=10, max_seqlen_q=1, dtype=torch.float32, backend="reference",
    )  # fmt: skip
    assert made is None


def test_decode_tiling_by_pairs_of_a_sequence_and_a_head():
    for head_dim, wide, narrow in ((128, 64, 32), (256, 32, 16)):
        for batch, tiling in {
            1: (narrow, 2, 3, 128, 4),
            64: (narrow, 2, 3, 128, 4),
            65: (wide, 4, 3, 128, 2),
            103: (wide, 4, 3, 128, 2),
            104: (narrow, 1, 4, 128, 4),
            128: (narrow, 1, 4, 128, 4),
            129: (narrow, 1, 3, 128, 4),
        }.items():
            assert decode_tiling(torch.bfloat16, head_dim, batch, 8) == tiling
    assert decode_tiling(torch.bfloat16, 512, 104, 8) == (16, 1, 3, 128, 4)  # four stages would take 128 KB
    assert decode_tiling(torch.float32, 64, 103, 8) == (64, 4, 2, 64, 4)
    assert decode_tiling(torch.float32, 64, 104, 8) == (32, 4, 3, 64, 4)


def test_many_sequences_of_short_contexts_run_direct():
    assert runs_direct(104, 8, 4096)
    assert not runs_direct(103, 8, 100) and not runs_direct(104, 8, 4097)


@pytest.mark.parametrize("batch", [1, 64, 65, 103, 104, 128, 129, 300])
def test_a_plan_has_room_for_the_items_of_every_tiling(batch):
    """Its size names no tiling: nothing that a traced step does may depend on where the batch lies among them."""
    for dtype in (torch.float32, torch.bfloat16):
        items = max_items(batch, 8, torch.device("cpu"), decode_tiling(dtype, 128, batch, 8).programs)
        assert plan_size(batch, 8, torch.device("cpu")) >= HEADER + items + batch + batch * 8


def test_strides_in_order():
    odd = torch.arange(5).as_strided((5, 1), (1, 7))  # contiguous, as one column's stride moves nothing
    assert odd.is_contiguous() and in_order(odd).stride() == (1, 1)
    assert in_order(odd).data_ptr() == odd.data_ptr() and torch.equal(in_order(odd), odd)
    turned = torch.arange(6).view(2, 3).t()
    assert in_order(turned).stride() == (2, 1) and torch.equal(in_order(turned), turned)
    assert in_order(torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("max_seqlen_q", [1, 2])
def test_flash_attention_3_gets_strides_in_order(max_seqlen_q, monkeypatch):
    """It looks at the stride of a single column of block tables, which Inductor may make anything."""
    given = []
    flash = SimpleNamespace(fwd=lambda q, k, v, **named: given.append((q, named["page_table"])))
    monkeypatch.setattr(attention_flash, "_fa3", lambda: flash)
    monkeypatch.setattr(attention_flash, "zero_tail", lambda out, ends: None)
    tokens = 3 * max_seqlen_q
    q = torch.zeros(tokens * 16, dtype=torch.bfloat16).as_strided((tokens, 1, 16), (16, 5, 1))
    tables = torch.arange(3, dtype=torch.int32).as_strided((3, 1), (1, 4))
    cache, ends = torch.zeros(4, 8, 1, 16).bfloat16(), torch.arange(4, dtype=torch.int32) * max_seqlen_q
    lengths = torch.full((3,), 2, dtype=torch.int32)
    attention_flash.paged_attention_fa3(q, cache, cache, tables, ends, lengths, max_seqlen_q=max_seqlen_q, scale=1.0)
    ((query, page_table),) = given
    assert page_table.stride() == (1, 1) and torch.equal(page_table, tables)
    assert query.stride()[-2:] == (16, 1)


@pytest.mark.compiled
def test_flash_and_plan_ops_trace_with_fake_sizes():
    """What a GPU step traces, on fake CUDA tensors: no device, no flash-attn, no triton launch."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        lengths = torch.empty(5, dtype=torch.int32)
        made = torch.ops.fnllm.fa3_metadata(lengths, 16, 8, 128, 64, 10, torch.bfloat16, 0)
        assert made.shape == (1 + 8 * 4,) and made.dtype == torch.int32
        windowed = torch.ops.fnllm.fa3_metadata(lengths, 16, 8, 128, 64, 10, torch.bfloat16, 100)
        assert windowed.shape == (1 + 8 * 3,)
        plan = torch.ops.fnllm.decode_plan(lengths, torch.empty(6, dtype=torch.int32), 4, 16, torch.float32, 0, 300)
        assert plan.shape == (4 + (5 + 8) + 5 + 5 * 4,)
