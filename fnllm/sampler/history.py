"""The tokens that rows have so far, as penalties and `logits_fn` need them, and the penalties."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fnllm.sampler.rows import SamplerRows


class History(NamedTuple):
    """Each row's tokens so far: `tokens[r, :lengths[r]]`, of which the first `prompt_lengths[r]` are the prompt.

    The ids are kept rather than counts over the vocabulary: one state serves every rank and every use, and a row that
    joins or forks copies L ids and not V counts.
    """

    tokens: Int[Tensor, "R L"]
    prompt_lengths: Int[Tensor, " R"]
    lengths: Int[Tensor, " R"]


def empty_history(n: int, capacity: int, device: torch.device | str = "cpu") -> History:
    """`n` rows without tokens, with room for `capacity` each."""
    lengths = torch.zeros(n, dtype=torch.int64, device=device)
    return History(torch.zeros(n, capacity, dtype=torch.int32, device=device), lengths, lengths.clone())


def take_history(history: History, index: Int[Tensor, " B"]) -> History:
    """The rows of `index`, in its order."""
    return History(*(values[index] for values in history))


def update_history(
    history: History, rows: Int[Tensor, " B"], ids: Int[Tensor, " B"], accept: Bool[Tensor, " B"]
) -> History:
    """A new history in which each row of `rows` has its token of `ids` appended where `accept`.

    `rows` may name a row twice or be negative where `accept` is False (padding). A full row keeps its tokens.
    """
    rows = rows.clamp(min=0)
    end = history.lengths[rows]
    accept = accept & (end < history.tokens.shape[1])
    column = end.clamp(max=history.tokens.shape[1] - 1)
    # Added as differences: what is not accepted adds 0, so that padding cannot overwrite a row it happens to name.
    change = torch.where(accept, ids.to(history.tokens.dtype) - history.tokens[rows, column], 0)
    return history._replace(
        tokens=history.tokens.index_put((rows, column), change, accumulate=True),
        lengths=history.lengths.index_put((rows,), accept.to(history.lengths.dtype), accumulate=True),
    )


def token_counts(history: History, vocab_start: int, vocab: int) -> tuple[Int[Tensor, "R V"], Bool[Tensor, "R V"]]:
    """For ids from `vocab_start`: how often each was drawn, and whether it occurs at all (prompt included)."""
    rows, capacity = history.tokens.shape
    place = torch.arange(capacity, device=history.tokens.device)[None, :]
    local = history.tokens.long() - vocab_start
    here = (place < history.lengths[:, None]) & (local >= 0) & (local < vocab)
    # What does not count goes to one more column, which is cut off.
    occurs = torch.where(here, local, vocab)
    drawn = torch.where(here & (place >= history.prompt_lengths[:, None]), local, vocab)
    counts = torch.zeros(rows, vocab + 1, dtype=torch.int32, device=local.device)
    seen = torch.zeros(rows, vocab + 1, dtype=torch.bool, device=local.device)
    return (
        counts.scatter_add(1, drawn, torch.ones_like(drawn, dtype=torch.int32))[:, :vocab],
        seen.scatter(1, occurs, True)[:, :vocab],
    )


def penalise(
    logits: Float[Tensor, "B V"], counts: Int[Tensor, "B V"], seen: Bool[Tensor, "B V"], rows: SamplerRows
) -> Float[Tensor, "B V"]:
    """Logits after the three penalties, in this order.

    Repetition (Keskar et al., CTRL, 2019; transformers' rule): ids that occur in prompt or output have a positive logit
    divided and a negative one multiplied. Presence and frequency (the OpenAI API's rule): ids drawn before lose
    `presence`, and `frequency` for each time.
    """
    repetition = rows.repetition_penalty[:, None]
    repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(seen, repeated, logits)
    logits = logits - rows.frequency_penalty[:, None] * counts
    return logits - rows.presence_penalty[:, None] * (counts > 0)
