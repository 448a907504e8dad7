"""Sampling settings and stop conditions of one request: an immutable, validated value."""

import dataclasses
import difflib
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")

MAX_SEED = 2**63 - 1

# Names that other libraries give to the same thing; difflib alone would not find these.
OTHER_NAMES = {
    "do_sample": "temperature (0 is greedy)",
    "best_of": "n",
    "num_return_sequences": "n",
    "eos_token_id": "stop_token_ids",
    "stop_strings": "stop",
    "include_stop_str_in_output": "include_stop",
    "bad_words": "logit_bias",
    "logits_processor": "logits_fn",
}


def unknown_option(owner: str, name: str, allowed: Iterable[str], elsewhere: Mapping[str, str]) -> TypeError:
    """The error for an option that does not exist, with its place elsewhere or the most likely intended name."""
    allowed = tuple(allowed)
    if name in elsewhere:
        return TypeError(f"{owner} has no option {name!r}; {elsewhere[name]}")
    close = difflib.get_close_matches(name.lower(), allowed, n=1)
    meant = close[0] if close else OTHER_NAMES.get(name)
    advice = f"did you mean {meant}?" if meant else f"allowed are: {', '.join(allowed)}"
    return TypeError(f"{owner} has no option {name!r}; {advice}")


def named_options(cls: type[T], elsewhere: Mapping[str, str] = MappingProxyType({})) -> type[T]:
    """Let a dataclass's constructor answer a misspelt or positional option with a sentence that helps.

    `elsewhere` says of names that callers may give here what to do with them.
    """
    plain = cls.__init__
    allowed = tuple(field.name for field in dataclasses.fields(cls) if field.init)  # type: ignore[arg-type]

    @functools.wraps(plain)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        if args:
            raise TypeError(
                f"{cls.__name__} takes named options only, as in {cls.__name__}({allowed[0]}=...); "
                f"found {args[0]!r} without a name"
            )
        for name in options:
            if name not in allowed:
                raise unknown_option(cls.__name__, name, allowed, elsewhere)
        plain(self, **options)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


@named_options
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings and stop conditions of one request; hashable; change it with `dataclasses.replace`.

    Order of application: logits_fn, penalties, logit_bias, min_tokens, temperature, top_k, top_p, min_p. Numbers may be
    Python or numpy scalars (bools are refused) and are stored as plain int and float. Raises TypeError or ValueError
    that names the option, the value found and what is allowed.
    """

    temperature: float = 1.0  # 0 takes the most likely token; the lowest id wins a tie
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of most likely tokens whose probabilities sum to at least this
    min_p: float = 0.0  # drop tokens less likely than this times the most likely one
    repetition_penalty: float = 1.0  # for tokens of prompt and output; 1 is none
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # subtracted once for each time that the token is in the output
    logit_bias: Any = ()  # mapping id -> number to add to its logit (-inf forbids); stored as pairs sorted by id
    seed: int | None = None  # None: derived from the seed of the call
    max_tokens: int = 128  # most new tokens; 0 only computes the prompt
    min_tokens: int = 0  # no eos, stop id or stop string ends the request before this many new tokens
    stop: Any = ()  # one string or several that end the request; stored as a tuple
    stop_token_ids: Any = ()  # ids that end the request, besides the model's eos ids; stored as a sorted tuple
    ignore_eos: bool = False  # the model's eos ids do not end the request; stop_token_ids still do
    include_stop: bool = False  # keep the stop string or stop token in the text
    n: int = 1  # independent samples of the prompt
    logprobs: int | None = None  # this many most likely alternatives per new token; 0: only the chosen token
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    # Pure (logits [rows, vocabulary], history) -> logits. Called once for all rows of a batch; its results for rows of
    # other requests are not used.
    logits_fn: Callable | None = None

    def __post_init__(self) -> None:
        values = {
            "temperature": check_number("temperature", self.temperature, low=0.0),
            "top_k": _integer("top_k", self.top_k, low=0, hint="0 keeps all tokens"),
            "top_p": check_number("top_p", self.top_p, above=0.0, high=1.0),
            "min_p": check_number("min_p", self.min_p, low=0.0, high=1.0),
            "repetition_penalty": check_number("repetition_penalty", self.repetition_penalty, above=0.0),
            "presence_penalty": check_number("presence_penalty", self.presence_penalty),
            "frequency_penalty": check_number("frequency_penalty", self.frequency_penalty),
            "logit_bias": _biases(self.logit_bias),
            "seed": None if self.seed is None else check_seed("seed", self.seed),
            "max_tokens": _integer("max_tokens", self.max_tokens, low=0),
            "min_tokens": _integer("min_tokens", self.min_tokens, low=0),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _ids("stop_token_ids", self.stop_token_ids),
            "ignore_eos": check_flag("ignore_eos", self.ignore_eos),
            "include_stop": check_flag("include_stop", self.include_stop),
            "n": _integer("n", self.n, low=1),
            "logprobs": None if self.logprobs is None else _integer("logprobs", self.logprobs, low=0),
            "prompt_logprobs": None
            if self.prompt_logprobs is None
            else _integer("prompt_logprobs", self.prompt_logprobs, low=0),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                "lower min_tokens or raise max_tokens"
            )
        if self.logits_fn is not None and not callable(self.logits_fn):
            raise TypeError(
                f"logits_fn must be a function (logits, history) -> logits or None, found {kind(self.logits_fn)}"
            )
        try:
            hash(self.logits_fn)
        except TypeError:
            raise TypeError(
                f"logits_fn must be hashable, since compiled steps are kept by it, and "
                f"{type(self.logits_fn).__name__} is not; define it with @dataclass(frozen=True), or with "
                "__hash__ beside __eq__"
            ) from None


def check_sampling(sampling: Any, *, vocab_size: int, has_tokenizer: bool = True) -> None:
    """Check what a request's settings ask of this model; ValueError names the option and the limit."""
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a Sampling or a list of them, found {kind(sampling)}")
    for token in sampling.stop_token_ids:
        if token >= vocab_size:
            raise ValueError(f"stop_token_ids has {token}, outside the vocabulary: ids are 0 to {vocab_size - 1}")
    for token, _ in sampling.logit_bias:
        if token >= vocab_size:
            raise ValueError(f"logit_bias has id {token}, outside the vocabulary: ids are 0 to {vocab_size - 1}")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        if count is not None and count > vocab_size:
            raise ValueError(f"{name}={count} is more than the vocabulary's {vocab_size} ids")
    if sampling.stop and not has_tokenizer:
        raise ValueError(f"stop={sampling.stop!r} needs text and these params have no tokenizer; use stop_token_ids")


