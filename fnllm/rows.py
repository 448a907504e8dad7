"""Writing the running rows on the device (effect): when sequences join and when their block tables grow."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fnllm.batch import Rows
from fnllm.edits import Channel, Edit, placed
from fnllm.sampler import SamplerRows, default_rows, empty_history
from fnllm.scheduler import Join
from fnllm.taps import Choice


def empty_rows(max_num_seqs: int, max_blocks: int, max_model_len: int, device: torch.device) -> Rows:
    """Empty rows, and the scratch row after them."""
    count = max_num_seqs + 1

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    # A logits_fn sees all rows of a batch. One that nobody looks back to holds a token of no meaning, so that the last
    # one can be looked up in every row.
    one = torch.ones(count, dtype=torch.int64, device=device)
    history = empty_history(count, max_model_len, device)._replace(lengths=one, prompt_lengths=one.clone())
    return Rows(
        length=zeros(count),
        last_token=zeros(count, dtype=torch.int64),
        prompt_length=zeros(count),
        block_table=zeros(count, max_blocks),
        sampler=default_rows(count, device),
        history=history,
    )


def write_joins(
    rows: Rows,
    joins: Sequence[Join],
    prompt_lengths: Sequence[int],
    sampler: SamplerRows,
    histories: Sequence[Sequence[int]],
) -> None:
    """Overwrite whole rows, one for each sequence that joins.

    `sampler` holds their settings on the host; `histories` their known tokens, empty for those that never look back.
    """
    device = rows.length.device
    tables = np.zeros((len(joins), rows.block_table.shape[1]), dtype=np.int32)
    for index, join in enumerate(joins):
        tables[index, : len(join.block_table)] = join.block_table

    def sent(values: Sequence[int], dtype: torch.dtype) -> Tensor:
        return send(torch.tensor(values, dtype=dtype, device="cpu"), device)

    where = sent([join.row for join in joins], torch.int64)
    rows.length.index_copy_(0, where, sent([join.length for join in joins], torch.int32))
    rows.prompt_length.index_copy_(0, where, sent(prompt_lengths, torch.int32))
    rows.block_table.index_copy_(0, where, send(torch.from_numpy(tables), device))
    for field, values in zip(rows.sampler, sampler, strict=True):
        field.index_copy_(0, where, send(values, device))
    for join, tokens, prompt_length in zip(joins, histories, prompt_lengths, strict=True):
        if tokens:
            rows.history.tokens[join.row, : len(tokens)] = sent(tokens, torch.int32)
            rows.history.lengths[join.row] = len(tokens)
            rows.history.prompt_lengths[join.row] = prompt_length


def write_tables(rows: Rows, row: np.ndarray, column: np.ndarray, block: np.ndarray) -> None:
    """Add blocks to block tables: entry (row, column) becomes block."""
    packed = send(torch.from_numpy(np.stack([row, column, block]).astype(np.int64)), rows.length.device)
    rows.block_table.index_put_((packed[0], packed[1]), packed[2].int())


def empty_choices(channels: Sequence[Channel], count: int, device: torch.device) -> tuple[Choice, ...]:
    """Choices of `count` rows that use no channel."""
    return tuple(
        Choice(
            torch.zeros(count, dtype=torch.bool, device=device),
            tuple(
                torch.zeros((count, *shape), dtype=dtype, device=device)
                for shape, dtype in zip(channel.shapes, channel.dtypes, strict=True)
            ),
        )
        for channel in channels
    )


def choices_of(
    channels: Sequence[Channel], edits: Sequence[Sequence[Edit]], device: torch.device
) -> tuple[Choice, ...]:
    """The choices of a batch of sequences; differentiable with respect to the edits' values.

    Every channel has a sequence that uses it. The others get its values rather than zeros: where the function divides
    by them, what is left out by its mask would still turn the gradient to NaN.
    """

    def choice(chosen: list[Edit | None]) -> Choice:
        anyone = next(edit for edit in chosen if edit is not None)
        values = zip(*((edit or anyone).values for edit in chosen), strict=True)
        return Choice(
            torch.tensor([edit is not None for edit in chosen], device=device),
            tuple(torch.stack([value.to(device) for value in of_each]) for of_each in values),
        )

    places = [placed(chosen, channels) for chosen in edits]
    return tuple(choice([place[index] for place in places]) for index in range(len(channels)))


def write_choices(
    choices: Sequence[Choice], channels: Sequence[Channel], row: Sequence[int], edits: Sequence[Sequence[Edit]]
) -> None:
    """Write what edits the sequences that join use."""
    for at, chosen in zip(row, edits, strict=True):
        for choice, edit in zip(choices, placed(chosen, channels), strict=True):
            choice.active[at] = edit is not None
            if edit is not None:
                for values, value in zip(choice.values, edit.values, strict=True):
                    values[at] = value.detach()


def send(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting for the copy."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)
