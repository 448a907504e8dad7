"""The scheduler's configuration, and the limits that follow from it."""

from dataclasses import dataclass

from .checks import is_int


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes of the cache and bounds on the work of one step.

    `max_num_batched_tokens` bounds the tokens of one plan; decode entries are served first and prompts share the rest.
    `max_chunk` bounds the tokens one sequence may prefill in a step. With `chunked_prefill` off a prompt waits until
    all of it fits into one step; only a sequence that has grown past the budget before it was preempted is still cut.
    Raises ValueError for a size below one, and for `max_chunk` without `chunked_prefill`.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prefix_cache: bool = True
    chunked_prefill: bool = True
    max_chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            if not is_int(value) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        if self.max_chunk is not None:
            if not is_int(self.max_chunk) or self.max_chunk < 1:
                raise ValueError(f"max_chunk={self.max_chunk!r} must be an integer of at least 1, or None for no bound")
            if not self.chunked_prefill:
                raise ValueError(
                    f"max_chunk={self.max_chunk} has no meaning with chunked_prefill=False; drop one of the two"
                )


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks a sequence holds when the keys and values of `tokens` tokens are computed or being computed.

    >>> [blocks_for(tokens, 4) for tokens in (0, 1, 3, 4, 5, 8, 9)]
    [0, 1, 1, 1, 2, 2, 3]
    """
    return -(-tokens // block_size)


def length_limit(config: SchedulerConfig) -> int:
    """Most tokens, prompt and output together, one sequence may reach: the model's limit or the whole cache.

    >>> length_limit(SchedulerConfig(3, 4, 8, 64, max_model_len=64)), length_limit(SchedulerConfig(3, 4, 8, 64, 10))
    (12, 10)
    """
    return min(config.max_model_len, config.num_blocks * config.block_size)


def prompt_limit(config: SchedulerConfig) -> int:
    """Most tokens a prompt may have: `length_limit`, and what one step takes when prompts are not chunked.

    >>> prompt_limit(SchedulerConfig(16, 4, 8, 8, 64, chunked_prefill=False))
    8
    """
    limit = length_limit(config)
    return limit if config.chunked_prefill else min(limit, config.max_num_batched_tokens)


def describe_prompt_limit(config: SchedulerConfig) -> str:
    """The terms of `prompt_limit` in words, for error messages."""
    terms = [f"max_model_len={config.max_model_len}"]
    terms.append(f"cache of {config.num_blocks} blocks x {config.block_size} = {config.num_blocks * config.block_size}")
    if not config.chunked_prefill:
        terms.append(f"max_num_batched_tokens={config.max_num_batched_tokens} with chunked_prefill=False")
    return f"at most {prompt_limit(config)} tokens (the least of {', '.join(terms)})"


def check_prompt_length(config: SchedulerConfig, length: int) -> None:
    """Raise ValueError for a prompt of so many tokens that it can never be computed."""
    if length > prompt_limit(config):
        raise ValueError(f"prompt has {length} tokens and can never run: {describe_prompt_limit(config)}")


def max_running(config: SchedulerConfig) -> int:
    """Most sequences that run at once, such that every one of them can get a token in each step."""
    return min(config.max_num_seqs, config.max_num_batched_tokens)
