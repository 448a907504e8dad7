"""Refusals on two ranks: calls that differ, and errors of one rank, are refused on both, and both continue."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fnllm
from fnllm.distributed import least, world
from fnllm_weights import Shard

ORACLE = Path(__file__).parents[1] / "oracle"
PROMPTS = [[3, 1, 4], [1, 5]]
SAMPLING = fnllm.Sampling(temperature=0, max_tokens=3)


def on_one_rank() -> None:
    return None


def rank() -> int:
    return dist.get_rank()


def mine(zero, other):
    """A value that differs between the ranks."""
    return zero if rank() == 0 else other


def doubled(p, x, ctx):
    return 2 * fnllm.layers.mlp(p, x, ctx)


def check_calls_that_differ_are_refused_by_name_on_every_rank(expected: None) -> None:
    params = fnllm.load(ORACLE / "qwen3-odd")
    swapped = fnllm.Layers()._replace(mlp=doubled)
    cases = {
        "prompts": lambda: {"prompts": mine(PROMPTS, PROMPTS[::-1])},
        "sampling": lambda: {"sampling": mine(SAMPLING, replace(SAMPLING, max_tokens=4))},
        "seed": lambda: {"seed": mine(None, 7)},
        "layers": lambda: {"layers": mine(None, swapped)},
        "capture": lambda: {"capture": mine((), ("final_norm",))},
        "options": lambda: {"max_chunk": mine(None, 2)},
    }
    for name, changed in cases.items():
        arguments = {"prompts": PROMPTS, "sampling": SAMPLING, "num_blocks": 16, **changed()}
        with pytest.raises(ValueError, match=f"^{name} on rank 1 differ from rank 0's"):
            fnllm.generate(params, **arguments)
    # Nothing ran, and everything still does.
    first = fnllm.generate(params, PROMPTS, SAMPLING, num_blocks=16)
    again = fnllm.generate(params, PROMPTS, SAMPLING, num_blocks=16)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]


def check_scores_of_different_things_are_refused_by_name_on_every_rank(expected: None) -> None:
    params = fnllm.load(ORACLE / "qwen3-odd")
    cases = {
        "sequences": lambda: {"sequences": mine([[3, 1, 4]], [[3, 1, 5]])},  # of one length: the sums would meet
        "layers": lambda: {"layers": mine(None, fnllm.Layers()._replace(mlp=doubled))},
        "edits": lambda: {"edits": fnllm.steer("final_norm", torch.full((36,), mine(1.0, 2.0)))},
        "capture": lambda: {"capture": mine(None, "final_norm")},
        "options": lambda: {"numerics": mine("default", "batch_invariant")},
    }
    for name, changed in cases.items():
        with pytest.raises(ValueError, match=f"^{name} on rank 1 differ from rank 0's"):
            fnllm.score(params, **{"sequences": [[3, 1, 4]], **changed()})
    assert len(fnllm.score(params, [[3, 1, 4]])[0]) == 2


def check_what_the_ranks_did_before_must_be_equal(expected: None) -> None:
    params = fnllm.load(ORACLE / "qwen3-odd")
    fnllm.generate(params, PROMPTS, SAMPLING, num_blocks=16)
    (machine,) = params.workspace.values()
    machine.writes.clock += mine(0, 1)
    with pytest.raises(ValueError, match="^earlier calls on rank 1 differ"):
        fnllm.generate(params, PROMPTS, SAMPLING, num_blocks=16)


def check_a_wrong_argument_is_an_error_on_every_rank(expected: None) -> None:
    params = fnllm.load(ORACLE / "qwen3-odd")
    with pytest.raises(ValueError, match="outside the vocabulary"):
        fnllm.generate(params, [[5000]], SAMPLING, num_blocks=16)
    fnllm.generate(params, PROMPTS, SAMPLING, num_blocks=16)


def check_a_load_error_on_one_rank_reaches_all(expected: None) -> None:
    missing = str(ORACLE / "absent")
    with pytest.raises(ValueError, match=mine("rank 1 could not load: ValueError: .*absent", "^there is no folder")):
        fnllm.load(mine(ORACLE / "qwen3-odd", missing))
    with pytest.raises(ValueError, match="loaded another model"):
        fnllm.load(ORACLE / mine("qwen3-odd", "llama-tiny"))
    fnllm.load(ORACLE / "qwen3-odd")


def check_the_smallest_pool_counts_and_a_refusal_reaches_all(expected: None) -> None:
    params = fnllm.load(ORACLE / "qwen3-odd")
    tp, device = world(params.shard), params.tree["norm"].device

    def no_room() -> int:
        raise ValueError("no room")

    assert least(tp, device, lambda: 10 - rank()) == 9
    with pytest.raises(ValueError, match=mine("rank 1 refused", "no room")):
        least(tp, device, mine(lambda: 5, no_room))


def check_params_of_another_group_are_refused(expected: None) -> None:
    with pytest.raises(ValueError, match="shard 0 of 3, and this process is rank"):
        world(Shard(0, 3))


def check_the_way_to_sum_is_chosen_by_the_environment(expected: None) -> None:
    params = fnllm.load(ORACLE / "qwen3-odd")
    usual = world(params.shard)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FNLLM_ALL_REDUCE", "one_shot")
        one_shot = world(params.shard)
        assert one_shot != usual and isinstance(one_shot, fnllm.TensorParallel)
        for x in (torch.arange(12.0).reshape(3, 4), torch.zeros(0, 4)):  # on a CPU through the group
            assert torch.equal(one_shot.all_reduce(x), usual.all_reduce(x))
        patch.setenv("FNLLM_ALL_REDUCE", "ring")
        with pytest.raises(ValueError, match="must be one of group, one_shot, found 'ring'"):
            world(params.shard)


def check_a_gradient_between_ranks_is_refused_and_not_lost(expected: None) -> None:
    params = fnllm.load(ORACLE / "qwen3-odd")
    params.tree["norm"].requires_grad_()
    params.tree["layers"][0]["o"].requires_grad_()
    for numerics in ("default", "batch_invariant"):  # which sums by gathering
        with pytest.raises(ValueError, match="gradients do not pass between the ranks"):
            fnllm.score(params, [[3, 1, 4]], numerics=numerics)
    with torch.no_grad():
        assert len(fnllm.score(params, [[3, 1, 4]])[0]) == 2


def check_logits_that_are_nan_on_one_rank_fail_the_request_on_all(expected: dict) -> None:
    params = fnllm.load(ORACLE / "qwen3-odd")
    options = {"block_size": 4, "num_blocks": 32, "max_num_seqs": 4, "errors": "return"}
    greedy = fnllm.Sampling(temperature=0, max_tokens=5, ignore_eos=True)
    hurt = replace(greedy, logits_fn=nan_after_four)
    healthy, broken = fnllm.generate(params, [[5, 6], [7, 8]], [greedy, hurt], **options)
    assert len(healthy.token_ids) == 5 and len(broken.token_ids) == 2
    assert isinstance(broken.error, FloatingPointError), broken.error
    if dist.get_rank() == 1:
        params.tree["lm_head"][0, 0] = torch.nan
    (lost,) = fnllm.generate(params, [[5, 6]], greedy, **options)
    assert isinstance(lost.error, FloatingPointError) and not lost.token_ids


def nan_after_four(logits, history):
    return torch.where((history.lengths >= 4)[:, None], torch.nan, logits)