def check_seed(name: str, value: Any) -> int:
    """A seed as a plain int; TypeError or ValueError that begins with `name` for other values."""
    return _integer(name, value, low=0, high=MAX_SEED)


def from_defaults(defaults: Iterable[tuple[str, Any]], **options: Any) -> Sampling:
    """The settings a checkpoint's generation_config recommends, with the caller's options over them.

    `defaults` are (name, value) pairs; names that are not options are ignored, and `do_sample` false means greedy.
    """
    found = dict(defaults)
    names = {field.name for field in dataclasses.fields(Sampling)}
    base = {name: value for name, value in found.items() if name in names and value is not None}
    if found.get("do_sample") is False:
        base["temperature"] = 0.0
    return Sampling(**{**base, **options})


def kind(value: Any) -> str:
    """A value's type, and the value as far as it is short."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")  # numpy's bools too


def _integer(name: str, value: Any, *, low: int, high: int | None = None, hint: str = "") -> int:
    try:
        number = None if _is_bool(value) else operator.index(value)
    except TypeError:
        number = None
    if number is not None and number >= low and (high is None or number <= high):
        return number
    allowed = f"an integer of {low} or more" if high is None else f"an integer from {low} to {high}"
    allowed += f" ({hint})" if hint else ""
    if number is None:
        # 2.5 is a wrong value, "2" and True are wrong types
        wrong = ValueError if isinstance(value, float) else TypeError
        raise wrong(f"{name} must be {allowed}, found {kind(value)}")
    raise ValueError(f"{name} must be {allowed}, found {number}")


def check_number(
    name: str,
    value: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    forbids: bool = False,  # -inf is one, too
) -> float:
    """A number within its bounds as a plain float; TypeError or ValueError that begins with `name` for other values."""
    try:
        number = None if _is_bool(value) or isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is not None and (math.isfinite(number) or (forbids and number == -math.inf)):
        if (low is None or number >= low) and (above is None or number > above) and (high is None or number <= high):
            return number
    bounds = [f"{sign} {bound:g}" for sign, bound in ((">=", low), (">", above), ("<=", high)) if bound is not None]
    allowed = "a finite number" + (" " + " and ".join(bounds) if bounds else "") + " or -inf" * forbids
    if number is None:
        raise TypeError(f"{name} must be {allowed}, found {kind(value)}")
    raise ValueError(f"{name} must be {allowed}, found {number:g}")


def check_flag(name: str, value: Any) -> bool:
    """A plain bool, numpy's being one too; TypeError that begins with `name` for anything else, such as a string."""
    if not _is_bool(value):
        raise TypeError(f"{name} must be True or False, found {kind(value)}")
    return bool(value)


def _items(name: str, value: Any, what: str) -> list:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be {what}, found {kind(value)}")
    return list(value)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    items = _items(name, value, "a list of token ids")
    return tuple(sorted({_integer(f"{name}[{i}]", item, low=0) for i, item in enumerate(items)}))


def _stop_strings(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else _items("stop", value, "a string or a list of strings")
    for i, item in enumerate(items):
        if not isinstance(item, str):
            raise TypeError(f"stop[{i}] must be a string, found {kind(item)}; token ids go into stop_token_ids")
        if not item:
            raise ValueError(f"stop[{i}] is empty; an empty string would stop at once, leave it out")
        if any("\ud800" <= character <= "\udfff" for character in item):
            raise ValueError(f"stop[{i}] has a lone surrogate, which no text can have: {item!r}")
    return tuple(dict.fromkeys(items))


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    what = "a mapping of token id to number, as in {42: -5.0}"
    pairs = list(value.items()) if isinstance(value, Mapping) else _items("logit_bias", value, what)
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"logit_bias must be {what}, found the entry {pair!r}")
        token = _integer("a token id of logit_bias", pair[0], low=0)
        if token in found:
            raise ValueError(f"logit_bias has token id {token} twice; give each id once")
        found[token] = check_number(f"logit_bias[{token}]", pair[1], forbids=True)
    return tuple(sorted(found.items()))
