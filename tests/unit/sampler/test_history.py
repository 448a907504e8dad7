"""Histories and penalties: against transformers, by hand, and under padding."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor
from unit.sampler.settings import Settings

from fnllm.sampler import (
    History,
    SamplerFeatures,
    default_rows,
    empty_history,
    features_of,
    rows_from_sampling,
    sample,
    take_history,
    token_counts,
    update_history,
)
from fnllm.sampler.history import penalise
from fnllm.tensor_parallel import simulate

torch.set_num_threads(1)


def history_of(prompts, outputs, capacity=12):
    history = empty_history(len(prompts), capacity)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        ids = torch.tensor(prompt + output, dtype=torch.int32)
        history.tokens[row, : len(ids)] = ids
        history.prompt_lengths[row], history.lengths[row] = len(prompt), len(ids)
    return history


def test_repetition_penalty_equals_transformers():
    torch.manual_seed(0)
    logits, prompts, outputs = torch.randn(2, 10), [[1, 2, 2], [4]], [[3, 1], [5, 5, 6, 0]]
    counts, seen = token_counts(history_of(prompts, outputs), 0, 10)
    rows = default_rows(2)._replace(repetition_penalty=torch.tensor([1.7, 1.7]))
    got = penalise(logits, counts, seen, rows)
    for row in range(2):
        ids = torch.tensor([prompts[row] + outputs[row]])
        want = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits[row : row + 1].clone())
        torch.testing.assert_close(got[row : row + 1], want)


def test_presence_and_frequency_count_drawn_tokens_only():
    counts, seen = token_counts(history_of([[1, 2, 2]], [[3, 1, 3]]), 0, 5)
    assert counts.tolist() == [[0, 1, 0, 2, 0]] and seen.tolist() == [[False, True, True, True, False]]
    rows = default_rows(1)._replace(presence_penalty=torch.tensor([0.5]), frequency_penalty=torch.tensor([0.25]))
    assert penalise(torch.zeros(1, 5), counts, seen, rows).tolist() == [[0.0, -0.75, 0.0, -1.0, 0.0]]


def test_counts_of_a_slice_are_the_slice_of_the_counts():
    history = history_of([[1, 2, 2], [9]], [[3, 1, 9], [8, 8]])
    counts, seen = token_counts(history, 0, 10)
    for start in (0, 4, 8):
        part_counts, part_seen = token_counts(history, start, 4)
        width = min(4, 10 - start)
        assert torch.equal(part_counts[:, :width], counts[:, start : start + width])
        assert torch.equal(part_seen[:, :width], seen[:, start : start + width])
        assert not part_counts[:, width:].any()


def test_update_appends_where_accepted_and_padding_touches_nothing():
    history = history_of([[1, 2, 6], [3], [4]], [[], [5, 5], []], capacity=4)
    before = [x.clone() for x in history]
    rows = torch.tensor([1, 0, 0, -1, 2])
    accept = torch.tensor([True, True, False, False, False])
    after = update_history(history, rows, torch.tensor([7, 8, 9, 9, 9]), accept)
    assert after.tokens.tolist() == [[1, 2, 6, 8], [3, 5, 5, 7], [4, 0, 0, 0]] and after.lengths.tolist() == [4, 4, 1]
    assert after.prompt_lengths.tolist() == [3, 1, 1]
    full = update_history(after, torch.tensor([0]), torch.tensor([6]), torch.tensor([True]))
    assert all(torch.equal(x, y) for x, y in zip(full, after, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(history, before, strict=True))
    assert take_history(after, torch.tensor([2, 0])).tokens.tolist() == [[4, 0, 0, 0], [1, 2, 6, 8]]


def test_sample_with_penalties_and_history_in_the_hook():
    logits = torch.tensor([[2.0, 1.9, 0.0, -1.0]]).repeat(3, 1)

    def not_the_last(z, history: History):
        last = history.tokens.gather(1, history.lengths[:, None] - 1).long()
        return z.scatter(1, last, -torch.inf)

    settings = [
        Settings(temperature=0, repetition_penalty=1.5),
        Settings(temperature=0),
        Settings(temperature=0, logits_fn=not_the_last),
    ]
    features = features_of(settings)
    rows = rows_from_sampling(settings, features=features)
    history = history_of([[0], [0], [3, 0]], [[], [], [1, 0]])
    out = sample(logits, rows, torch.full((3,), 4), features=features, vocab_limit=4, history=history)
    assert out.ids.tolist() == [1, 0, 1]

    def local(tp, z):
        return sample(
            z, rows, torch.full((3,), 4), features=features, vocab_limit=4, history=history,
            vocab_start=2 * tp.rank, tp=tp,
        ).ids  # fmt: skip

    assert all(ids.tolist() == [1, 0, 1] for ids in simulate(2, local, logits.chunk(2, 1)).results)
    with pytest.raises(ValueError, match="needs history"):
        sample(logits, rows, torch.arange(3), features=SamplerFeatures(penalties=True), vocab_limit=4)
