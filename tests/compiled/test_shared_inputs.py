"""Tensors that a compiled step computes for all layers are written once, and not once for each op that reads them."""

import ast

import pytest
import torch
from examples_of import EXAMPLES
from torch._inductor.utils import fresh_cache, run_and_get_code
from tracing import two_layers

import fnllm
import fnllm.layers
import fnllm.options
from fnllm_kernels import decode_attention, kv_store

pytestmark = pytest.mark.compiled
ORACLE = EXAMPLES.parent / "tests" / "oracle"
# The arguments that all layers share, by their place in the op's call.
SHARED = {
    "paged_attention": (3, 4, 5),
    "qk_norm_rope_store": (4, 5, 8),
    "qk_norm_rope_attention": (4, 5, 8, 9, 10, 11),
}


def shared_buffers(code, op):
    """For each call of the op in the code, the buffers of the arguments that layers share."""
    name = f"torch.ops.fnllm.{op}.default"
    lines = [ast.parse(line.strip()) for line in code.splitlines() if f"{name}(" in line and "#" not in line]
    calls = [node for line in lines for node in ast.walk(line) if isinstance(node, ast.Call)]
    return [
        tuple(ast.unparse(call.args[place]) for place in SHARED[op]) for call in calls if ast.unparse(call.func) == name
    ]


def code_of_steps(prompts):
    """The code that Inductor makes for two layers' prefill and decode steps."""
    params = two_layers(fnllm.load(ORACLE / "qwen3-tiny", device="cpu"))
    greedy = fnllm.Sampling(temperature=0, max_tokens=3, ignore_eos=True)
    options = {"compile": "inductor", "attention": "triton", "num_blocks": 64, "block_size": 4}
    with fresh_cache():
        return run_and_get_code(fnllm.generate, params, prompts, greedy, **options)[1]


def test_layers_share_what_a_step_works_out(monkeypatch):
    torch.set_num_threads(1)
    torch._dynamo.reset()
    monkeypatch.setattr(fnllm.options, "BACKENDS_ON_CPU", ("triton",))
    monkeypatch.setattr(fnllm.layers, "on_device", lambda x, ctx: ctx.cache is not None)  # as on a GPU
    codes = code_of_steps([[3, 14, 15], [9, 26]])
    for op in SHARED:
        found = [calls for code in codes if (calls := shared_buffers(code, op))]
        assert found and all(len(calls) == 2 and len(set(calls)) == 1 for calls in found), (op, found)


def test_ops_of_single_tokens_and_swapped_layers_share_too():
    for op in (decode_attention._decode_attention, kv_store._store_kv_op):
        assert torch.Tag.flexible_layout in op._opoverload.tags
