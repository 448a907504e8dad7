"""The checkpoint's tokenizer: text or chat to ids and back, read from the files beside the weights (effect)."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from fnllm_weights import chat_template

SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, eq=False, repr=False)
class Tokenizer:
    """An immutable tokenizer. `backend` is never changed after `load_tokenizer` built it."""

    backend: tokenizers.Tokenizer
    num_ids: int  # highest id + 1; the embedding may have more rows than this
    special_ids: frozenset[int]  # ids that decode leaves out with skip_special_tokens
    special_tokens: Mapping[str, Any]  # "bos_token" -> "<s>" and so on, as chat templates see them
    bos_id: int | None
    eos_id: int | None
    chat_templates: Mapping[str, str]  # name -> Jinja source; the usual one is "default"
    decoder: str  # "byte_level", "byte_fallback" or "other": what a streaming decoder must know
    side_files: Mapping[str, str]  # name -> text of the small files, kept for save

    def __repr__(self) -> str:
        return f"Tokenizer({self.num_ids} ids, {self.decoder}, chat templates: {list(self.chat_templates) or 'none'})"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; `add_special_tokens` adds those that the tokenizer's file specifies, often a BOS.

        A text that already begins with the BOS token, such as a chat rendered to a string, gets no second one. Raises
        TypeError for other types, ValueError for text that is not valid Unicode.
        """
        return self.encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text, in parallel when there are many."""
        for text in texts:
            check_text(text)
        if len(texts) == 1:
            encoded = [self.backend.encode(texts[0], add_special_tokens=add_special_tokens)]
        else:
            encoded = self.backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [self._one_bos(encoding) for encoding in encoded]

    def _one_bos(self, encoding: tokenizers.Encoding) -> list[int]:
        ids = encoding.ids
        # The mask is 1 for what the tokenizer added; a BOS that the caller wrote twice stays.
        added = bool(ids) and ids[0] == self.bos_id and encoding.special_tokens_mask[0] == 1
        return ids[1:] if added and ids[1:2] == [self.bos_id] else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids; ids without a token, such as padding rows of the embedding, give no text."""
        known = [i for i in map(int, ids) if 0 <= i < self.num_ids]
        return self.backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token(self, id: int) -> str | None:
        """The token of an id as spelled in the vocabulary (which may map bytes to letters); None if there is none."""
        return self.backend.id_to_token(id) if 0 <= id < self.num_ids else None

    def token_id(self, token: str) -> int | None:
        """The id of a token spelled as in the vocabulary, None if there is none."""
        return self.backend.token_to_id(token)

    def chat(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **variables: Any,
    ) -> list[int]:
        """The ids of a chat, a list of dicts with role and content; see `chat_text`.

        The template writes every special token itself, so the tokenizer adds none and no BOS comes twice.
        """
        text = self.chat_text(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
            **variables,
        )
        return self.encode(text, add_special_tokens=False)

    def chat_text(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **variables: Any,
    ) -> str:
        """The chat as text.

        `enable_thinking` and other `variables` are passed to the template unchanged (None: not passed). Raises
        ValueError without a template and when the template refuses the messages; TypeError if `messages` is not a chat
        and for a variable that the template does not have. `enable_thinking` is accepted for any template.
        """
        chat_template.check_messages(messages)
        name = "tool_use" if tools and "tool_use" in self.chat_templates else "default"
        if name not in self.chat_templates:
            raise ValueError(
                "this tokenizer has no chat template; give text or token ids, or a checkpoint with a "
                "chat_template.jinja"
            )
        chat_template.check_variables(self.chat_templates[name], variables)
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        return chat_template.render(
            self.chat_templates[name],
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables={**self.special_tokens, **variables},
        )


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder, None without a tokenizer.json; ValueError names a file that is broken."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from error
    side = {name: _read(folder / name) for name in SIDE_FILES if (folder / name).is_file()}
    for extra in sorted(folder.glob("additional_chat_templates/*.jinja")):
        side[f"additional_chat_templates/{extra.name}"] = _read(extra)
    return make_tokenizer(backend, side)


def make_tokenizer(backend: tokenizers.Tokenizer, side_files: Mapping[str, str] | None = None) -> Tokenizer:
    """A Tokenizer from the library's own and the texts of the small files beside it (SIDE_FILES)."""
    side = dict(side_files or {})
    # A length limit or padding that training left in the file would silently cut or fill prompts.
    backend.no_truncation()
    backend.no_padding()
    config = _json(side, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # an older form, whose special tokens the file beside it names
        config |= _json(side, "special_tokens_map.json")
    special = _special_tokens(config)
    added = backend.get_added_tokens_decoder()
    return Tokenizer(
        backend=backend,
        num_ids=1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1),
        special_ids=frozenset(i for i, token in added.items() if token.special),
        special_tokens=special,
        bos_id=_id_of(backend, special.get("bos_token")),
        eos_id=_id_of(backend, special.get("eos_token")),
        chat_templates=_templates(side, config),
        decoder=_decoder_kind(backend),
        side_files=side,
    )


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Write the files that `load_tokenizer` reads, and remove those of an earlier tokenizer that it would read too."""
    folder = Path(folder)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    for file in (*(folder / name for name in SIDE_FILES), *folder.glob("additional_chat_templates/*.jinja")):
        file.unlink(missing_ok=True)
    for name, text in tokenizer.side_files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8", newline="")


def check_text(text: Any) -> None:
    """Raise TypeError unless this is a string, ValueError if it holds half a surrogate pair."""
    if not isinstance(text, str):
        raise TypeError(f"text must be a string, found {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has a lone surrogate {text[error.start]!r} at character {error.start}, which no "
            "UTF-8 text can have"
        ) from None


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _json(side: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        found = json.loads(side.get(name, "{}"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} must hold a JSON object, found {type(found).__name__}")
    return found


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """The named special tokens as strings: a file may have them as a string, as an object or as null."""

    def content(token: Any) -> str | None:
        return token.get("content") if isinstance(token, Mapping) else token

    found: dict[str, Any] = {name: content(config[name]) for name in SPECIAL_NAMES if config.get(name) is not None}
    more = config.get("additional_special_tokens")
    if more:
        found["additional_special_tokens"] = [content(token) for token in more]
    return found


def _id_of(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    return backend.token_to_id(token) if isinstance(token, str) else None


def _templates(side: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> template. The .jinja file is the newest convention and wins over the field in the config."""
    field = config.get("chat_template") or _json(side, "chat_template.json").get("chat_template")
    if isinstance(field, list):  # several: [{"name": ..., "template": ...}, ...]
        found = {entry["name"]: entry["template"] for entry in field}
    else:
        found = {"default": field} if field else {}
    if "chat_template.jinja" in side:
        found["default"] = side["chat_template.jinja"]
    for name, text in side.items():
        if name.startswith("additional_chat_templates/"):
            found[Path(name).stem] = text
    return found


def _decoder_kind(backend: tokenizers.Tokenizer) -> str:
    if backend.decoder is None:
        return "other"
    spelled = json.loads(backend.decoder.__getstate__())
    if spelled["type"] == "ByteLevel":
        return "byte_level"
    parts = spelled.get("decoders", [spelled])
    return "byte_fallback" if any(part["type"] == "ByteFallback" for part in parts) else "other"
