"""Converting prompts of every form to token ids, each checked before anything runs."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from fnllm.sampling import Sampling, kind
from fnllm.scheduler import TokenIds, token_ids
from fnllm_weights.tokenizer import Tokenizer, check_text

FORMS = "text, a list of token ids, or a chat (a list of {'role': ..., 'content': ...})"


def normalise(
    prompts: Any,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    *,
    errors: str = "raise",
    chat: Mapping[str, Any] | None = None,
    name: str = "prompt",
) -> tuple[TokenIds | Exception, ...]:
    """The token ids of one prompt, or of each prompt in a list.

    A list whose first element is an integer is one prompt of ids; a list whose first element is a dict is one chat; a
    string or a one-axis integer array is one prompt. An empty list means no prompts. `vocab_size` is the model's.
    `chat` holds options for chats (tools, enable_thinking, add_generation_prompt, template variables). With
    errors="return" the TypeError or ValueError of a refused prompt takes its place in the result; with "raise" the
    first one is raised. Anything but a list of prompts always raises. `name` is what errors call a prompt.
    """
    if errors not in ("raise", "return"):
        raise ValueError(f"errors must be 'raise' or 'return', found {errors!r}")
    listed, single = _listed(prompts, name)
    where = [name if single else f"{name}s[{i}]" for i in range(len(listed))]
    found: list[Any] = [
        _attempt(place, _to_ids, prompt, tokenizer, chat or {}) for place, prompt in zip(where, listed, strict=True)
    ]
    # Texts go to the tokenizer together, which uses every core on them.
    texts = [i for i, item in enumerate(found) if isinstance(item, str)]
    if texts:
        assert tokenizer is not None  # _to_ids refuses text without one
        for i, ids in zip(texts, tokenizer.encode_all([found[i] for i in texts]), strict=True):
            found[i] = ids
    checked = tuple(
        item if isinstance(item, Exception) else _attempt(place, _checked_ids, item, vocab_size)
        for place, item in zip(where, found, strict=True)
    )
    if errors == "raise":
        for item in checked:
            if isinstance(item, Exception):
                raise item
    return checked


def pair_sampling(count: int, sampling: Any) -> tuple[Sampling, ...]:
    """One Sampling for each of `count` prompts, from a single one (None: the defaults) or a list of that length.

    Raises TypeError for other types, ValueError for a list of another length.
    """
    if sampling is None or isinstance(sampling, Sampling):
        return (sampling or Sampling(),) * count
    if isinstance(sampling, (str, bytes, Mapping)) or not isinstance(sampling, Sequence):
        raise TypeError(f"sampling must be a Sampling or a list of them, found {kind(sampling)}")
    for i, item in enumerate(sampling):
        if not isinstance(item, Sampling):
            raise TypeError(f"sampling[{i}] must be a Sampling, found {kind(item)}")
    if len(sampling) != count:
        raise ValueError(
            f"{count} prompts and {len(sampling)} sampling settings; give one Sampling for all prompts, "
            "or a list with one for each"
        )
    return tuple(sampling)


def check_ids(name: str, ids: Sequence[Any], vocab_size: int) -> TokenIds:
    """The token ids, checked. Raises TypeError or ValueError that begins with `name` unless all are the model's ids."""
    checked = _attempt(name, _checked_ids, ids, vocab_size)
    if isinstance(checked, Exception):
        raise checked
    return checked


def _listed(prompts: Any, name: str) -> tuple[list[Any], bool]:
    """(list of prompts, whether the caller gave a single one)."""
    if isinstance(prompts, str):
        return [prompts], True
    if _is_array(prompts):
        if prompts.ndim == 1 and (not len(prompts) or not isinstance(prompts[0], str)):
            return [prompts], True
        if prompts.ndim == 1:
            return prompts.tolist(), False
        raise TypeError(
            f"{name}s must be {FORMS}, or a list of these; found an array of shape {tuple(prompts.shape)}; "
            "give a list of one-axis arrays without padding"
        )
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Sequence):
        advice = "; decode it to text first" if isinstance(prompts, bytes) else ""
        advice = "; put a message into a list to make a chat" if isinstance(prompts, Mapping) else advice
        raise TypeError(f"{name}s must be {FORMS}, or a list of these; found {kind(prompts)}{advice}")
    first = prompts[0] if len(prompts) else None
    single = isinstance(first, (Mapping, bool, float)) or _is_integer(first)
    return ([prompts] if single else list(prompts)), single


def _attempt(where: str, function: Any, *args: Any) -> Any:
    """function(*args), or its error with the prompt's place in front."""
    try:
        return function(*args)
    except (TypeError, ValueError) as error:
        named = type(error) if type(error) in (TypeError, ValueError) else ValueError
        refused = named(f"{where}: {error}")
        refused.__cause__ = error.__cause__
        return refused


def _to_ids(prompt: Any, tokenizer: Tokenizer | None, chat: Mapping[str, Any]) -> Any:
    """Ids as the caller gave them (not yet checked), or the text to be encoded."""
    is_chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if isinstance(prompt, str) or is_chat:
        if tokenizer is None:
            raise ValueError("these params have no tokenizer, so a prompt must be a list of token ids")
        if is_chat:
            return tokenizer.chat(prompt, **chat)
        check_text(prompt)
        return prompt
    if _is_array(prompt):
        return _array_ids(prompt)
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
        raise TypeError(f"must be {FORMS}, found {kind(prompt)}")
    return prompt


def _array_ids(array: Any) -> list[Any]:
    if array.ndim != 1:
        raise TypeError(f"an array of token ids must have one axis, found shape {tuple(array.shape)}")
    return array.tolist()  # an array of floats is refused with its elements


def _checked_ids(ids: Sequence[Any], vocab_size: int) -> TokenIds:
    if not len(ids):
        raise ValueError("is empty: there is nothing to continue; give at least one token")
    ids = ids if isinstance(ids, list | tuple) else tuple(ids)
    # The usual case, plain ints in range, is decided without a Python step per token.
    if list(map(type, ids)).count(int) < len(ids):
        ids = [_one_id(position, id) for position, id in enumerate(ids)]
    checked = token_ids(ids, vocab_size)
    if checked is None:
        position, id = next((p, i) for p, i in enumerate(ids) if not 0 <= i < vocab_size)
        raise ValueError(
            f"token id {id} at position {position} is outside the vocabulary: ids are 0 to {vocab_size - 1}"
        )
    return checked


def _one_id(position: int, id: Any) -> int:
    if not _is_integer(id):
        raise TypeError(f"token ids must be integers, found {kind(id)} at position {position}")
    return operator.index(id)


def _is_array(value: Any) -> bool:
    """A numpy array or torch tensor, told without importing either."""
    return hasattr(value, "ndim") and hasattr(value, "tolist") and value.ndim > 0


def _is_integer(value: Any) -> bool:
    """Python, numpy and zero-axis tensor integers; bools are none."""
    if isinstance(value, (bool, str)) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
