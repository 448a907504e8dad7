"""The kernels on a CUDA device: against float64, over poison, in graphs, at pools past 2^31 elements, compiled."""

import importlib.util

import kernel_cases as cases
import pytest
import torch
from gpu_cases import BOUND, REAL, captured, fast_inputs, metadata_of

import fnllm
import fnllm_weights
from fnllm_kernels.attention import paged_attention
from fnllm_kernels.kv_store import copy_blocks, store_kv, store_kv_reference
from fnllm_kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm
from fnllm_kernels.qk_norm_rope_store import qk_norm_rope_store
from fnllm_kernels.silu_mul import silu_mul, silu_mul_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("unwritten_is_nan"),
]

SMALL = cases.DECODE | cases.PREFILL
ALL = SMALL | REAL
FLASH = [
    pytest.param(name, marks=pytest.mark.skipif(not importlib.util.find_spec(module), reason=f"needs {module}"))
    for name, module in (("fa3", "flash_attn_interface"), ("fa2", "flash_attn"))
]
FLOAT32 = ("decode-padded", "decode-head-dim-10", "decode-split", "mixed", "0.6B-decode-long", "8B-prefill-window")


def double(inputs):
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def want_of(inputs, static):
    return paged_attention(**double(inputs), **static, backend="reference").cpu()


def check(name, backend, dtype, poison, seed=0):
    inputs, static = fast_inputs(ALL[name], dtype, seed, poison), cases.static_arguments(ALL[name])
    want, used = want_of(inputs, static), int(inputs["cu_seqlens_q"][-1])
    for metadata in (None, metadata_of(inputs, static, backend)):
        out = paged_attention(**inputs, **static, backend=backend, metadata=metadata)
        error = cases.relative_error(out, want)
        assert error < BOUND[dtype], f"{error:.2e}, metadata {metadata is not None}"
        assert (out[used:] == 0).all()


@pytest.mark.parametrize("name", ALL)
def test_triton_bfloat16(name):
    check(name, "triton", torch.bfloat16, float("nan"))


@pytest.mark.parametrize("name", FLOAT32)
def test_triton_float32(name):
    check(name, "triton", torch.float32, float("nan"))


@pytest.mark.parametrize("name", ["decode-odd-heads", "8B-prefill"])
def test_triton_float16(name):
    check(name, "triton", torch.float16, float("nan"))


@pytest.mark.parametrize("name", ["decode", "mixed", "0.6B-decode", "8B-prefill"])
def test_triton_invariant(name):
    check(name, "triton_invariant", torch.bfloat16, float("nan"))


@pytest.mark.parametrize("backend", FLASH)
@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.head_dim % 8 == 0])
def test_flash(name, backend):
    if backend == "fa2" and ALL[name].block_size % 256:
        pytest.skip("fa2 takes pages of 256")
    # Finite poison: a page is read whole, and a weight of zero does not undo a NaN.
    check(name, backend, torch.bfloat16, 100.0)


@pytest.mark.parametrize("backend", FLASH)
def test_flash_refuses_what_it_cannot_take(backend):
    static = cases.static_arguments(ALL["decode-head-dim-10"])
    inputs = fast_inputs(ALL["decode-head-dim-10"], torch.bfloat16, 0, 0.0)
    with pytest.raises(ValueError, match="head_dim 10"):
        paged_attention(**inputs, **static, backend=backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(16, 8, 128), (8, 8, 64), (28, 4, 128)])
def test_invariant_form_gives_the_same_bits_in_any_batch_and_chunk(heads, kv_heads, head_dim, dtype):
    """Single queries too: which tiles of keys need a mask depends on where a chunk begins."""
    case = cases.AttentionCase(heads, kv_heads, head_dim, 16, ((400, 700), (1, 9), (37, 200)))
    inputs, static = fast_inputs(case, dtype, 5, float("nan")), cases.static_arguments(case)
    whole = paged_attention(**inputs, **static, backend="triton_invariant")
    for first, last in ((0, 130), (130, 131), (131, 400), *((i, i + 1) for i in range(0, 400, 7))):
        out = paged_attention(
            **inputs | {
                "q": inputs["q"][first:last],
                "block_tables": inputs["block_tables"][:1],
                "cu_seqlens_q": torch.tensor([0, last - first], dtype=torch.int32, device="cuda"),
                "context_lens": torch.tensor([300 + last], dtype=torch.int32, device="cuda"),
            },
            **static | {"max_seqlen_q": last - first},
            backend="triton_invariant",
        )  # fmt: skip
        assert torch.equal(out, whole[first:last])


