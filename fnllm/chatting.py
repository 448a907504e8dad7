"""A chat on the terminal: messages in, answers streamed out, the history kept as a value (effect: reads, prints)."""

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Messages = tuple[Mapping[str, Any], ...]

HELP = "/clear starts a new chat, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


NO_TEMPLATE = (
    "this model has no chat template, so it cannot chat (the demo model, which runs without --model, only continues "
    "text: fnllm generate). Choose another: --model smollm2/, made by pip install gguf and then "
    "python examples/make_smollm2.py smollm2/, or a hub id such as --model Qwen/Qwen3-0.6B"
)


@dataclass
class Interrupt:
    """Whether Ctrl-C was pressed since the answer began."""

    hit: bool = False


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Within it, the first Ctrl-C is noted, so that the engine can finish its step; the second one raises."""
    interrupt = Interrupt()

    def note(signum: int, frame: Any) -> None:
        if interrupt.hit:
            raise KeyboardInterrupt
        interrupt.hit = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def chat(
    params: Any,
    sampling: Any,
    *,
    system: str | None = None,
    chat_options: Mapping[str, Any] | None = None,
    engine_options: Mapping[str, Any] | None = None,
) -> int:
    """Read messages and answer them until /exit. Raises ValueError for a model that cannot chat."""
    if params.tokenizer is None or not params.tokenizer.chat_templates:
        raise ValueError(NO_TEMPLATE)
    with contextlib.suppress(ImportError):  # not on every system; it only gives line editing
        import readline  # noqa: F401
    beginning: Messages = ({"role": "system", "content": system},) if system else ()
    history = beginning
    print(HELP, file=sys.stderr)
    while (text := ask()) is not None:
        command = text.strip()
        if command in ("/exit", "/quit"):
            break
        if command == "/clear":
            history = beginning
        elif command.startswith("/"):
            print(f"{command.split()[0]} is no command: {HELP}", file=sys.stderr)
        elif command:
            history = turn(params, sampling, history, text, chat_options or {}, engine_options or {})
    return 0


def ask() -> str | None:
    """The next line typed, None at the end of the input; Ctrl-C throws away what was typed."""
    try:
        return input("> ")
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print(f"\n{HELP}", file=sys.stderr)
        return ""


def turn(
    params: Any,
    sampling: Any,
    history: Messages,
    text: str,
    chat_options: Mapping[str, Any],
    engine_options: Mapping[str, Any],
) -> Messages:
    """Answer one message on the terminal; returns the chat with both. A refused message leaves the chat as it was."""
    import fnllm

    asked: Messages = (*history, {"role": "user", "content": text})
    answer: list[str] = []
    try:
        chunks: Any = fnllm.stream(params, [list(asked)], sampling, chat=dict(chat_options), **engine_options)
        with interruptible() as interrupt, contextlib.closing(chunks):
            for chunk in chunks:
                print(chunk.text, end="", flush=True)
                answer.append(chunk.text)
                if interrupt.hit:
                    break
    except (ValueError, TypeError) as error:
        print(f"fnllm: {' '.join(str(error).split())} (/clear begins anew)", file=sys.stderr)
        return history
    except KeyboardInterrupt:
        pass
    print()
    return (*asked, {"role": "assistant", "content": "".join(answer)})
