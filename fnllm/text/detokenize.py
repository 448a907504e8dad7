"""Ids to text as they come: the joined pieces are the text of all ids, and no character is ever split."""

import codecs
import functools
from collections.abc import Iterable
from typing import NamedTuple

from fnllm_weights.tokenizer import BYTE_TOKEN, Tokenizer


class Pieces(dict):
    """Memo of id -> the bytes its token adds to the text; ids that add none give b"".

    Bytes of a byte-level vocabulary; else the token's spelling, by which the ids that take part are known.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self.tokenizer = tokenizer
        self.skipped = tokenizer.special_ids if skip_special_tokens else frozenset()

    def __missing__(self, id: int) -> bytes:
        token = None if id in self.skipped else self.tokenizer.token(int(id))
        if token is None:  # a padding row of the embedding, or a special token that is not shown
            piece = b""
        else:
            piece = token_bytes(token) if self.tokenizer.decoder == "byte_level" else token.encode("utf-8")
        self[id] = piece
        return piece


# Requests share the memo: looking a token up costs ten times what the rest of `push` does.
pieces_of = functools.lru_cache(maxsize=4)(Pieces)


class Detok(NamedTuple):
    """How far one sequence has been decoded. Its size does not grow with the sequence.

    A byte-level vocabulary spells bytes, so only a character's first bytes wait in `tail`. Any other decoder is
    asked: `context` is the last id whose text is out, `waiting` are the ids after it.
    """

    tokenizer: Tokenizer
    pieces: Pieces
    tail: bytes = b""
    context: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


def start(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> Detok:
    """The state before the first id."""
    return Detok(tokenizer, pieces_of(tokenizer, skip_special_tokens))


def push(detok: Detok, ids: Iterable[int]) -> tuple[Detok, str]:
    """Take new ids; return the text that no later id can change."""
    tokenizer, pieces, tail, context, waiting = detok
    if tokenizer.decoder == "byte_level":
        data = tail
        for id in ids:
            data += pieces[id]
        text, used = codecs.utf_8_decode(data, "replace", False)
        rest = data[used:]
        return detok if rest == tail else Detok(tokenizer, pieces, rest), text
    waiting += tuple(int(id) for id in ids if pieces[id])
    if tokenizer.decoder == "byte_fallback":
        ready = _before_byte_run(tokenizer, waiting)
    else:
        # U+FFFD at the end may be the first bytes of a character.
        ready = 0 if _text_after(tokenizer, context, waiting).endswith("\ufffd") else len(waiting)
    if not ready:
        return Detok(tokenizer, pieces, tail, context, waiting), ""
    # One id is enough context: decoders treat the first token of a text differently, and no later one.
    after = Detok(tokenizer, pieces, tail, waiting[ready - 1:ready], waiting[ready:])
    return after, _text_after(tokenizer, context, waiting[:ready])


def flush(detok: Detok) -> str:
    """The text that was held back, once no id will follow: a character cut short shows as U+FFFD."""
    if detok.tokenizer.decoder == "byte_level":
        return detok.tail.decode("utf-8", "replace")
    return _text_after(detok.tokenizer, detok.context, detok.waiting)


def _text_after(tokenizer: Tokenizer, context: tuple[int, ...], ids: tuple[int, ...]) -> str:
    if not ids:
        return ""
    before = tokenizer.decode(context, False) if context else ""
    return tokenizer.decode(context + ids, False)[len(before):]


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
