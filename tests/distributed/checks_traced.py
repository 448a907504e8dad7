"""Checks of the compiled step on four ranks, traced whole and run as torch's own operations.

FNLLM_TEST_INDUCTOR=traced does it for all checkpoints. On most days it is the one whose heads and vocabulary four ranks
do not divide: in the others' steps only sizes differ from those that two ranks trace.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import checks_open
from checks_compiled import WANTED, as_traced, short
from checks_equal import CHECKPOINTS

CHOSEN = CHECKPOINTS if "traced" in WANTED else ["qwen3-odd"]


def on_one_rank() -> dict:
    return {name: short(name, "none") for name in CHOSEN}


def check_fault_76_traced_ranks_give_the_tokens_of_one_eager_rank(expected: dict) -> None:
    with as_traced():
        for name, one in expected.items():
            checks_open.expect(short(name, "inductor"), one, name)
