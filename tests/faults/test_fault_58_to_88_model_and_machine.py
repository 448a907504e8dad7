"""Reported faults of the model functions, compiled steps, memory sizing and installation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import NAMES, ORACLE, checkpoint, golden, greedy, plain_greedy, tiny
from tracing import traced_by

import fnllm
from fnllm.buckets import ladder, round_up
from fnllm.cache import blocks_that_fit
from fnllm.layers import Layers, add_norm, norm
from fnllm.rope import make_rope
from fnllm.scoring import context, packed_batch
from fnllm_weights.params import walk

ROOT = Path(__file__).parents[2]
SIZES = {"num_blocks": 60, "block_size": 4, "max_model_len": 64}


@pytest.mark.parametrize("name", NAMES)
def test_fault_58_no_layer_function_changes_its_arguments(name):
    """In float32 a cast is no copy, so a norm that works in place would write over the residual."""
    params = checkpoint(name)
    ids = golden(name)["p17"]["prompt"]
    batch = packed_batch(torch.tensor(ids), [len(ids)], make_rope(params.config, torch.device("cpu")))
    weights = {path: leaf.clone() for path, leaf in walk(params.tree)}

    def watched(function):
        def call(p, x, *rest):
            tensors = [x, *(y for y in rest if isinstance(y, torch.Tensor))]
            before = [y.clone() for y in tensors]
            y = function(p, x, *rest)
            assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True)), function
            return y

        return call

    layers = Layers(*(watched(f) if f is not Layers().attend and f is not Layers().activation else f for f in Layers()))
    with torch.no_grad():
        fnllm.forward(params.tree, context(params, batch, layers))
    assert all(torch.equal(leaf, weights[path]) for path, leaf in walk(params.tree))


def test_fault_58_the_stream_survives_its_norm():
    ctx = context(tiny(), packed_batch(torch.tensor([3]), [1], make_rope(tiny().config, torch.device("cpu"))), Layers())
    weight, x, residual = torch.randn(24), torch.randn(5, 24), torch.randn(5, 24)
    kept = x.clone(), residual.clone()
    normed, stream = add_norm(weight, x, residual, ctx)
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1]) and torch.equal(stream, x + residual)
    assert torch.equal(normed, norm(weight, stream, ctx))


@pytest.mark.parametrize("largest", [5, 20])
def test_fault_73_every_batch_size_has_a_bucket(largest):
    sizes = ladder(largest)
    assert [round_up(size, sizes) >= size for size in range(1, largest + 1)] == [True] * largest
    assert sizes[-1] == largest
    done = fnllm.generate(tiny(), [[3 + i % 30] for i in range(largest)], greedy(2), max_num_seqs=largest, **SIZES)
    assert all(one.token_ids == plain_greedy(tiny(), [3 + i % 30], 2) for i, one in enumerate(done))


def test_fault_77_the_head_sees_one_row_for_each_sequence():
    rows = []

    def counting(p, x, ctx):
        rows.append(x.shape[0])
        return fnllm.layers.lm_head(p, x, ctx)

    layers = Layers()._replace(lm_head=counting)
    prompts = [[3 + i % 30 for i in range(50)], [4, 5]]
    for _ in range(2):
        rows.clear()  # what a trial of the swapped function saw at first
        fnllm.generate(tiny(), prompts, greedy(4), layers=layers, max_num_seqs=3, prefix_cache=False, **SIZES)
    assert rows == [2, 2, 2, 2]


def test_fault_86_pool_sizes_from_figures():
    figures = {"total": 1000, "reserve": 100, "utilization": 0.9, "per_block": 10}
    assert blocks_that_fit(free=1000, needed=500, **figures) == 80
    assert blocks_that_fit(free=1000, needed=50, **figures) == 50, "no more than the load can fill"
    assert blocks_that_fit(free=400, needed=500, **figures) == 20, "what others hold counts as used"
    for free in (0, 100, 200):
        with pytest.raises(ValueError, match="(?s)no room.*num_blocks"):
            blocks_that_fit(free=free, needed=500, **figures)


def test_fault_86_an_explicit_number_of_blocks_wins(monkeypatch):
    monkeypatch.setattr("fnllm.machine.host_memory", lambda: 0)
    params = tiny(9)
    with pytest.raises(ValueError, match="no room"):
        fnllm.engine(params, max_num_seqs=3, max_model_len=64)
    assert fnllm.engine(params, max_num_seqs=3, **SIZES).machine.num_blocks == 60


def test_fault_87_no_kernel_package_is_needed():
    """Triton and every FlashAttention package are hidden from a fresh process, which then generates."""
    script = f"""
import sys
for name in ("triton", "flash_attn", "flash_attn_interface", "flash_attn_3", "flashinfer"):
    sys.modules[name] = None
import fnllm, fnllm_kernels, fnllm_weights
params = fnllm.load({str(ORACLE / "qwen3-tiny")!r}, device="cpu")
one = fnllm.generate(params, {golden("qwen3-tiny")["p5"]["prompt"]}, fnllm.Sampling(temperature=0, max_tokens=4,
                     ignore_eos=True), max_num_seqs=2, max_model_len=64)[0]
print(list(one.token_ids))
"""
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "weights"))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(golden("qwen3-tiny")["p5"]["greedy"][:4])


@pytest.mark.parametrize("cache", [True, False])
def test_fault_88_the_prefix_cache_has_a_switch(cache):
    prompt = list(range(3, 15))
    params = tiny(10)
    done = [fnllm.generate(params, prompt, greedy(2), prefix_cache=cache, max_num_seqs=2, **SIZES)[0] for _ in range(2)]
    assert [one.cached_tokens for one in done] == [0, 8 if cache else 0]


@pytest.mark.compiled
def test_fault_20_34_71_compiled_steps_agree_and_are_few(monkeypatch):
    """Lengths and batch sizes of all kinds, greedy beside drawn rows, up to the longest length: eager and traced.

    The compiler's backend "eager" traces as Inductor does and leaves out the code generation, which takes minutes.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", traced_by("eager"))
    params = tiny(11, num_hidden_layers=1)
    options = {"block_size": 4, "max_model_len": 16, "max_num_seqs": 5, "num_blocks": 20}
    temperatures = (0, 1.0, 0, 0, 0.7)
    settings = [fnllm.Sampling(temperature=t, max_tokens=10, ignore_eos=True, seed=3) for t in temperatures]
    prompts = [[3 + i for i in range(length)] for length in (14, 3, 6, 16, 1)]
    for batch in (5, 1, 3, 2, 4):
        chosen = prompts[:batch], settings[:batch]
        one, other = (fnllm.generate(params, *chosen, compile=mode, **options) for mode in ("inductor", "none"))
        assert [x.token_ids for x in one] == [x.token_ids for x in other]
        assert (len(one[0].token_ids), one[0].finish_reason) == (2, "length")
        assert one[0].token_ids == plain_greedy(params, prompts[0], 2)
    assert counters["stats"]["unique_graphs"] <= 8, "decode and prefill, one sequence or more, with draws or without"
