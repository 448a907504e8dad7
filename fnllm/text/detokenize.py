"""Incremental detokenization: the joined pieces are the text of all ids, and no character is ever split."""

import codecs
import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

from fnllm_weights.tokenizer import Tokenizer

BYTE_TOKEN = re.compile(rb"<0x[0-9A-Fa-f]{2}>")  # how a vocabulary with byte fallback spells a byte
MAX_WAIT = 16  # ids; a character has at most four bytes, so at most four ids are ever needed


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
    """How far one sequence has been decoded. It does not grow with the sequence.

    A byte-level vocabulary spells bytes, so only a character's first bytes wait in `tail`. Any other decoder is
    asked: `context` is the last id whose text is out, `waiting` are the ids after it. A decoder with byte fallback
    turns each unbroken run of byte tokens into text if all of it is valid UTF-8 and into U+FFFD for each byte if not,
    so such a run (the letters of one rare word) waits for its end.
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
    new = tuple(int(id) for id in ids if pieces[id])
    waiting += new
    if tokenizer.decoder == "byte_fallback":
        run = _byte_run_length(pieces, new)  # what waited before is one run too
        ready = 0 if run == len(new) else len(waiting) - run
    else:
        # U+FFFD at the end may be the first bytes of a character; a long wait shows that it is none.
        cut = len(waiting) <= MAX_WAIT and _text_after(tokenizer, context, waiting).endswith("\ufffd")
        ready = 0 if cut else len(waiting)
    if not ready:
        return Detok(tokenizer, pieces, tail, context, waiting), ""
    # One id is enough context: decoders treat the first token of a text differently, and no later one.
    after = Detok(tokenizer, pieces, tail, waiting[ready - 1 : ready], waiting[ready:])
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
    return tokenizer.decode(context + ids, False)[len(before) :]


def _byte_run_length(pieces: Pieces, ids: tuple[int, ...]) -> int:
    """How many ids at the end are byte tokens, which may turn out valid or not as a whole."""
    count = 0
    while count < len(ids) and BYTE_TOKEN.fullmatch(pieces[ids[-1 - count]]):
        count += 1
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
