"""The pass in compiled steps: how often it finds a product before a norm, the same results, and the cache on disk."""

import pytest
import torch
from examples_of import EXAMPLES
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.utils import fresh_cache
from tracing import traced_by, two_layers

import fnllm
import fnllm.compiled
import fnllm.layers
from fnllm.compiled import inductor_options
from fnllm.fusing import fuse_norms

pytestmark = pytest.mark.compiled
ORACLE = EXAMPLES.parent / "tests" / "oracle"
PROMPTS = [[3, 14, 15, 92, 65, 35, 89, 79, 33], [8, 9, 79], [31, 41, 59, 26, 53]]
GREEDY = fnllm.Sampling(temperature=0, max_tokens=4, ignore_eos=True)
OPTIONS = {"num_blocks": 64, "block_size": 4, "prefix_cache": False}


def fused_in(graph):
    return len(graph.find_nodes(op="call_function", target=torch.ops.fnllm.linear_add_rms_norm.default))


@pytest.fixture
def params(monkeypatch):
    """Two layers, run by the functions that a GPU runs."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    monkeypatch.setattr(fnllm.layers, "on_device", lambda x, ctx: ctx.cache is not None)
    monkeypatch.setattr(fnllm.layers, "add_rms_norm", torch.ops.fnllm.add_rms_norm)  # no op elsewhere on a CPU
    return two_layers(fnllm.load(ORACLE / "qwen3-tiny", device="cpu"))


@pytest.fixture
def counts(monkeypatch):
    """How many norms of each graph, in order of making, were fused; the graphs run without Inductor."""
    counts = []

    def lowered(module, example_inputs):
        fuse_norms(module.graph)
        module.recompile()
        counts.append(fused_in(module.graph))
        return make_boxed_func(module.forward)

    monkeypatch.setattr(torch, "compile", traced_by(aot_autograd(fw_compiler=lowered)))
    return counts


def call(params, **options):
    return fnllm.generate(params, PROMPTS, GREEDY, **{**OPTIONS, **options})


def doubled(x, ctx):
    return 2 * x


LOOKED_AT = "layers.0.mlp_out", "layers.0.q", "layers.1.resid_mid"


@pytest.mark.parametrize(
    ("prefill", "decode", "options"),
    [
        # In prefill the last layer's feed-forward runs for the tokens that pass the head, picked behind `o`.
        (3, 4, {}),
        (2, 2, {"capture": fnllm.Capture(LOOKED_AT)}),
        (2, 3, {"edits": fnllm.Edit("layers.0.attn_out", doubled)}),
    ],
    ids=["plain", "captures", "edits"],
)
def test_products_before_norms_are_fused_where_nobody_looks(params, counts, prefill, decode, options):
    eager = call(params, **options)
    compiled = call(params, compile="inductor", **options)
    assert counts[-2:] == [prefill, decode]  # an edit is tried alone before
    for a, b in zip(compiled, eager, strict=True):
        assert a.token_ids == b.token_ids
        for site, x in (a.captured or {}).items():
            torch.testing.assert_close(x, b.captured[site], rtol=1e-5, atol=1e-5)


def test_inductor_fuses_and_finds_the_graph_on_disk_again(monkeypatch):
    found = []

    def seen(graph):
        fuse_norms(graph)
        found.append(fused_in(graph))

    monkeypatch.setattr(fnllm.compiled, "fuse_norms", seen)
    w, weight = torch.randn(8, 6), torch.randn(8)

    def separate(x, w, residual, weight):
        product = torch.ops.fnllm.small_linear(x, w, None, None, False, True)
        return torch.ops.fnllm.add_rms_norm(product, residual, weight, 1e-5)

    def compiled():
        torch._dynamo.reset()
        function = torch.compile(separate, fullgraph=True, dynamic=False, options=inductor_options())
        for rows in (5, 3):
            x, residual = torch.randn(rows, 6), torch.randn(rows, 8)
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(residual, 0)
            assert all(map(torch.equal, function(x, w, residual, weight), separate(x, w, residual, weight)))

    with torch.no_grad(), fresh_cache():
        compiled()
        assert found == [1]
        compiled()
        assert found == [1]  # by the cache, though the options were made anew
