"""The inputs of one step: the running rows on the device, the step's own inputs, and the batch they make (pure)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fnllm.rope import Rope, rope_tables
from fnllm.sampler import History, SamplerRows, update_history
from fnllm.taps import Choice


class Rows(NamedTuple):
    """State of the running sequences on the device, one row each; the last row is scratch for padding.

    A row stays with its sequence while it runs. Steps advance it without the host, which writes a row only when a
    sequence joins and when its block table grows.
    """

    length: Int[Tensor, " R"]  # tokens whose keys and values are in the cache
    last_token: Int[Tensor, " R"]  # the token that the next decode step reads
    prompt_length: Int[Tensor, " R"]  # length-dependent rope scalings look at it
    block_table: Int[Tensor, "R M"]
    sampler: SamplerRows
    history: History  # the tokens so far, kept for rows whose sampling looks back at them
    edits: tuple[Choice, ...] = ()  # of each channel of edits, which rows use it and with what values


class StepInputs(NamedTuple):
    """The host's inputs of a step. In a decode step (`token_ids` None) an entry is one token, read from its row."""

    row: Int[Tensor, " B"]  # R - 1 is padding
    accept: Bool[Tensor, " B"]  # the sampled token becomes the row's last token
    cu_seqlens: Int[Tensor, " B_plus_1"]  # first query of each entry
    token_ids: Int[Tensor, " T"] | None  # -1: the row's last token
    entry: Int[Tensor, " T"] | None = None  # which entry a token belongs to; B is padding
    captured: Int[Tensor, " C"] | None = None  # tokens of the batch whose activations leave the step


class Batch(NamedTuple):
    """Everything that a forward pass reads besides the parameters and the cache.

    Axes: T tokens of this step, B sequences, M blocks per sequence, half_D half the head dim.
    """

    token_ids: Int[Tensor, " T"]
    positions: Int[Tensor, " T"]  # of each token in its sequence, from 0
    entry: Int[Tensor, " T"]  # which sequence of the batch a token belongs to
    slots: Int[Tensor, " T"] | None  # cache slot of each token's key and value: block * block size + offset; -1: none
    cu_seqlens: Int[Tensor, " B_plus_1"]  # tokens [cu_seqlens[b], cu_seqlens[b + 1]) are those of sequence b
    context_lens: Int[Tensor, " B"]  # keys of each sequence, those of this step included
    block_tables: Int[Tensor, "B M"] | None  # the cache blocks of each sequence, in order
    cos: Float[Tensor, "T half_D"]  # of the rotary angles
    sin: Float[Tensor, "T half_D"]
    max_seqlen: int  # bound on the tokens of each sequence in this step

    def take(self, index: Int[Tensor, " C"]) -> "Batch":
        """The batch with some of its tokens, for functions that treat tokens independently, such as the head."""
        names = ("token_ids", "positions", "entry", "cos", "sin")
        return self._replace(**{name: getattr(self, name)[index] for name in names})


def decode_batch(rows: Rows, inputs: StepInputs, rope: Rope, block_size: int) -> Batch:
    """The batch of a decode step: one token for each entry."""
    row = inputs.row
    real = row < rows.length.shape[0] - 1
    positions = rows.length[row]
    tables = rows.block_table[row]
    context_lens = torch.where(real, positions + 1, 0)
    cos, sin = rope_tables(rope, positions, torch.maximum(rows.prompt_length[row], positions + 1))
    return Batch(
        token_ids=rows.last_token[row],
        positions=positions,
        entry=torch.arange(row.shape[0], device=row.device),
        slots=slot_mapping(tables, torch.arange(row.shape[0], device=row.device), positions, real, block_size),
        cu_seqlens=inputs.cu_seqlens,
        context_lens=context_lens.int(),
        block_tables=tables,
        cos=cos,
        sin=sin,
        max_seqlen=1,
    )


def ragged_batch(rows: Rows, inputs: StepInputs, rope: Rope, block_size: int, max_seqlen: int) -> Batch:
    """The batch of a step with prefill chunks: each entry has as many tokens as `cu_seqlens` says."""
    assert inputs.token_ids is not None and inputs.entry is not None
    (num_tokens,), (num_entries,) = inputs.token_ids.shape, inputs.row.shape
    token = torch.arange(num_tokens, device=inputs.row.device)
    real = inputs.entry < num_entries
    entry = inputs.entry.clamp(max=num_entries - 1)
    row = inputs.row[entry]
    first = inputs.cu_seqlens[entry]
    positions = torch.where(real, rows.length[row] + token - first, 0)
    token_ids = torch.where(inputs.token_ids >= 0, inputs.token_ids, rows.last_token[row])
    tables = rows.block_table[inputs.row]
    query_lens = inputs.cu_seqlens.diff()
    context_lens = torch.where(query_lens > 0, rows.length[inputs.row] + query_lens, 0)
    lengths = torch.maximum(rows.prompt_length[row], positions + 1)
    cos, sin = rope_tables(rope, positions, lengths)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        entry=entry,
        slots=slot_mapping(tables, entry, positions, real, block_size),
        cu_seqlens=inputs.cu_seqlens,
        context_lens=context_lens.int(),
        block_tables=tables,
        cos=cos,
        sin=sin,
        max_seqlen=max_seqlen,
    )


def slot_mapping(
    tables: Int[Tensor, "B M"],
    entry: Int[Tensor, " T"],
    positions: Int[Tensor, " T"],
    real: Bool[Tensor, " T"],
    block_size: int,
) -> Int[Tensor, " T"]:
    """Cache slot of each token: its block's number times the block size plus its place in the block; padding -1."""
    column = (positions // block_size).clamp(max=tables.shape[1] - 1)
    block = tables[entry, column].long()
    return torch.where(real & (block >= 0), block * block_size + positions % block_size, -1)


def entry_choices(rows: Rows, row: Int[Tensor, " B"]) -> tuple[Choice, ...]:
    """The edits of the batch's entries."""
    return tuple(Choice(c.active[row], tuple(values[row] for values in c.values)) for c in rows.edits)


def advance(rows: Rows, inputs: StepInputs, sampled: Int[Tensor, " B"], *, keep_history: bool) -> Rows:
    """The rows after a step: longer by their queries, with the accepted tokens as the last ones."""
    row = inputs.row
    real = row < rows.length.shape[0] - 1
    length = rows.length.index_put((row,), torch.where(real, rows.length[row] + inputs.cu_seqlens.diff(), 0).int())
    sampled = sampled.clamp(min=0)  # a row without a draw goes on with some token until the host ends it
    last = torch.where(inputs.accept, sampled, rows.last_token[row])
    history = update_history(rows.history, row, sampled, inputs.accept) if keep_history else rows.history
    return rows._replace(length=length, last_token=rows.last_token.index_put((row,), last), history=history)
