"""The command line with the engine replaced: what is asked of it, what is printed, how errors and Ctrl-C end."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import fnllm
from fnllm import chatting, cli, launch
from fnllm.completion import Chunk, Completion, Timings
from fnllm.sampling import Sampling

DONE = Completion(
    text="one two",
    token_ids=(1, 2),
    finish_reason="length",
    prompt_tokens=3,
    timings=Timings(queued=0.0, first_token=0.1, total=0.2),
)


class Api:
    """Stands for `fnllm.load` and `fnllm.stream`, and remembers what was asked."""

    def __init__(self, pieces=("one", " two"), error=None, templates=("default",)):
        self.pieces, self.error, self.calls, self.closed = pieces, error, [], 0
        tokenizer = SimpleNamespace(chat_templates=dict.fromkeys(templates, "x"))
        config = SimpleNamespace(generation_defaults=(("temperature", 0.6), ("top_k", 20)))
        self.params = SimpleNamespace(config=config, tokenizer=tokenizer)

    def load(self, path=None, **options):
        self.calls.append(("load", path, options))
        if isinstance(self.error, OSError):
            raise self.error
        return self.params

    def stream(self, params, prompts, sampling, **options):
        assert params is self.params
        self.calls.append(("stream", prompts, sampling, options))
        if self.error is not None:
            raise self.error
        return self.chunks(sampling.n)

    def chunks(self, n):
        try:
            for piece in self.pieces:
                for sample in range(n):
                    yield Chunk(index=0, sample=sample, text=piece if n == 1 else f"{piece}{sample}")
            for sample in range(n):
                yield Chunk(index=0, sample=sample, completion=DONE)
        finally:
            self.closed += 1


@pytest.fixture
def api(monkeypatch):
    return use(monkeypatch, Api())


def use(monkeypatch, api):
    monkeypatch.setitem(vars(fnllm), "load", api.load)
    monkeypatch.setitem(vars(fnllm), "stream", api.stream)
    monkeypatch.delenv("RANK", raising=False)
    return api


def type_in(monkeypatch, *lines):
    """What a person types at the prompts; an exception is raised in place of a line."""
    waiting = list(lines)

    def read(prompt=""):
        if not waiting:
            raise EOFError
        line = waiting.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)


def test_generate_prints_the_text_and_asks_for_what_was_given(api, capsys):
    assert (
        cli.main(
            [
                "generate",
                "Hello",
                "--max-tokens",
                "5",
                "--temperature",
                "0",
                "--seed",
                "3",
                "--stop",
                r"a\nb",
                "--stop",
                "c",
                "--model",
                "m",
                "--dtype",
                "float32",
                "--device",
                "cpu",
                "--compile",
                "none",
            ]
        )
        == 0
    )
    assert capsys.readouterr() == ("one two\n", "")
    load, stream = api.calls
    assert load == ("load", "m", {"dtype": "float32", "device": "cpu"})
    # the checkpoint's own top_k, the caller's temperature
    sampling = Sampling(max_tokens=5, temperature=0, top_k=20, seed=3, stop=["a\nb", "c"])
    assert stream == ("stream", ["Hello"], sampling, {"compile": "none"})


def test_without_options_the_demo_model_and_the_checkpoints_settings(api):
    assert cli.main(["generate", "Hello"]) == 0
    assert api.calls == [("load", None, {}), ("stream", ["Hello"], Sampling(temperature=0.6, top_k=20), {})]


def test_info_without_a_path_is_of_the_demo_model(capsys):
    assert cli.main(["info"]) == 0
    assert "parameters  5,770,880" in capsys.readouterr().out


def test_chat_prompt_and_several_samples(api, capsys):
    assert cli.main(["generate", "Hi", "--chat", "--n", "2"]) == 0
    assert api.calls[1][1] == [[{"role": "user", "content": "Hi"}]]
    assert capsys.readouterr().out == "one0 two0\none1 two1\n"


def test_the_prompt_may_come_from_standard_input(api, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped\n"))
    assert cli.main(["generate"]) == 0
    assert api.calls[1][1] == ["piped\n"]


def test_a_terminal_gets_a_summary(api, monkeypatch, capsys):
    monkeypatch.setattr("fnllm.progress.is_terminal", lambda stream: True)
    cli.main(["generate", "x"])
    assert capsys.readouterr().err == "[length after 2 tokens, prefill 30 tok/s, decode 10 tok/s]\n"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["generate", "x", "--top-p", "3"], "fnllm: top_p must be a finite number > 0 and <= 1, found 3"),
        (["generate", "x", "--max-tokens", "-1"], "fnllm: max_tokens must be an integer of 0 or more, found -1"),
        (["generate", "x", "--tp", "0"], "fnllm: --tp must be 1 or more, found 0"),
        (["chat", "--n", "2"], "fnllm chat: there is no --n; did you mean"),
        (
            ["generate", "x", "--temprature", "1"],
            "fnllm generate: there is no --temprature; did you mean --temperature?",
        ),
        (["generate", "x", "--max-tokens", "2.5"], "fnllm generate: argument --max-tokens: invalid int value: '2.5'"),
        (["generate", "x", "--temp", "1"], "fnllm generate: there is no --temp"),
        (["fly"], "fnllm: argument COMMAND: invalid choice: 'fly'"),
        ([], "fnllm: the following arguments are required: COMMAND"),
        (["info", "/no/such/folder"], "fnllm: "),
    ],
)
def test_errors_are_one_line_and_exit_code_2_before_a_model_is_loaded(api, capsys, argv, line):
    try:
        code = cli.main(argv)
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(line)
    assert api.calls == []


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError("no file\n  x"), "fnllm: no file x\n"),
        (ValueError("prompt too long"), "fnllm: prompt too long\n"),
        (RuntimeError("out of memory"), "fnllm: RuntimeError: out of memory (fnllm --traceback ... shows where)\n"),
    ],
)
def test_errors_of_the_engine_are_one_line(monkeypatch, capsys, error, line):
    use(monkeypatch, Api(error=error))
    assert cli.main(["generate", "x"]) == 2
    assert capsys.readouterr().err == line
    with pytest.raises(type(error)):
        cli.main(["--traceback", "generate", "x"])


def test_ctrl_c_while_generating(monkeypatch, capsys):
    use(monkeypatch, Api(error=KeyboardInterrupt()))
    assert cli.main(["generate", "x"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_no_prompt_on_a_terminal_is_an_error(api, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert cli.main(["generate"]) == 2
    assert "there is no prompt" in capsys.readouterr().err


def test_bench_gets_its_own_arguments(monkeypatch):
    seen = []
    monkeypatch.setitem(sys.modules, "fnllm.bench", SimpleNamespace(main=lambda args: seen.append(args)))
    monkeypatch.setattr(fnllm, "bench", sys.modules["fnllm.bench"], raising=False)
    assert cli.main(["bench", "--help", "--batch", "4"]) == 0
    assert cli.main(["--traceback", "bench", "--batch", "4"]) == 0
    assert seen == [["--help", "--batch", "4"], ["--batch", "4"]]


def test_chat_keeps_the_history(api, monkeypatch, capsys):
    type_in(monkeypatch, "Hi", "", "And?", "/clear", "Again", "/exit", "never read")
    assert cli.main(["chat", "--system", "Be brief.", "--no-think", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == "one two\n" * 3
    system = {"role": "system", "content": "Be brief."}
    first = [system, {"role": "user", "content": "Hi"}]
    second = [*first, {"role": "assistant", "content": "one two"}, {"role": "user", "content": "And?"}]
    third = [system, {"role": "user", "content": "Again"}]
    assert [call[1] for call in api.calls[1:]] == [[first], [second], [third]]
    assert api.calls[1][2:] == (Sampling(temperature=0.6, top_k=20, max_tokens=9), {"chat": {"enable_thinking": False}})


def test_chat_ends_with_the_input_and_knows_its_commands(api, monkeypatch, capsys):
    type_in(monkeypatch, "/nothing", KeyboardInterrupt())
    assert cli.main(["chat"]) == 0
    assert "/nothing is no command" in capsys.readouterr().err
    assert len(api.calls) == 1  # only the load


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(monkeypatch, capsys):
    api = use(monkeypatch, Api(pieces=("one", " two", " three")))
    plain = api.chunks

    def chunks(n):
        for place, chunk in enumerate(plain(n)):
            if place == 1 and len(api.calls) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield chunk

    api.chunks = chunks
    before = signal.getsignal(signal.SIGINT)
    type_in(monkeypatch, "Hi", "More")
    assert cli.main(["chat"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert capsys.readouterr().out.startswith("one two\none two three\n")
    # the engine's generator was closed, and the part that was shown is part of the chat
    assert api.closed == 2
    assert api.calls[2][1][0][1] == {"role": "assistant", "content": "one two"}


def test_a_refused_message_leaves_the_chat_as_it_was(monkeypatch, capsys):
    api = use(monkeypatch, Api())
    type_in(monkeypatch, "too long", "Hi")
    plain = api.stream

    def stream(params, prompts, sampling, **options):
        if prompts[0][-1]["content"] == "too long":
            raise ValueError("the prompt does not fit")
        return plain(params, prompts, sampling, **options)

    monkeypatch.setitem(vars(fnllm), "stream", stream)
    assert cli.main(["chat"]) == 0
    assert "fnllm: the prompt does not fit (/clear begins anew)" in capsys.readouterr().err
    assert api.calls[1][1] == [[{"role": "user", "content": "Hi"}]]


def test_a_model_without_chat_template_is_refused(monkeypatch, capsys):
    use(monkeypatch, Api(templates=()))
    assert cli.main(["chat"]) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_chat_without_a_model_names_one_that_can(capsys):
    """The demo model itself, with nothing put in its place."""
    assert cli.main(["chat", "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert "only continues text" in told and "--model smollm2/" in told and "examples/make_smollm2.py" in told
    assert (Path(__file__).parents[2] / "examples" / "make_smollm2.py").exists()


def test_the_second_ctrl_c_raises():
    with pytest.raises(KeyboardInterrupt), chatting.interruptible() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.hit
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("typed", "text"), [(r"a\nb", "a\nb"), (r"\t", "\t"), (r"\\n", r"\n"), (r"\x\é", r"\x\é"), ("\\", "\\")]
)
def test_escapes_in_stop_strings(typed, text):
    assert cli.unescaped(typed) == text


def test_help_and_import_do_not_wait_for_torch():
    code = (
        "import sys, fnllm.cli\ntry: fnllm.cli.main(['generate', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--temperature" in done.stdout


def test_tp_starts_one_process_per_rank(api, monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "run", lambda *args: seen.append(args) or 0)
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped"))
    argv = ["generate", "--tp", "2"]
    assert cli.main(argv) == 0
    assert seen == [(argv, 2, "piped")]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main([*argv, "Hello"]) == 0
    assert len(seen) == 1 and api.calls[1][1] == ["Hello"]


def test_only_the_first_rank_prints(api, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["generate", "x"]) == 0
    assert capsys.readouterr().out == ""
