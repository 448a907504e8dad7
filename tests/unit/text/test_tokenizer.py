"""Reading tokenizer files in their several spellings, encoding, decoding, and saving."""

import json
import pickle

import pytest

from fnllm_weights.tokenizer import check_text, load_tokenizer, make_tokenizer, save_tokenizer

from .conftest import byte_fallback_backend, byte_level_backend


def folder_with(tmp_path, backend, **files):
    backend.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return tmp_path


def test_no_tokenizer_file_is_none(tmp_path):
    assert load_tokenizer(tmp_path) is None


def test_a_tokenizer_file_alone_is_enough(tmp_path):
    tokenizer = load_tokenizer(folder_with(tmp_path, byte_level_backend()))
    assert tokenizer.decode(tokenizer.encode("hello wörld")) == "hello wörld"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.chat_templates) == (None, None, {})


def test_broken_files_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    folder_with(tmp_path, byte_level_backend(), tokenizer_config__json="[1]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json must hold a JSON object, found list"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{,}")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(tmp_path)


def test_both_spellings_of_merges(tmp_path):
    folder_with(tmp_path, byte_level_backend())
    spelled = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    lists = load_tokenizer(tmp_path)
    merges = spelled["model"]["merges"]
    spelled["model"]["merges"] = [" ".join(m) if isinstance(m, list) else m.split(" ") for m in merges]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spelled), encoding="utf-8")
    strings = load_tokenizer(tmp_path)
    assert lists.encode("hehe abcd wé") == strings.encode("hehe abcd wé")
    assert len(lists.encode("he")) == 1


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>", "lstrip": False}])
def test_special_tokens_as_string_or_object_and_null(tmp_path, bos):
    config = {"bos_token": bos, "eos_token": "</s>", "pad_token": None}
    tokenizer = load_tokenizer(folder_with(tmp_path, byte_fallback_backend(), tokenizer_config__json=config))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.special_ids == {0, 1, 2}


def test_special_tokens_map_is_read_when_the_config_is_silent(tmp_path):
    tokenizer = load_tokenizer(
        folder_with(tmp_path, byte_fallback_backend(), special_tokens_map__json={"bos_token": "<s>"})
    )
    assert tokenizer.bos_id == 1


@pytest.mark.parametrize("listed", [{}, {"added_tokens_decoder": {}}], ids=["older form", "added tokens listed"])
@pytest.mark.parametrize("bos", [None, "</s>", "<s>"])
def test_special_tokens_of_two_files_are_transformers(tmp_path, bos, listed):
    config = {"bos_token": bos, "tokenizer_class": "PreTrainedTokenizerFast", **listed}
    both = {"tokenizer_config__json": config, "special_tokens_map__json": {"bos_token": "<s>"}}
    folder = folder_with(tmp_path, byte_fallback_backend(), **both)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    assert load_tokenizer(folder).special_tokens.get("bos_token") == theirs.bos_token


def test_a_length_limit_left_by_training_does_not_cut_prompts(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert len(load_tokenizer(folder_with(tmp_path, backend)).encode("xyz")) == 3


def test_num_ids_counts_from_the_highest_id(byte_level, byte_fallback):
    assert byte_level.token(byte_level.num_ids - 1) == "naïve tag"
    assert byte_level.token(byte_level.num_ids) is None
    assert byte_fallback.num_ids == 3 + 256 + 8


def test_ids_without_token_decode_to_nothing(any_tiny):
    x = [i for i in range(any_tiny.num_ids) if any_tiny.token(i) in ("x", "a")]
    alone = any_tiny.decode(x)
    assert alone in ("x", "ax", "a")
    assert any_tiny.decode([any_tiny.num_ids, *x, any_tiny.num_ids + 266, -1, 2**40]) == alone
    assert any_tiny.decode([]) == ""


def test_encode_refuses_what_is_no_text(byte_level):
    with pytest.raises(TypeError, match="must be a string, found bytes"):
        check_text(b"x")
    with pytest.raises(ValueError, match="lone surrogate .* at character 1"):
        byte_level.encode("a\ud83d")


def test_fault_51_text_that_begins_with_bos_gets_no_second_one(byte_fallback):
    plain = byte_fallback.encode("a")
    assert plain[0] == byte_fallback.bos_id and plain.count(byte_fallback.bos_id) == 1
    assert byte_fallback.encode("<s>a").count(byte_fallback.bos_id) == 1
    # Two that the caller wrote are left alone; without special tokens nothing is touched.
    assert byte_fallback.encode("<s><s>a").count(byte_fallback.bos_id) == 2
    assert byte_fallback.encode("<s><s>a", add_special_tokens=False).count(byte_fallback.bos_id) == 2
    assert byte_fallback.encode("") == [byte_fallback.bos_id]
    assert byte_fallback.encode_all(["a", "<s>a"])[1].count(byte_fallback.bos_id) == 1


def test_save_and_reload(tmp_path, byte_fallback):
    side = {
        "tokenizer_config.json": '{"bos_token": "<s>"}',
        "chat_template.jinja": "{{ bos_token }}\r\né",
        "additional_chat_templates/tool_use.jinja": "tools",
    }
    first = make_tokenizer(byte_fallback_backend(), side)
    save_tokenizer(first, tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.side_files == first.side_files
    assert again.chat_templates == {"default": "{{ bos_token }}\r\né", "tool_use": "tools"}
    assert again.encode("ab é") == first.encode("ab é")
    assert (again.bos_id, again.special_ids) == (first.bos_id, first.special_ids)


def test_it_survives_pickling_and_prints_in_one_line(byte_fallback):
    again = pickle.loads(pickle.dumps(byte_fallback))
    assert again.encode("ab") == byte_fallback.encode("ab")
    assert repr(again) == "Tokenizer(267 ids, byte_fallback, chat templates: none)"
