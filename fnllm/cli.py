"""The `fnllm` command: generate, chat, bench, info (effect: loads, generates, prints)."""

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from fnllm import launch

USAGE_ERROR = 2
INTERRUPTED = 130

SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens", "stop", "n")
ENGINE_OPTIONS = ("compile", "max_model_len")


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations and usage dump: an error is one line, with the name that was meant."""

    def __init__(self, **options: Any):
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:  # told here, by the command whose options they are not
            known = [name for action in self._actions for name in action.option_strings]
            close = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
            self.error(f"there is no {unknown[0]}" + (f"; did you mean {close[0]}?" if close else ""))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = Parser(prog="fnllm", description="Run language models: pure functions over parameters.")
    top.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    generate = commands.add_parser("generate", help="complete a prompt")
    generate.add_argument("prompt", nargs="?", help="the text to continue; without it, standard input is read")
    generate.add_argument("--chat", action="store_true", help="the prompt is a user's message, not text to continue")
    generate.add_argument("--n", type=int, help="samples of the prompt")
    generate.add_argument("--tp", type=int, default=1, metavar="N", help="split the model over N GPUs of this machine")
    add_model_options(generate)
    add_sampling_options(generate)

    chat = commands.add_parser("chat", help="talk with a model; /exit leaves, /clear restarts, Ctrl-C stops an answer")
    chat.add_argument("--system", help="a system message")
    chat.add_argument("--no-think", action="store_true", help="ask a thinking model to answer at once")
    add_model_options(chat)
    add_sampling_options(chat)

    # Its options are its own: main() hands everything after the name over.
    commands.add_parser("bench", help="measure speed", add_help=False)

    info = commands.add_parser("info", help="describe a checkpoint without loading it")
    info.add_argument("path", nargs="?", help="a checkpoint folder or hub id; default: the small demo model")
    return top


def add_model_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", metavar="PATH", help="checkpoint folder or hub id; default: the small demo model")
    command.add_argument("--dtype", help="float32, bfloat16, ...; default: the checkpoint's on a GPU, float32 on a CPU")
    command.add_argument("--device", help="cpu, cuda, cuda:1, ...; default: a GPU if there is one")
    command.add_argument("--compile", metavar="MODE", help="none, graphs, inductor or reduce-overhead")
    command.add_argument("--max-model-len", type=int, metavar="N", help="most tokens of prompt and answer together")


def add_sampling_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--max-tokens", type=int, metavar="N", help="most new tokens")
    command.add_argument("--temperature", type=float, metavar="T", help="0 always takes the most likely token")
    command.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    command.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the most likely tokens with total probability P"
    )
    command.add_argument("--min-p", type=float, metavar="P", help="drop tokens less likely than P times the best")
    command.add_argument("--repetition-penalty", type=float, metavar="R", help="above 1 discourages repetition")
    command.add_argument("--seed", type=int, help="makes sampling repeatable")
    command.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        type=unescaped,
        help=r"end before this text, where \n and \t stand for newline and tab; may be given several times",
    )


def unescaped(text: str) -> str:
    r"""Text from a shell, where a newline is hard to type: \n, \t and \\ mean what they do in Python.

    >>> unescaped(r"a\nb\\n")
    'a\nb\\n'
    """
    meanings = {"n": "\n", "t": "\t", "\\": "\\"}
    out, rest = "", text
    while "\\" in rest:
        before, _, after = rest.partition("\\")
        known = after[:1] in meanings
        out += before + (meanings[after[0]] if known else "\\")
        rest = after[1:] if known else after
    return out + rest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Errors are one line on stderr, unless --traceback is given."""
    argv = list(sys.argv[1:] if argv is None else argv)
    show_traceback = "--traceback" in argv
    try:
        words = argv[1:] if argv[:1] == ["--traceback"] else argv
        if words[:1] == ["bench"]:
            from fnllm import bench

            return bench.main(words[1:]) or 0
        return run(parser().parse_args(argv), argv)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (| head): not an error, and the interpreter must not flush into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if show_traceback:
            raise
        sys.stdout.flush()
        launch.report(f"fnllm: {one_line(error)}")
        return USAGE_ERROR


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run a parsed command."""
    if args.command == "info":
        from fnllm.inspecting import describe
        from fnllm.loading import DEMO

        print(describe(args.path or str(DEMO)))
        return 0
    checked_early(args)
    if args.command == "chat":
        from fnllm.chatting import chat

        params = load(args)
        chat_options = {"enable_thinking": False} if args.no_think else {}
        return chat(
            params,
            sampling_of(args, params, max_tokens=1024),
            system=args.system,
            chat_options=chat_options,
            engine_options=given(args, ENGINE_OPTIONS),
        )
    if args.tp < 1:
        raise ValueError(f"--tp must be 1 or more, found {args.tp}")
    if args.prompt is None and sys.stdin.isatty():
        raise ValueError('there is no prompt; give one, as in fnllm generate "Once upon a time"')
    if args.tp > 1 and not launch.is_launched():
        text = sys.stdin.read() if args.prompt is None else None  # one process reads it and hands it to every rank
        return launch.run(argv, args.tp, text)
    return generate(args)


def generate(args: argparse.Namespace) -> int:
    """Complete a prompt; text goes to stdout as it comes, how it went to stderr if that is a terminal."""
    import fnllm
    from fnllm.progress import is_terminal

    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    params = load(args)
    sampling = sampling_of(args, params)
    shown = os.environ.get("RANK", "0") == "0"  # every rank makes the same text
    texts: dict[int, list[str]] = {}
    for chunk in fnllm.stream(
        params,
        [[{"role": "user", "content": prompt}] if args.chat else prompt],
        sampling,
        **given(args, ENGINE_OPTIONS),
    ):
        if not shown:
            continue
        if sampling.n == 1:
            print(chunk.text, end="", flush=True)
        texts.setdefault(chunk.sample, []).append(chunk.text)
        if chunk.completion is not None:
            print("".join(texts[chunk.sample]) if sampling.n > 1 else "")
            if is_terminal(sys.stderr):
                print(summary(chunk.completion), file=sys.stderr)
    return 0


def summary(completion: Any) -> str:
    """One line on how a completion went."""
    rates = (("prefill", completion.prefill_tokens_per_second), ("decode", completion.decode_tokens_per_second))
    parts = [
        f"{completion.finish_reason} after {len(completion.token_ids)} tokens",
        *(f"{name} {value:,.0f} tok/s" for name, value in rates if value is not None),
    ]
    return f"[{', '.join(parts)}]"


def load(args: argparse.Namespace) -> Any:
    """The params that the model options name."""
    import fnllm

    return fnllm.load(args.model, **given(args, ("dtype", "device")))


def checked_early(args: argparse.Namespace) -> None:
    """Find wrong options before a model has been loaded for them."""
    from fnllm.sampling import Sampling

    Sampling(**given(args, SAMPLING_OPTIONS))


def sampling_of(args: argparse.Namespace, params: Any, **defaults: Any) -> Any:
    """The checkpoint's recommended settings under those that were given."""
    from fnllm.sampling import from_defaults

    return from_defaults(params.config.generation_defaults, **{**defaults, **given(args, SAMPLING_OPTIONS)})


def given(args: argparse.Namespace, names: Sequence[str]) -> Mapping[str, Any]:
    """The named options that were given on the command line."""
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}


def one_line(error: Exception) -> str:
    """An error in a line; kinds that are not for users keep their name, and advice on how to see more."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, (ValueError, TypeError, OSError, ImportError)):
        return text
    return f"{type(error).__name__}: {text} (fnllm --traceback ... shows where)"


if __name__ == "__main__":
    sys.exit(main())
