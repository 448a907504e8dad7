"""The sizes that steps are padded to (pure): few, so that each is compiled and captured once.

On a CPU nothing is padded. On a GPU a decode step has a bucket for its number of entries. A step with prefill has one
for its tokens, and fewer entries if it holds few sequences. Steps that would need much padding run without a graph:
computing the padding would take longer than the host takes to launch the kernels.
"""

import bisect
import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fnllm.options import Settings
from fnllm.scheduler import Plan

# Tokens of the graphs for steps of at most CAPTURED_ENTRIES sequences, and of those for all others, which have the
# largest step besides. No more than MOST_PADDING of them may be padding: 20 ms of work at 8B, where the host needs 53.
CAPTURED_PREFILL = (64, 128, 256, 512, 1024, 2048)
CAPTURED_ENTRIES = 8
CAPTURED_MIXED = (256, 512, 1024, 2048, 4096)
MOST_PADDING = 1024
# Sequences of decode steps. From 32 on in steps of a quarter at most; 208 and not 224, since cuBLAS multiplies 208 rows
# by a large weight in less time and takes as long for 224 as for 256 (benchmarks/results/linear_tiles.json).
DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 208, 256)
SHORT_CONTEXT = 4096  # decode steps of only shorter sequences have graphs of their own: attention divides differently


class HostInputs(NamedTuple):
    """A step's inputs as numpy arrays, padded to their bucket."""

    row: np.ndarray
    accept: np.ndarray
    cu_seqlens: np.ndarray
    token_ids: np.ndarray | None = None
    entry: np.ndarray | None = None
    captured: np.ndarray | None = None


class Bucket(NamedTuple):
    """The sizes of one captured step. `tokens` None is a decode step."""

    entries: int
    tokens: int | None
    captured: int | None  # tokens whose activations leave the step
    max_context: int  # no sequence is longer

    @property
    def name(self) -> str:
        if self.tokens is None:
            return f"decode of {self.entries}"
        return f"prefill of {self.tokens} tokens for {self.entries}"


@functools.cache
def ladder(largest: int) -> tuple[int, ...]:
    """Sizes of decode steps: `DECODE_SIZES`, from there on steps of a quarter at most, and the largest itself.

    >>> ladder(20), ladder(600)[-4:]
    ((1, 2, 4, 8, 16, 20), (384, 448, 512, 600))
    """
    sizes = [size for size in DECODE_SIZES if size < largest]
    size = DECODE_SIZES[-1]
    while (size := size + (1 << (size.bit_length() - 3))) < largest:
        sizes.append(size)
    return (*sizes, largest)


