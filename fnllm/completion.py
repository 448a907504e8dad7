"""The results of a request: a finished completion, or the chunks of a running one."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class TokenLogprob(NamedTuple):
    """The natural log of one token's probability, and the most likely alternatives at its position."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), most likely first


class Timings(NamedTuple):
    """Seconds from the moment that a request was added; None for what did not happen."""

    queued: float = 0.0  # until its first token was scheduled
    first_token: float | None = None  # until its first new token was known
    total: float = 0.0  # until it ended


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The result of one request.

    `token_ids` holds every new token up to and including the one that ended the request: an eos or stop id, or the
    token that completed a stop string. `text` ends before the stop string or stop token, unless `include_stop` was set.
    Special tokens do not appear in it.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the token id or the string that stopped it
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per new token
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # the first is None: nothing precedes it
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose keys and values were found in the prefix cache
    timings: Timings = Timings()
    captured: dict[str, Any] = field(default_factory=dict)  # site -> Float[Tensor, "tokens *width"]
    captured_at: tuple[int, ...] = ()  # positions of those tokens in prompt and output
    error: Exception | None = None  # set when finish_reason is "error"

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens that were computed, over the time from being scheduled to the first new token."""
        if self.timings.first_token is None:
            return None
        return _rate(self.prompt_tokens - self.cached_tokens, self.timings.first_token - self.timings.queued)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """New tokens after the first one, over the time since the first one."""
        if self.timings.first_token is None or len(self.token_ids) < 2:
            return None
        return _rate(len(self.token_ids) - 1, self.timings.total - self.timings.first_token)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of a running request; concatenated, the texts and ids of its chunks are those of the completion."""

    index: int  # which prompt of the call
    sample: int = 0  # which of its n samples
    text: str = ""  # may be empty while a character or a possible stop string is held back
    token_ids: tuple[int, ...] = ()
    completion: Completion | None = None  # in the request's last chunk

    @property
    def finished(self) -> bool:
        return self.completion is not None


def failed(error: Exception) -> Completion:
    """The completion of a request that was refused."""
    return Completion(finish_reason="error", error=error)


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None
