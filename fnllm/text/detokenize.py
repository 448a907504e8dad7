"""Ids to text as they come: the joined pieces are the text of all ids, and no character is ever split."""

import codecs
from collections.abc import Iterable
from typing import NamedTuple

from fnllm_weights.tokenizer import BYTE_TOKEN, Tokenizer


class Detok(NamedTuple):
    """How far one sequence has been decoded. Its size does not grow with the sequence.

    A byte-level vocabulary spells bytes, so only a character's first bytes wait in `tail`. Any other decoder is
    asked: `context` is the last id whose text is out, `waiting` are the ids after it.
    """

    tokenizer: Tokenizer
    skip_special_tokens: bool
    tail: bytes = b""
    context: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


def start(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> Detok:
    """The state before the first id."""
    return Detok(tokenizer, skip_special_tokens)


def push(detok: Detok, ids: Iterable[int]) -> tuple[Detok, str]:
    """Take new ids; return the text that no later id can change."""
    shown = _shown(detok, ids)
    if not shown:
        return detok, ""
    if detok.tokenizer.decoder == "byte_level":
        data = detok.tail + b"".join(token_bytes(token) for _, token in shown)
        text, used = codecs.utf_8_decode(data, "replace", False)
        return detok._replace(tail=data[used:]), text
    waiting = detok.waiting + tuple(id for id, _ in shown)
    if detok.tokenizer.decoder == "byte_fallback":
        ready = _before_byte_run(detok.tokenizer, waiting)
        return _emit(detok, waiting[:ready], waiting[ready:])
    text = _text_after(detok, waiting)
    if text.endswith("\ufffd"):  # perhaps the first bytes of a character
        return detok._replace(waiting=waiting), ""
    return _emit(detok, waiting, ())


def flush(detok: Detok) -> str:
    """The text that was held back, once no id will follow: a character cut short shows as U+FFFD."""
    if detok.tokenizer.decoder == "byte_level":
        return detok.tail.decode("utf-8", "replace")
    return _text_after(detok, detok.waiting)


def _shown(detok: Detok, ids: Iterable[int]) -> list[tuple[int, str]]:
    """(id, token) of the ids that take part in the text: padding ids and skipped special tokens do not."""
    skipped = detok.tokenizer.special_ids if detok.skip_special_tokens else frozenset()
    pairs = ((int(id), detok.tokenizer.token(id)) for id in ids if id not in skipped)
    return [(id, token) for id, token in pairs if token is not None]


def _emit(detok: Detok, ready: tuple[int, ...], rest: tuple[int, ...]) -> tuple[Detok, str]:
    if not ready:
        return detok._replace(waiting=rest), ""
    # One id is enough context: decoders treat the first token of a text differently, and no later one.
    return detok._replace(context=ready[-1:], waiting=rest), _text_after(detok, ready)


def _text_after(detok: Detok, ids: tuple[int, ...]) -> str:
    if not ids:
        return ""
    before = detok.tokenizer.decode(detok.context, False) if detok.context else ""
    return detok.tokenizer.decode(detok.context + ids, False)[len(before):]


def _before_byte_run(tokenizer: Tokenizer, ids: tuple[int, ...]) -> int:
    """How many ids stand before the trailing run of byte tokens, which may turn out valid or not as a whole."""
    count = len(ids)
    while count and BYTE_TOKEN.fullmatch(tokenizer.token(ids[count - 1]) or ""):
        count -= 1
    return count


def _byte_letters() -> dict[str, int]:
    """Letter -> byte of the byte-level alphabet (GPT-2): printable Latin-1 stands for itself, the rest from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{chr(byte): byte for byte in plain}, **{chr(0x100 + n): byte for n, byte in enumerate(others)}}


BYTE_LETTERS = _byte_letters()


def token_bytes(token: str) -> bytes:
    """The bytes that a byte-level token spells; an added token with other letters stands for its own UTF-8.

    >>> token_bytes("Ġhi"), token_bytes("<|end of text|>")
    (b' hi', b'<|end of text|>')
    """
    try:
        return bytes(map(BYTE_LETTERS.__getitem__, token))
    except KeyError:
        return token.encode("utf-8")