@pytest.mark.parametrize("backend", ["triton", *FLASH[:1]])
@pytest.mark.parametrize("name", ["0.6B-decode", "0.6B-decode-long", "8B-prefill"])
def test_graph_captured_at_one_length_serves_others(backend, name):
    inputs, static = fast_inputs(ALL[name], torch.bfloat16, 1, 10.0), cases.static_arguments(ALL[name])
    true_lengths, true_cu = inputs["context_lens"].clone(), inputs["cu_seqlens_q"].clone()
    want = want_of(inputs, static)
    inputs["context_lens"].fill_(1)
    inputs["cu_seqlens_q"].copy_(torch.arange(len(true_cu), device="cuda").int())

    def step():
        return paged_attention(**inputs, **static, backend=backend, metadata=metadata_of(inputs, static, backend))

    graph, out = captured(step)
    inputs["context_lens"].copy_(true_lengths)
    inputs["cu_seqlens_q"].copy_(true_cu)
    for _ in range(3):
        graph.replay()
        assert cases.relative_error(out, want) < 1e-2


def test_pieces_combine_alike_every_time():
    """The last piece to end combines: an order that is wrong once in many runs shows here."""
    case = cases.AttentionCase(16, 8, 128, 16, tuple((1, 50 + 331 * i) for i in range(12)))
    inputs, static = fast_inputs(case, torch.bfloat16, 2, float("nan")), cases.static_arguments(case)
    metadata = metadata_of(inputs, static, "triton")
    first = paged_attention(**inputs, **static, backend="triton", metadata=metadata)
    assert cases.relative_error(first, want_of(inputs, static)) < 1e-2
    outs = [paged_attention(**inputs, **static, backend="triton", metadata=metadata) for _ in range(300)]
    assert all(torch.equal(out, first) for out in outs)


