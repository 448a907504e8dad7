"""Loading on a CUDA device: through pinned buffers, in the stored dtype or converted on the device."""

import pytest
import torch

from fnllm_weights import ModelConfig, Params, init, load, load_with_report, save
from fnllm_weights import read as reading
from fnllm_weights.params import walk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3-odd", "llama-tiny", "qwen3-moe-mixed", "qwen3-untied-sharded"])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 3])
def test_equal_to_the_cpu_on_every_rank(oracle, name, dtype, size, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK", 1000)
    for rank in range(size):
        gpu = load(oracle / name, device="cuda", dtype=dtype, rank=rank, size=size)
        assert gpu.tree["embed"].dtype == getattr(torch, dtype or gpu.config.dtype)
        cpu = load(oracle / name, device="cpu", dtype=gpu.tree["embed"].dtype, rank=rank, size=size)
        assert gpu.tree["embed"].device == torch.device("cuda", torch.cuda.current_device())
        for (path, one), (_, other) in zip(walk(gpu.tree), walk(cpu.tree), strict=True):
            assert torch.equal(one.cpu(), other), path


@pytest.mark.slow
def test_eight_billion_parameters_from_the_page_cache(tmp_path):
    """Shapes of Qwen3-8B in bfloat16: under five seconds to the device."""
    config = ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=151936, hidden_size=4096, intermediate_size=12288,
        num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, qk_norm=True,
        max_position_embeddings=40960, dtype="bfloat16",
    )  # fmt: skip
    tree = init(config, device="cuda")
    save(Params(config, None, tree), tmp_path)
    load_with_report(tmp_path, device="cuda")
    params, report = load_with_report(tmp_path, device="cuda")
    print(report)
    assert torch.equal(params.tree["layers"][35]["down"], tree["layers"][35]["down"])
    assert report.seconds < 5
