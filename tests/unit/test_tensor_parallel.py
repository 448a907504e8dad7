"""The exchanges of fnllm.tensor_parallel: simulated ranks and counting; on gloo, tests/distributed checks them."""

import sys

import pytest
import torch

from fnllm.tensor_parallel import SINGLE, Call, Ordered, TensorParallel, counting, process_group_tp, simulate

torch.set_num_threads(1)


def linear_pair(tp, x, up, down):
    """Column-parallel then row-parallel: one all-reduce."""
    return tp.all_reduce((x @ up.T).relu() @ down.T)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sharded_linear_pair_equals_the_whole(size):
    torch.manual_seed(0)
    x, up, down = torch.randn(5, 8), torch.randn(12, 8), torch.randn(8, 12)
    whole = linear_pair(SINGLE, x, up, down)
    results, calls = simulate(size, linear_pair, [x] * size, up.chunk(size, 0), down.chunk(size, 1))
    for result in results:
        torch.testing.assert_close(result, whole)
        assert torch.equal(result, results[0])
    assert calls == [Call("all_reduce", (5, 8))]


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_simulated_gather_concatenates_in_rank_order(dim):
    parts = [torch.full((2, 3, 5), float(r)) for r in range(3)]
    results, calls = simulate(3, lambda tp, x: tp.all_gather(x, dim), parts)
    for result in results:
        assert torch.equal(result, torch.cat(parts, dim))
    assert calls == [Call("all_gather", (2, 3, 5))]


def test_simulated_max_and_arguments_unchanged():
    parts = [torch.tensor([1, 9, 3]), torch.tensor([4, 2, 3])]
    before = [p.clone() for p in parts]
    results, _ = simulate(2, lambda tp, x: (tp.all_reduce_max(x), tp.all_reduce(x)), parts)
    assert results[0][0].tolist() == [4, 9, 3] and results[1][1].tolist() == [5, 11, 6]
    assert all(torch.equal(p, b) for p, b in zip(parts, before, strict=True))


def test_ordered_sums_are_of_every_rank_in_their_order():
    parts = [torch.tensor([1e8, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([-1e8, 4.0])]
    for result in simulate(3, lambda tp, x: Ordered(tp).all_reduce(x), parts).results:
        assert result.tolist() == [0, 7], "1e8 takes the 1 up; the other way round it would be left"


def test_counting_notes_kind_and_shape_through_one_rank():
    tp = counting(SINGLE)
    assert isinstance(tp, TensorParallel) and isinstance(SINGLE, TensorParallel)
    tp.all_reduce(torch.zeros(2, 3))
    tp.all_gather(torch.zeros(4))
    tp.all_reduce_max(torch.zeros(()))
    assert tp.calls == [Call("all_reduce", (2, 3)), Call("all_gather", (4,)), Call("all_reduce_max", ())]
    assert hash(tp) != hash(counting(SINGLE)) and hash(SINGLE) == hash(SINGLE)


def test_simulation_keeps_the_grad_mode_of_the_caller():
    with torch.no_grad():
        assert simulate(2, lambda tp: torch.is_grad_enabled()).results == [False, False]
    with torch.inference_mode():
        assert simulate(2, lambda tp: torch.is_inference_mode_enabled()).results == [True, True]
    assert simulate(2, lambda tp: torch.is_grad_enabled()).results == [True, True]


def test_the_first_error_of_a_rank_is_raised_and_no_rank_waits():
    def fails_on_one(tp):
        tp.all_reduce(torch.zeros(1))
        if tp.rank == 1:
            raise KeyError("rank 1")
        return tp.all_reduce(torch.zeros(1))

    with pytest.raises(KeyError, match="rank 1"):
        simulate(3, fails_on_one)


@pytest.mark.parametrize("size", [1, 2])
def test_an_exit_or_a_failed_test_of_a_rank_is_raised_too(size):
    with pytest.raises(SystemExit):
        simulate(size, lambda tp: sys.exit(3))
    with pytest.raises(pytest.fail.Exception):
        simulate(size, lambda tp: pytest.fail("no exception to Python"))


def test_ranks_that_disagree_are_an_error_not_a_wait():
    with pytest.raises(ValueError, match="different collective calls"):
        simulate(2, lambda tp: tp.all_reduce(torch.zeros(2 + tp.rank)))
    with pytest.raises(ValueError, match="different collective calls"):
        simulate(2, lambda tp: (tp.all_reduce if tp.rank else tp.all_reduce_max)(torch.zeros(2)))
    with pytest.raises(ValueError, match="ended before exchange 0"):
        simulate(2, lambda tp: tp.all_reduce(torch.zeros(2)) if tp.rank else None)
    with pytest.raises(ValueError, match="holds 1 values for size=2"):
        simulate(2, lambda tp, x: x, [torch.zeros(1)])


def test_process_group_needs_torch_distributed():
    with pytest.raises(RuntimeError, match="init_process_group"):
        process_group_tp()
