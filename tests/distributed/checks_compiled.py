"""What two ranks check of the compiled step: its tokens are those of one rank's eager step."""

from pathlib import Path

import fnllm

ORACLE = Path(__file__).parents[1] / "oracle"
PROMPTS = [[24, 3, 8], [97, 128, 112]]  # of one length, so that each kind of step is compiled for one size
SAMPLING = fnllm.Sampling(temperature=0, max_tokens=20, ignore_eos=True)


def tokens(compile: str) -> list[tuple[int, ...]]:
    params = fnllm.load(ORACLE / "qwen3-odd")
    options = {"compile": compile, "num_blocks": 32, "max_num_seqs": 4, "block_size": 4}
    return [c.token_ids for c in fnllm.generate(params, PROMPTS, SAMPLING, **options)]


def on_one_rank(size: int) -> list:
    return tokens("none")


def check_fault_76_compiled_ranks_give_the_tokens_of_one_eager_rank(expected: list) -> None:
    assert tokens("inductor") == expected
