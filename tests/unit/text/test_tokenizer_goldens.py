"""Published tokenizers against goldens made with transformers: ids, texts and rendered chats."""

import functools
import json
from pathlib import Path

import pytest

from fnllm.text import detokenize

GOLDENS = Path(__file__).parents[2] / "oracle" / "tokenizers"


@functools.cache
def golden(name):
    return json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))


def streamed(tokenizer, ids, skip_special_tokens):
    detok, pieces = detokenize.start(tokenizer, skip_special_tokens), []
    for id in ids:
        detok, text = detokenize.push(detok, (id,))
        pieces.append(text)
    return "".join(pieces) + detokenize.flush(detok)


def test_ids_and_texts(real):
    name, tokenizer = real
    assert tokenizer.num_ids == golden(name)["vocabulary"]
    samples = golden(name)["samples"]
    assert len(samples) == 23
    for sample in samples:
        assert tokenizer.encode(sample["text"], add_special_tokens=False) == sample["ids"]
        assert tokenizer.encode(sample["text"]) == sample["with_special"]
        for ids in (sample["ids"], sample["with_special"]):
            assert streamed(tokenizer, ids, False) == tokenizer.decode(ids, skip_special_tokens=False)
            assert streamed(tokenizer, ids, True) == tokenizer.decode(ids)
        assert tokenizer.decode(sample["ids"], skip_special_tokens=False) == sample["decoded"]
        assert tokenizer.decode(sample["ids"]) == sample["decoded_skip_special"]


def test_batch_encoding_is_the_same(real):
    name, tokenizer = real
    samples = golden(name)["samples"]
    assert tokenizer.encode_all([s["text"] for s in samples]) == [s["with_special"] for s in samples]


def test_chats(real):
    name, tokenizer = real
    chats = golden(name)["chats"]
    if not chats:
        with pytest.raises(ValueError, match="no chat template"):
            tokenizer.chat([{"role": "user", "content": "hi"}])
    for chat in chats:
        assert tokenizer.chat_text(chat["messages"], **chat["arguments"]) == chat["text"]
        ids = tokenizer.chat(chat["messages"], **chat["arguments"])
        assert tokenizer.decode(ids, skip_special_tokens=False) == chat["text"]


def test_fault_51_one_bos_by_string_and_by_chat(real):
    name, tokenizer = real
    for chat in golden(name)["chats"]:
        by_chat = tokenizer.chat(chat["messages"], **chat["arguments"])
        by_string = tokenizer.encode(chat["text"])
        assert by_chat == by_string
        if tokenizer.bos_id is not None and name != "smollm2":  # whose BOS is <|im_start|>, which begins each message
            assert by_chat.count(tokenizer.bos_id) == 1