def test_pool_past_two_to_the_31_elements():
    shape = (2**31 // (16 * 8 * 128) + 8, 16, 8, 128)
    if torch.cuda.mem_get_info()[0] < 3 * 2 * 2**31:
        pytest.skip("needs 13 GB of free device memory")
    torch.use_deterministic_algorithms(False)  # filling the pool would take longer than the test
    k_cache, v_cache = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    k, v = torch.randn(2, 40, 8, 128, device="cuda").bfloat16()
    blocks = torch.tensor([shape[0] - 1, shape[0] - 3, shape[0] - 2], device="cuda")
    slots = (blocks[:, None] * 16 + torch.arange(16, device="cuda")).flatten()[:40]
    store_kv(k, v, k_cache, v_cache, slots)
    copy_blocks(k_cache, v_cache, blocks[1:2], torch.tensor([shape[0] - 5], device="cuda"))
    assert torch.equal(k_cache[shape[0] - 5], k[16:32]) and torch.equal(v_cache[shape[0] - 1], v[:16])
    small = {"k_cache": k.unsqueeze(1).double(), "v_cache": v.unsqueeze(1).double()}
    for queries in (1, 40):
        q = torch.randn(queries, 16, 128, device="cuda").bfloat16()
        lengths = torch.tensor([40], dtype=torch.int32, device="cuda")
        cu = torch.tensor([0, queries], dtype=torch.int32, device="cuda")
        static = {"max_seqlen_q": queries, "scale": 0.1}
        table = torch.arange(40, device="cuda").int()[None]
        want = paged_attention(q.double(), **small, block_tables=table, cu_seqlens_q=cu, context_lens=lengths, **static,
                               backend="reference").cpu()  # fmt: skip
        out = paged_attention(q, k_cache, v_cache, blocks.int()[None], cu, lengths, **static, backend="triton")
        assert cases.relative_error(out, want) < 1e-2


@pytest.mark.parametrize("shape", [(4, 2, 8), (9, 3, 24), (3, 1, 10), (16, 8, 128), (32, 8, 128)])
@pytest.mark.parametrize(("norm", "dtype"), [(True, torch.bfloat16), (True, torch.float32), (False, torch.bfloat16)])
def test_qk_norm_rope_store(shape, norm, dtype):
    for tokens in (1, 70):
        case = cases.rope_case(*shape, tokens, norm=norm, dtype=dtype, device="cuda", seed=tokens)
        want_q, want_k, want_v = cases.exact_rope_store(case)
        q = qk_norm_rope_store(*case)
        bound = 1e-5 if dtype == torch.float32 else 1e-2
        assert cases.relative_error(q, want_q) < bound
        assert cases.relative_error(case.k_cache, want_k) < bound
        assert torch.equal(case.v_cache.double().cpu(), want_v)
        assert ((case.k_cache == 7).cpu() == (want_k == 7)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [7, 1024, 5000])
def test_norms(dtype, width):
    x, residual = torch.randn(2, 37, width, device="cuda").to(dtype)
    weight = torch.randn(width, device="cuda").to(dtype)
    y, total = add_rms_norm(x, residual, weight, 1e-6)
    want_y, _ = add_rms_norm_reference(total.double(), torch.zeros_like(total).double(), weight.double(), 1e-6)
    assert torch.equal(total, x + residual)
    assert cases.relative_error(y, want_y.cpu()) < BOUND[dtype]
    assert torch.equal(rms_norm(total, weight, 1e-6), y)
    sliced = rms_norm(torch.cat([total, total], 1)[:, :width], weight, 1e-6)
    assert torch.equal(sliced, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [5, 3072])
def test_silu_mul(dtype, width):
    for tokens in (1, 70):
        gate_up = torch.randn(tokens, 2 * width, device="cuda").to(dtype) * 3
        want = silu_mul_reference(gate_up.double()).cpu()
        assert cases.relative_error(silu_mul(gate_up), want) < BOUND[dtype]


def test_fault_74_store_skips_padding():
    k_cache, v_cache = torch.randn(2, 9, 4, 3, 24, device="cuda")
    k, v = torch.randn(2, 5, 3, 24, device="cuda")
    slots = torch.tensor([5, -1, 0, -1, 35], dtype=torch.int32, device="cuda")
    want = k_cache.clone(), v_cache.clone()
    store_kv_reference(k, v, *want, slots)
    store_kv(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache, want[0]) and torch.equal(v_cache, want[1])


@pytest.mark.parametrize("backend", ["triton", *FLASH[:1]])
@pytest.mark.parametrize("name", ["0.6B-decode", "8B-prefill"])
def test_compiled_step_equals_eager(backend, name):
    inputs, static = fast_inputs(ALL[name], torch.bfloat16, 4, 10.0), cases.static_arguments(ALL[name])
    torch.use_deterministic_algorithms(False)

    def step(inputs):
        metadata = metadata_of(inputs, static, backend)
        out = paged_attention(**inputs, **static, backend=backend, metadata=metadata)
        return paged_attention(**inputs | {"q": out}, **static, backend=backend, metadata=metadata)

    assert torch.equal(torch.compile(step, fullgraph=True)(inputs), step(inputs))


@pytest.mark.parametrize("compile", ["none", "graphs"])
def test_norms_of_all_layers_as_columns_of_one_tensor(compile):
    """A stride between a vector's numbers is no error: tokens are those of norms that lie side by side."""
    config = fnllm_weights.ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=503, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=128, qk_norm=True,
    )  # fmt: skip
    tree = fnllm_weights.init(config, dtype="bfloat16", device="cuda")
    for weight in (weight for layer in tree["layers"] for weight in layer.values()):
        weight.normal_(std=0.1).add_(1 if weight.dim() == 1 else 0)
    params = fnllm.Params(config, None, tree, fnllm_weights.Shard(), {})
    layers = [dict(layer) for layer in params.tree["layers"]]
    for name in [name for name, x in layers[0].items() if x.dim() == 1]:
        columns = torch.stack([layer[name] for layer in layers], 1)
        for index, layer in enumerate(layers):
            layer[name] = columns[:, index]
    strided = params._replace(tree={**params.tree, "layers": layers}, workspace={})
    sampling = fnllm.Sampling(temperature=0, max_tokens=12, ignore_eos=True)
    options = {"compile": compile, "num_blocks": 32, "max_num_seqs": 4, "max_model_len": 64, "progress": False}
    for prompts in ([[3, 14, 15]], [[3, 14, 15], [9, 26, 53, 58, 9, 7]]):
        found, want = (fnllm.generate(one, prompts, sampling, **options) for one in (strided, params))
        assert [out.token_ids for out in found] == [out.token_ids for out in want]
