"""The environment of a call: threads, copies of params, torch's modes and defaults, extreme float32 settings."""

import contextlib
import copy
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from tiny_models import tiny

import fnllm
from fnllm.ambient import set_aside
from fnllm.distributed import agree
from fnllm.engines import Engine
from fnllm.machine import Machine, Unbuilt
from fnllm_weights import Shard

PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8], [9]]
SMALL = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 4, "num_blocks": 40}
GREEDY = fnllm.Sampling(temperature=0, max_tokens=12, ignore_eos=True)
BUSY = fnllm.Sampling(
    temperature=0.8, top_p=0.9, top_k=20, repetition_penalty=1.1, logit_bias={3: 1.0}, min_tokens=2, logprobs=2, seed=4,
    max_tokens=12, ignore_eos=True, stop_token_ids=(40,), prompt_logprobs=1,
)  # fmt: skip


def fresh(seed=21):
    return tiny(seed)._replace(workspace={})


def run(params, sampling=GREEDY, **options):
    return [one.token_ids for one in fnllm.generate(params, PROMPTS, sampling, **{**SMALL, **options})]


@pytest.mark.parametrize("live", [False, True])
def test_threads_that_share_params_get_what_each_gets_alone(live):
    params, wrong = fresh(), []
    prompts = [[n, n + 1, 2 * n + 1] for n in range(4)]
    wanted = [fnllm.generate(params, one, GREEDY, **SMALL)[0].token_ids for one in prompts]

    def work(number):
        for _ in range(4):
            if live:
                chunks = list(fnllm.stream(params, [prompts[number]], GREEDY, **SMALL))
                found = tuple(id for chunk in chunks for id in chunk.token_ids)
            else:
                found = fnllm.generate(params, [prompts[number]], GREEDY, **SMALL)[0].token_ids
            if found != wanted[number]:
                wrong.append((number, found))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_streams_in_threads_come_on_though_each_prompt_takes_several_steps(monkeypatch):
    params, found, steps = fresh(), {}, []
    prompts = [list(range(1 + 12 * n, 13 + 12 * n)) for n in range(2)]
    options = {**SMALL, "max_num_batched_tokens": 4}
    wanted = [fnllm.generate(params, one, GREEDY, **options)[0].token_ids for one in prompts]
    usual = Engine.launch

    def launch(engine, state):
        steps.append(threading.get_ident())
        assert len(steps) < 400, "the threads write over each other's prompts"
        launched = usual(engine, state)
        time.sleep(0.001)  # the other thread takes the machine, where it may
        return launched

    def work(number):
        chunks = fnllm.stream(params, [prompts[number]], GREEDY, **options)
        found[number] = tuple(id for chunk in chunks for id in chunk.token_ids)

    monkeypatch.setattr(Engine, "launch", launch)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(2)] == wanted


