"""Chat templates: messages to text, in a sandbox, with the helpers that published templates expect."""

import difflib
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """`{% generation %}` marks an assistant's words for training; here it only shows what it encloses."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscored names, which templates could use to reach into Python."""

    def __init__(*args: Any, **fields: Any) -> None:
        self, *rest = args  # so that a template may name a field `self`
        values = dict(*rest, **fields)
        for name in values:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the template sets the reserved name {name!r}")


def _new_dict(*args: Any, **fields: Any) -> dict:
    """A plain function in place of the type `dict`, whose attributes a template need not see."""
    return dict(*args, **fields)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a model was not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """The compiled template; ValueError when it is not one. Compiling costs milliseconds, so equal sources share."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_new_dict, namespace=_Namespace
    )
    try:
        return environment.from_string(source)
    except jinja2.exceptions.TemplateError as error:
        raise ValueError(f"the chat template is no valid Jinja template: {error}") from error


@functools.lru_cache(maxsize=32)
def variables_of(source: str) -> frozenset[str]:
    """Names that the template reads and does not set itself."""
    environment = compile_template(source).environment
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)) - set(environment.globals))


def check_variables(source: str, names: Iterable[str]) -> None:
    """Raise TypeError for a name that the template does not read: given to it, it would vanish without effect."""
    for name in names:
        if name not in variables_of(source):
            own = sorted(variables_of(source))
            close = difflib.get_close_matches(name, own, n=1)
            advice = f"did you mean {close[0]}?" if close else f"it reads {', '.join(own)}"
            raise TypeError(f"the chat template has no variable {name!r}; {advice}")


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """The prompt's text; ValueError with the template's own words when it refuses the messages."""
    template = compile_template(source)
    try:
        return template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)
    except jinja2.exceptions.TemplateError as error:
        raise ValueError(f"the chat template refused the messages: {error}") from error
    except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
        raise ValueError(f"the chat template failed on the messages: {type(error).__name__}: {error}") from error


def check_messages(messages: Any) -> None:
    """Raise TypeError or ValueError, naming the message, unless this is a chat: dicts with role and content."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"a chat is a list of messages, found {type(messages).__name__}")
    if not messages:
        raise ValueError("the chat has no messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(
                f"message {i} must be a dict with role and content, found {type(message).__name__} {message!r}"
            )
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} has no role (a string such as 'user'); its keys are {sorted(message)}")
        # An assistant's tool call may carry no words, and some templates take content in parts.
        if not isinstance(message.get("content"), (str, list, tuple)) and not message.get("tool_calls"):
            found = type(message["content"]).__name__ if "content" in message else f"the keys {sorted(message)}"
            raise ValueError(f"message {i} needs content (a string), found {found}")
