"""Chat templates: where they are found, what they may do, and that transformers renders the same."""

import json
from datetime import datetime

import pytest

from fnllm_weights import chat_template
from fnllm_weights.tokenizer import load_tokenizer, make_tokenizer

from .conftest import CHATML, byte_fallback_backend, byte_level_backend

HI = [{"role": "user", "content": "hi"}]


def with_template(source, **more):
    config = {"chat_template": source, **more}
    return make_tokenizer(byte_level_backend(), {"tokenizer_config.json": json.dumps(config)})


def text(source, messages=HI, **options):
    return with_template(source).chat_text(messages, **options)


def test_the_config_field_is_the_template():
    tokenizer = with_template(CHATML)
    assert tokenizer.chat_text(HI) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat_text(HI, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    ids = tokenizer.chat(HI)
    assert ids.count(tokenizer.token_id("<|im_start|>")) == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.chat_text(HI)


def test_named_templates_and_tools():
    tokenizer = with_template([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
    assert tokenizer.chat_text(HI) == "plain"
    assert tokenizer.chat_text(HI, tools=[{"type": "function"}]) == "tools"
    assert text("{{ tools | length }}", tools=[{"a": 1}, {"b": 2}]) == "2"


def test_the_jinja_file_wins_over_the_field(tmp_path):
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    assert load_tokenizer(tmp_path).chat_text(HI) == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert load_tokenizer(tmp_path).chat_text(HI) == "new"


def test_the_thinking_switch_is_given_only_when_set():
    source = "{{ 'unset' if enable_thinking is not defined else enable_thinking }}"
    assert [text(source, enable_thinking=value) for value in (None, True, False)] == ["unset", "True", "False"]


def test_other_variables_and_special_tokens_reach_the_template():
    assert with_template("{{ eos_token }}{{ custom }}", eos_token="<|im_end|>").chat_text(HI, custom=7) == "<|im_end|>7"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("custum", "no variable 'custum'; did you mean custom"),
        ("tokenize", "no variable 'tokenize'; it reads custom, messages$"),
    ],
)
def test_a_variable_the_template_does_not_have_is_an_error(given, match):
    source = "{% set ns = namespace(x=1) %}{{ messages | length }}{{ custom }}{{ ns.x }}"
    with pytest.raises(TypeError, match=match):
        text(source, **{given: 1})
    assert text(source, enable_thinking=False, custom=5) == "151"


def test_helpers_of_published_templates():
    assert text("{{ {'a': '<b> & é'} | tojson }}") == '{"a": "<b> & é"}'
    assert text("{{ [1, 2] | tojson(indent=1) }}") == "[\n 1,\n 2\n]"
    assert text("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert text("{% for m in [1, 2, 3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}") == "13"
    assert text("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\n") == "x\n"
    assert text("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abhic"
    assert text("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ dict(a=1).a }}") == "21"


def test_a_template_may_refuse():
    with pytest.raises(ValueError, match="refused the messages: roles must alternate"):
        text("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{% set ns = namespace(__init__=1) %}",
        "{{ dict.__bases__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source):
    messages = [dict(HI[0])]
    try:
        shown = text(source, messages)
    except (ValueError, OverflowError) as error:
        assert "template" in str(error)
    else:
        assert shown == ""  # an unsafe attribute that is only printed is undefined
    assert messages == HI


def test_a_broken_template_is_named_when_used():
    tokenizer = with_template("{% for %}")  # loading works: text prompts need no template
    with pytest.raises(ValueError, match="no valid Jinja template"):
        tokenizer.chat(HI)


def test_a_failing_template_is_an_error_of_the_request():
    with pytest.raises(ValueError, match="failed on the messages: TypeError"):
        text("{{ messages[0].content + 1 }}")


@pytest.mark.parametrize(
    ("messages", "error", "match"),
    [
        ("hi", TypeError, "a chat is a list of messages, found str"),
        ({"role": "user", "content": "x"}, TypeError, "found dict"),
        ([], ValueError, "no messages"),
        ([*HI, "x"], TypeError, "message 1 must be a dict"),
        ([{"content": "x"}], ValueError, "message 0 has no role"),
        ([{"role": "user", "contents": "x"}], ValueError, r"message 0 needs content .*\['contents', 'role'\]"),
        ([{"role": "user", "content": 3}], ValueError, "message 0 needs content .* found int"),
    ],
)
def test_what_is_no_chat_is_refused(messages, error, match):
    with pytest.raises(error, match=match):
        chat_template.check_messages(messages)
    if error is ValueError:
        with pytest.raises(error, match=match):
            with_template(CHATML).chat(messages)


def test_a_tool_call_needs_no_content():
    chat_template.check_messages([{"role": "assistant", "tool_calls": [{"name": "f"}]}])


def test_fault_51_a_template_that_writes_bos_gives_one(byte_fallback):
    config = {"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    tokenizer = make_tokenizer(byte_fallback_backend(), {"tokenizer_config.json": json.dumps(config)})
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.chat(chat).count(tokenizer.bos_id) == 1
    assert tokenizer.chat(chat) == tokenizer.encode(tokenizer.chat_text(chat))


def test_transformers_renders_the_same(tmp_path):
    transformers = pytest.importorskip("transformers")
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    source = (
        "{%- for m in messages %}\n    {{- m.role | upper }}: {{ m.content | trim }}\n{% endfor %}\n"
        "{% if tools %}{{ tools | tojson }}{% endif %}{{ eos_token }}"
    )
    config = {"chat_template": source, "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ours = load_tokenizer(tmp_path)
    chat = [{"role": "system", "content": " a <b> "}, {"role": "user", "content": "é\n"}]
    for tools in (None, [{"type": "function", "function": {"name": "f", "description": "<&>"}}]):
        assert ours.chat_text(chat, tools=tools) == theirs.apply_chat_template(chat, tools=tools, tokenize=False)
        found = theirs.apply_chat_template(chat, tools=tools, return_dict=True)["input_ids"]
        assert ours.chat(chat, tools=tools) == found
