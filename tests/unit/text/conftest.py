"""Tokenizers of every kind: tiny ones made here, and the published ones where they have been fetched."""

import functools

import pytest
import tokenizers
from fetch_tokenizers import cache_folder
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from fnllm_weights.tokenizer import Tokenizer, load_tokenizer, make_tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def special(*texts: str) -> list[tokenizers.AddedToken]:
    return [tokenizers.AddedToken(text, special=True) for text in texts]


def byte_level_backend() -> tokenizers.Tokenizer:
    """256 bytes, a few merges (one joins parts of two characters), two special tokens and one added that is not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("a", "b"), ("c", "d"), ("Ġ", "w"), ("©", "Ã")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special("<|im_start|>", "<|im_end|>"))
    backend.add_tokens(["<think>", "naïve tag"])
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """As Llama 2: bytes as <0xNN>, words with a leading ▁, one leading space taken off, a BOS by the post-processor."""
    words = ["▁", "a", "b", "c", "▁a", "▁b", "ab", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[("▁", "a"), ("▁", "b"), ("a", "b")],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(special("<unk>", "<s>", "</s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return backend


def word_backend() -> tokenizers.Tokenizer:
    """Whole words joined with spaces by the library, since there is no decoder."""
    vocab = {token: i for i, token in enumerate(["<unk>", "x", "ab", "cd", "e", "\ufffd"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


BACKENDS = {"byte_level": byte_level_backend, "byte_fallback": byte_fallback_backend, "word": word_backend}


@functools.cache
def tiny(kind: str) -> Tokenizer:
    side = {"byte_fallback": {"tokenizer_config.json": '{"bos_token": "<s>", "eos_token": {"content": "</s>"}}'}}
    return make_tokenizer(BACKENDS[kind](), side.get(kind))


@functools.cache
def published(name: str) -> Tokenizer | None:
    return load_tokenizer(cache_folder() / name)


@pytest.fixture
def byte_level() -> Tokenizer:
    return tiny("byte_level")


@pytest.fixture
def byte_fallback() -> Tokenizer:
    return tiny("byte_fallback")


@pytest.fixture(params=["byte_level", "byte_fallback", "word"])
def any_tiny(request: pytest.FixtureRequest) -> Tokenizer:
    return tiny(request.param)


@pytest.fixture(params=["qwen3", "smollm2", "llama3_1", "gemma3", "llama2"])
def real(request: pytest.FixtureRequest) -> tuple[str, Tokenizer]:
    """(name, tokenizer) of a published one."""
    found = published(request.param)
    if found is None:
        pytest.skip(f"{request.param} is not in {cache_folder()}: run tests/fetch_tokenizers.py")
    return request.param, found
