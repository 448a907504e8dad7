"""Calls that end early, by their reader, an interrupt or a failure: the next call finds everything in order."""

import dataclasses
import gc
import threading

import pytest
from tiny_models import GREEDY, plain_greedy, tiny

import fnllm
from fnllm.generation import Call, serve

SMALL = {"max_model_len": 40, "max_num_seqs": 4, "block_size": 4}
PROMPTS = [[5, 6, 7], [8], [5, 6, 7, 9, 10, 11, 12], [3, 1, 2, 4]]
SHORT = dataclasses.replace(GREEDY, max_tokens=6)


def ids(done) -> list[tuple[int, ...]]:
    return [one.token_ids for one in done]


def machine_of(params: fnllm.Params, **options):
    return fnllm.engine(params, **options).machine


def is_empty(machine) -> bool:
    """Whether the machine's last state holds no sequence, and no block is in use."""
    metrics = fnllm.scheduler.metrics(machine.idle.scheduler)
    return not list(machine.idle.scheduler.sequences.items()) and metrics.blocks_held == 0


def test_a_call_cut_short_settles_before_another_thread_may_step(monkeypatch):
    """As by Ctrl-C between two completions: what still runs is dropped while the machine is the call's own."""
    free = []
    usual = fnllm.machine.Machine.rest_at

    def rest_at(machine, state):
        def locked():
            taken = machine.lock.acquire(blocking=False)
            if taken:
                machine.lock.release()
            free.append(taken)

        other = threading.Thread(target=locked)
        other.start()
        other.join()
        usual(machine, state)

    monkeypatch.setattr(fnllm.machine.Machine, "rest_at", rest_at)
    sampling = [dataclasses.replace(GREEDY, max_tokens=tokens) for tokens in (2, 20)]
    call = Call(PROMPTS[:2], sampling, None, (), None, None, None, "raise", SMALL)
    chunks = serve(tiny(), call, progress=False, live=False)
    assert next(chunks).index == 0
    chunks.close()
    assert free == [False, False]  # as it begins and as it ends


def test_stopping_early_leaves_everything_usable():
    params = tiny(3)
    expected = [plain_greedy(params, prompt, 6) for prompt in PROMPTS]
    for chunk in fnllm.stream(params, PROMPTS, SHORT, **SMALL):
        if chunk.token_ids:
            break
    gc.collect()
    assert is_empty(machine_of(params, **SMALL))
    assert ids(fnllm.generate(params, PROMPTS, SHORT, **SMALL)) == expected


def test_an_interrupt_of_the_reader_leaves_everything_usable():
    params = tiny(4)
    with pytest.raises(KeyboardInterrupt):
        for _ in fnllm.stream(params, PROMPTS, SHORT, **SMALL):
            raise KeyboardInterrupt
    assert ids(fnllm.generate(params, PROMPTS, SHORT, **SMALL)) == [plain_greedy(params, p, 6) for p in PROMPTS]


@pytest.mark.parametrize("where", ["execute", "apply", "features_for"])
@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_inside_a_step_leaves_no_sequence_behind(monkeypatch, where, step, raised):
    params = tiny(5)
    expected = [plain_greedy(params, p, 6) for p in PROMPTS]
    machine = machine_of(params, **SMALL)
    whole, calls = getattr(machine, where), []

    def broken(*args):
        calls.append(None)
        if len(calls) == step:
            raise raised
        return whole(*args)

    monkeypatch.setattr(machine, where, broken)
    with pytest.raises(raised):
        fnllm.generate(params, PROMPTS, SHORT, **SMALL)
    monkeypatch.undo()
    assert is_empty(machine)
    assert ids(fnllm.generate(params, PROMPTS, SHORT, **SMALL)) == expected


def test_the_first_error_of_a_lost_device_is_the_one_raised(monkeypatch):
    """What it says to those who ask it again neither hides that nor keeps the meter open."""
    params, launches, closed = tiny()._replace(workspace={}), [], []
    launch = fnllm.engines.Engine.launch

    def lost(self, state):
        launches.append(None)
        if len(launches) == 3:
            raise MemoryError("the first")
        return launch(self, state)

    def asked_again(self, state, flight):
        raise RuntimeError("the second")

    monkeypatch.setattr(fnllm.engines.Engine, "launch", lost)
    monkeypatch.setattr("fnllm.generation.Meter.close", lambda self: closed.append(None))
    monkeypatch.setattr("fnllm.machine.Machine.asynchronous", True)
    collect = fnllm.engines.Engine.collect

    def once(self, state, flight):
        monkeypatch.setattr(fnllm.engines.Engine, "collect", asked_again)
        return collect(self, state, flight)

    monkeypatch.setattr(fnllm.engines.Engine, "collect", once)
    with pytest.raises(MemoryError, match="the first"):
        fnllm.generate(params, PROMPTS, SHORT, progress=True, **SMALL)
    assert closed == [None]
    assert machine_of(params, **SMALL).idle is None


def test_a_failing_layer_leaves_no_sequence_behind():
    params, calls = tiny(6), []

    def failing(p, x, ctx):
        calls.append(None)
        if len(calls) == 5:
            raise ArithmeticError("not today")
        return fnllm.layers.mlp(p, x, ctx)

    layers = fnllm.Layers()._replace(mlp=failing)
    with pytest.raises(ArithmeticError):
        fnllm.generate(params, PROMPTS, SHORT, layers=layers, **SMALL)
    assert is_empty(machine_of(params, **SMALL))
    expected = [plain_greedy(params, p, 6) for p in PROMPTS]
    assert ids(fnllm.generate(params, PROMPTS, SHORT, layers=layers, **SMALL)) == expected
    assert ids(fnllm.generate(params, PROMPTS, SHORT, **SMALL)) == expected


def test_refused_arguments_keep_the_prefix_cache():
    params, prompt = tiny(8), PROMPTS[2]
    fnllm.generate(params, prompt, SHORT, **SMALL)
    with pytest.raises(ValueError):
        fnllm.generate(params, [prompt, list(range(41)) * 2], SHORT, **SMALL)
    assert fnllm.generate(params, prompt, SHORT, **SMALL)[0].cached_tokens == 4


def test_two_streams_and_a_call_between_their_steps():
    """Calls on one machine may interleave: what one wrote over, another computes again."""
    params = tiny(2)
    options = {**SMALL, "num_blocks": 10}
    expected = [plain_greedy(params, p, 6) for p in PROMPTS]
    one, two = (fnllm.stream(params, PROMPTS, SHORT, **options) for _ in range(2))
    done: list[dict[int, tuple[int, ...]]] = [{}, {}]
    running = [(one, done[0]), (two, done[1])]
    while running:
        for entry in list(running):
            chunk = next(entry[0], None)
            if chunk is None:
                running.remove(entry)
            elif chunk.finished:
                entry[1][chunk.index] = chunk.completion.token_ids
        if len(running) == 2:
            assert ids(fnllm.generate(params, PROMPTS[3], SHORT, **options)) == expected[3:]
    assert [[found[i] for i in range(4)] for found in done] == [expected, expected]