def test_threads_that_begin_together_share_one_machine(monkeypatch):
    params, made, found = fresh(), [], []

    class Slow(Machine):
        def __init__(self, *args):
            made.append(self)
            time.sleep(0.1)
            super().__init__(*args)

    monkeypatch.setattr("fnllm.workspace.Machine", Slow)
    threads = [threading.Thread(target=lambda: found.append(run(params))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and found == [run(fresh())] * 3


def test_a_machine_that_cannot_be_built_keeps_no_thread_waiting():
    params = fresh()
    for _ in range(2):
        with pytest.raises(ValueError, match="max_model_len"):
            run(params, max_model_len=10**6)
    assert run(params) == run(fresh())


def test_a_thread_that_waited_for_a_machine_that_cannot_be_built_tries_by_itself(monkeypatch):
    params, made, found = fresh(), [], []
    begun = threading.Event()

    class Failing(Machine):
        def __init__(self, *args):
            made.append(self)
            begun.set()
            time.sleep(0.1)
            if len(made) == 1:
                raise MemoryError
            super().__init__(*args)

    def first():
        with pytest.raises(MemoryError):
            run(params)

    monkeypatch.setattr("fnllm.workspace.Machine", Failing)
    thread = threading.Thread(target=first)
    thread.start()
    begun.wait(60)
    copied = copy.deepcopy(params)  # while it is being built
    second = threading.Thread(target=lambda: found.append(run(params)))
    second.start()
    thread.join()
    second.join()
    assert len(made) == 2 and found == [run(fresh())] == [run(pickle.loads(pickle.dumps(copied)))]


def test_a_call_goes_on_from_where_another_rested_even_if_a_third_takes_it(monkeypatch):
    params = fresh()
    wanted = run(params)
    (machine,) = params.workspace.values()
    looks = iter([machine.idle])  # what the first look finds, and nothing after it
    monkeypatch.setattr(
        Machine, "idle", property(lambda self: next(looks, None), lambda self, state: None), raising=False
    )
    assert run(params) == wanted


def test_an_error_in_one_thread_leaves_the_machine_to_the_others():
    params = fresh()

    def broken(logits, history):
        if int(history.lengths.max()) > 4:
            raise KeyError("mine")
        return logits

    def work():
        with pytest.raises(KeyError):
            fnllm.generate(params, [[1, 2]], fnllm.Sampling(logits_fn=broken), **SMALL)

    kept = []  # as a notebook does, so that the frames of the call live on
    try:
        fnllm.generate(params, [[1, 2]], fnllm.Sampling(logits_fn=broken), **SMALL)
    except KeyError as error:
        kept.append(error)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert kept and not thread.is_alive()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["deepcopy", "pickle"])
def test_copies_of_params_are_free_of_the_engines_of_the_original(copied):
    params = fresh()
    wanted = run(params)
    other = copied(params)
    assert run(other) == wanted
    (machine,), (theirs,) = params.workspace.values(), other.workspace.values()
    assert theirs is not machine
    other.tree["layers"][0]["down"].zero_()
    fnllm.weights_changed(other)
    assert run(params) == wanted != run(other)


def test_ranks_agree_on_params_that_are_copies(monkeypatch):
    """A copy has nothing built in the places of the original's machines."""
    params = tiny(24)._replace(workspace={})
    run(params)
    other = copy.deepcopy(params)._replace(shard=Shard(0, 2))
    assert [type(place) for place in other.workspace.values()] == [Unbuilt]
    monkeypatch.setattr("fnllm.distributed.world", lambda shard: None)
    monkeypatch.setattr("fnllm.distributed.exchange_numbers", lambda tp, device, numbers: [numbers, numbers])
    assert agree(other, 5, prompts=PROMPTS) == 5


MODES = {
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "grad": torch.enable_grad,
    "another device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("sampling", [GREEDY, BUSY], ids=["greedy", "busy"])
@pytest.mark.parametrize("mode", MODES)
def test_an_engine_built_in_a_mode_works_in_it_and_outside(mode, sampling):
    wanted, params = run(fresh(), sampling), fresh()
    with MODES[mode]():
        assert run(params, sampling) == wanted
    assert run(params, sampling) == wanted
    with MODES[mode]():
        assert run(params, BUSY) == run(params, BUSY)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
def test_the_engines_gpu_is_the_current_one_while_it_works(mode, monkeypatch):
    """Kernels, graphs and events go to the current GPU, whichever one the tensors are on."""
    now = [0]

    @contextlib.contextmanager
    def device(wanted):
        now.append(wanted.index)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    with mode():
        for index in (1, 0):
            with set_aside(torch.device("cuda", index)):
                assert torch.cuda.current_device() == index and not torch.is_inference_mode_enabled()
            assert now == [0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "options", [{"compile": "none"}, {"compile": "graphs"}, {"numerics": "batch_invariant"}], ids=str
)
def test_params_on_another_gpu_than_the_current_one(options):
    found = []
    for device in ("cuda:0", "cuda:1"):
        params = fnllm.load(device=device)
        completions = fnllm.generate(params, PROMPTS, GREEDY, **SMALL, **options)
        numerics = options.get("numerics", "default")
        found.append(
            ([one.token_ids for one in completions], fnllm.score(params, PROMPTS[:1], numerics=numerics)[0].cpu())
        )
        assert torch.cuda.current_device() == 0
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("mode", ["inference", "autocast"])
def test_steps_are_prepared_in_no_mode_of_the_callers_and_by_one_thread(mode, monkeypatch):
    """What a graph reads is made there, and written by later steps."""
    worker, found = fnllm.engine(fresh(), **SMALL), []

    def prepare(machine, *args):
        lock_free = []
        thread = threading.Thread(target=lambda: lock_free.append(machine.lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        found.append((torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), *lock_free))

    monkeypatch.setattr(Machine, "prepare", prepare)
    with MODES[mode]():
        worker.prepare(GREEDY)
    assert found == [(False, False, False)]


def test_autocast_changes_no_prompts_logprobs():
    params = fresh()
    plain = fnllm.generate(params, PROMPTS, BUSY, **SMALL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = fnllm.generate(params, PROMPTS, BUSY, **SMALL)
    assert [one.prompt_logprobs for one in inside] == [one.prompt_logprobs for one in plain]


@pytest.mark.parametrize("mode", MODES)
def test_params_loaded_in_a_mode_can_be_trained_outside(mode, tmp_path):
    fnllm.save(fresh(), tmp_path)
    with MODES[mode]():
        params = fnllm.load(tmp_path, device="cpu")
    weight = params.tree["layers"][0]["down"].requires_grad_()
    fnllm.score(params, PROMPTS)[0].sum().backward()
    assert weight.grad is not None and weight.dtype == torch.float32


def test_another_default_dtype_changes_nothing():
    wanted = run(fresh(), BUSY)
    torch.set_default_dtype(torch.float64)
    try:
        assert run(fresh(), BUSY) == wanted
        assert fnllm.score(fresh(), PROMPTS)[0].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_settings_beyond_float32_are_its_ends():
    flat = [run(fresh(), fnllm.Sampling(temperature=t, seed=3, max_tokens=6, ignore_eos=True)) for t in (1e30, 1e308)]
    assert flat[0] == flat[1] and len(set(flat[0][0])) > 2
    base = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    (never, *_) = run(fresh(), fnllm.Sampling(presence_penalty=1e300, **base))
    assert len(set(never)) == 6
    (always, *_) = run(fresh(), fnllm.Sampling(logit_bias={5: 1e300}, **base))
    assert always == (5,) * 6
    endless = fnllm.Sampling(temperature=0, max_tokens=2**64, min_tokens=2**63, stop_token_ids=(5,), ignore_eos=True)
    assert [len(ids) for ids in run(fresh(), endless)] == [64 - len(prompt) for prompt in PROMPTS]
    (again, *_) = run(fresh(), fnllm.Sampling(repetition_penalty=1e-300, frequency_penalty=-1e300, **base))
    assert len(set(again)) == 1


def test_sizes_may_be_numpys():
    assert run(fresh(), block_size=np.int64(4)) == run(fresh())
    with pytest.raises(ValueError, match="block_size must be a positive integer, found True"):
        run(fresh(), block_size=True)


def test_a_stop_string_that_no_text_can_have_is_refused():
    with pytest.raises(ValueError, match=r"stop\[1\] has a lone surrogate"):
        fnllm.Sampling(stop=["a", "\ud800"])