def round_up(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes`, which rise, that holds `size`; ValueError when none does."""
    for bucket in sizes:
        if size <= bucket:
            return bucket
    raise ValueError(f"a step of size {size} is larger than the largest bucket, {sizes[-1]}")


def up_to_64(tokens: int) -> int:
    """The next multiple of 64, so that few sizes are met."""
    return -(-tokens // 64) * 64


def padded(plan: Plan, settings: Settings, on_gpu: bool) -> tuple[HostInputs, bool]:
    """The plan's entries as arrays padded to their bucket, and whether that bucket is replayed as a graph."""
    entries, tokens = len(plan.rows), int(plan.query_lens.sum())
    decode = plan.num_decode == entries
    if decode:
        capture, size, length = True, round_up(entries, ladder(settings.max_num_seqs)), 0
    else:
        size, length, capture = prefill_size(entries, tokens, settings)
    if not on_gpu:
        size, length = entries, tokens
    row = np.full(size, settings.max_num_seqs, np.int64)
    row[:entries] = plan.rows
    accept = np.zeros(size, bool)
    accept[:entries] = plan.samples
    if decode:
        return HostInputs(row, accept, np.arange(size + 1, dtype=np.int32)), capture
    cu_seqlens = np.empty(size + 1, np.int32)
    cu_seqlens[0] = 0
    np.cumsum(plan.query_lens, out=cu_seqlens[1 : entries + 1])
    cu_seqlens[entries + 1 :] = tokens
    token_ids = np.zeros(length, np.int64)
    token_ids[: plan.num_decode] = -1  # the row's last token
    token_ids[plan.num_decode : tokens] = plan.prefill_tokens
    entry = np.full(length, size, np.int64)
    entry[:tokens] = np.repeat(np.arange(entries), plan.query_lens)
    return HostInputs(row, accept, cu_seqlens, token_ids, entry), capture


def prefill_size(entries: int, tokens: int, settings: Settings) -> tuple[int, int, bool]:
    """The entries and tokens that a step with prefill is padded to, and whether it is replayed as a graph."""
    if entries <= CAPTURED_ENTRIES and tokens <= CAPTURED_PREFILL[-1]:
        return CAPTURED_ENTRIES, round_up(tokens, CAPTURED_PREFILL), True
    alone, size = up_to_64(tokens), round_up(tokens, mixed_sizes(settings))
    capture = size == alone or (size <= CAPTURED_MIXED[-1] and size - tokens <= MOST_PADDING)
    return settings.max_num_seqs + 1, size if capture else alone, capture


def mixed_sizes(settings: Settings) -> tuple[int, ...]:
    """The tokens of captured steps with more sequences, or more tokens, than `CAPTURED_PREFILL` is for."""
    above = CAPTURED_PREFILL[-1] if settings.max_num_seqs <= CAPTURED_ENTRIES else 0
    largest = up_to_64(settings.max_num_batched_tokens)
    return (*(size for size in CAPTURED_MIXED if above < size < largest), largest)


def padding(entries: int, tokens: int | None, captured: int | None, scratch_row: int) -> HostInputs:
    """Inputs of a bucket in which every entry is padding, which computes and changes nothing."""
    return HostInputs(
        row=np.full(entries, scratch_row, np.int64),
        accept=np.zeros(entries, bool),
        cu_seqlens=np.arange(entries + 1, dtype=np.int32) if tokens is None else np.zeros(entries + 1, np.int32),
        token_ids=None if tokens is None else np.zeros(tokens, np.int64),
        entry=None if tokens is None else np.full(tokens, entries, np.int64),
        captured=None if captured is None else np.zeros(captured, np.int64),
    )


def context_bound(plan: Plan, max_model_len: int) -> int:
    """One of two bounds on the keys of a decode step's sequences, so that few steps are compiled."""
    longest = int(plan.starts.max()) + 1
    return SHORT_CONTEXT if longest <= SHORT_CONTEXT < max_model_len else max_model_len


def common_buckets(settings: Settings) -> Iterator[Bucket]:
    """Every bucket that is captured on a GPU, but those of long contexts and of captured activations."""
    for entries in ladder(settings.max_num_seqs):
        yield Bucket(entries, None, None, min(SHORT_CONTEXT, settings.max_model_len))
    most = settings.max_num_batched_tokens
    few = bisect.bisect_left(CAPTURED_PREFILL, most) + 1  # the first size that holds the largest step is the last one
    for tokens in CAPTURED_PREFILL[:few]:
        yield Bucket(CAPTURED_ENTRIES, tokens, None, 0)
    if settings.max_num_seqs <= CAPTURED_ENTRIES and most <= CAPTURED_PREFILL[-1]:
        return
    # From the largest down: graphs share their memory, and what one has left is room for a smaller one.
    for tokens in reversed(mixed_sizes(settings)):
        yield Bucket(settings.max_num_seqs + 1, tokens, None, 0)


def pad_to_power(tokens: np.ndarray) -> np.ndarray:
    """Token numbers padded with 0 to a power of two of at least 8, so that few sizes are compiled."""
    found = np.zeros(max(8, 1 << (len(tokens) - 1).bit_length()), np.int64)
    found[: len(tokens)] = tokens
    return found
