"""Unusual calls and arguments: they get an error that names what is wrong, or the result that was meant."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from tiny_models import GREEDY, drain, tiny

import fnllm
from fnllm import Capture, Sampling

IDS = [5, 6, 7, 9, 10]
SMALL = {"max_model_len": 40, "max_num_seqs": 3, "block_size": 4, "num_blocks": 20}
SHORT = dataclasses.replace(GREEDY, max_tokens=6)
SITE = "layers.0.resid_post"


def engine(**options):
    return fnllm.engine(tiny(), **{**SMALL, **options})


def generate(**options):
    return fnllm.generate(options.pop("params", tiny()), IDS, SHORT, **SMALL, **options)[0]


def add(worker, **options):
    return fnllm.add(worker.init(), worker.request(IDS, SHORT, **options))


@dataclasses.dataclass
class Unhashable:
    """As dataclasses are unless they are frozen."""

    def __call__(self, *args):
        return args[0]


WRONG = {
    "no params": (lambda: generate(params=None), TypeError, "params must be what fnllm.load returns, found NoneType"),
    "a path": (lambda: generate(params="demo/"), TypeError, r"params must be .*; load it first: fnllm.load\('demo/'\)"),
    "a path to score": (lambda: fnllm.score("demo/", [IDS]), TypeError, "params must be"),
    "a path for an engine": (lambda: fnllm.engine("demo/"), TypeError, "params must be"),
    "layers": (lambda: generate(layers=3), TypeError, "layers must be a fnllm.Layers.* found int"),
    "the class": (lambda: generate(layers=fnllm.Layers), TypeError, "layers must be a fnllm.Layers.* found type"),
    "a layer": (lambda: engine(layers=fnllm.Layers()._replace(mlp=None)), TypeError, "layers.mlp must be a function"),
    "capture": (lambda: generate(capture=3), TypeError, "capture must be sites.*found 3"),
    "sites": (lambda: Capture(3), TypeError, "sites must be a name or several.*found 3"),
    "positions": (lambda: Capture(SITE, 1.5), TypeError, "positions must be one of.*found 1.5"),
    "a mask": (lambda: Capture(SITE, torch.tensor([True, False])), TypeError, "positions must be one of.*or integers"),
    "a bool position": (lambda: Capture(SITE, [True]), TypeError, "positions must be one of"),
    "direction": (lambda: fnllm.ablate(SITE, torch.zeros(24)), ValueError, "direction has the length 0.0"),
    "a scale in words": (lambda: fnllm.steer(SITE, torch.ones(24), "2"), TypeError, "scale must be a number, .* '2'"),
    "no vector": (lambda: fnllm.steer(SITE, None), TypeError, "vector must be a tensor, or .*; found None"),
    "several vectors": (
        lambda: fnllm.steer(SITE, [torch.ones(24)] * 2), TypeError, "vector must be .* found list: torch.stack makes",
    ),
    "no direction": (lambda: fnllm.ablate(SITE, "x"), TypeError, "direction must be a tensor, or .*; found 'x'"),
    "no rows to patch": (lambda: fnllm.patch(SITE, None, 0), TypeError, "rows must be a tensor, or .*; found None"),
    "narrow": (
        lambda: generate(edits=fnllm.steer(SITE, torch.ones(3))), ValueError,
        r"add_vector at layers.0.resid_post has values for .* shape \(3,\); a token there has shape \(24,\)",
    ),
    "one head": (
        lambda: generate(edits=fnllm.steer("layers.0.q", torch.ones(4))), ValueError,
        r"has values for activations of shape \(4,\); a token there has shape \(\d+, \d+\)",
    ),
    "a row without an axis": (lambda: fnllm.patch(SITE, torch.ones(24), 0), ValueError, r"single row as rows\[None\]"),
    "no rows": (lambda: fnllm.patch(SITE, torch.ones(0, 24), 0), ValueError, r"at least one row .*\(0, 24\)"),
    "a place before the first": (lambda: fnllm.patch(SITE, torch.ones(1, 24), -1), ValueError, "position counts from"),
    "a place beyond all": (lambda: fnllm.patch(SITE, torch.ones(1, 24), 2**70), ValueError, "position counts .*2..63"),
    "half a place": (lambda: fnllm.steer(SITE, torch.ones(24), start=1.5), TypeError, "start must be an integer"),
    "every layer": (lambda: fnllm.steer("layers.*.q", torch.ones(24)), ValueError, "site must be one name.*each layer"),
    "a number": (lambda: fnllm.Edit(SITE, abs, 1.5), TypeError, "values of the edit at .* torch.tensor makes one"),
    "no edits": (lambda: generate(edits=5), TypeError, "edits must be an Edit, several, .* found 5"),
    "no edits of an engine": (lambda: engine(edits=fnllm.steer), TypeError, "edits must be an Edit.* found function"),
    "no edits of a request": (lambda: engine().request(IDS, SHORT, edits=["a"]), TypeError, r"edits\[0\] must be"),
    "a tensor for an edit": (lambda: generate(edits=[[torch.ones(24)]]), TypeError, r"edits\[0\] must.* found list$"),
    "a layer without a hash": (
        lambda: engine(layers=fnllm.Layers()._replace(mlp=Unhashable())), TypeError,
        "layers.mlp must be hashable.*and Unhashable is not",
    ),
    "an edit without a hash": (lambda: fnllm.Edit(SITE, Unhashable()), TypeError, "apply of the edit at .* hashable"),
    "a logits_fn without a hash": (lambda: Sampling(logits_fn=Unhashable()), TypeError, "logits_fn must be hashable"),
    "experts": (
        lambda: engine(layers=fnllm.Layers()._replace(moe=abs)), ValueError,
        "layers.moe would never run: no layer of this model has experts",
    ),
    "a word for a switch": (lambda: engine(prefix_cache="no"), TypeError, "prefix_cache must be True or False.*'no'"),
    "no switch": (lambda: generate(chunked_prefill=None), TypeError, "chunked_prefill must be True or False.*None"),
    "a share in words": (lambda: engine(utilization="0.5"), TypeError, "utilization must be .* found str '0.5'"),
    "all of it": (lambda: engine(utilization=True), TypeError, "utilization must be a finite .* found bool True"),
    "graphs": (lambda: engine(compile="graphs"), ValueError, "compile='graphs' replays CUDA graphs.*use 'inductor'"),
    "a backend of GPUs": (
        lambda: engine(attention="fa3"), ValueError,
        "attention='fa3' runs on a GPU and the parameters are on a CPU; use 'reference'",
    ),
    "another backend of GPUs": (lambda: generate(attention="triton"), ValueError, "attention='triton' runs on a GPU"),
    "no backend": (lambda: engine(attention="fa4"), ValueError, "attention must be one of reference, .*, found 'fa4'"),
    "no request": (lambda: fnllm.add(engine().init(), IDS), TypeError, "request must be what engine.request returns"),
    "a pair": (lambda: engine().step(add(engine())), TypeError, "state must be a fnllm.State, found tuple: it"),
    "device": (lambda: fnllm.load(device="gpu"), ValueError, "device='gpu' is not known; use 'cpu', 'cuda'"),
    "a number for a prompt": (
        lambda: engine().request(5, SHORT), TypeError, "prompt must be a list of token ids, found int 5",
    ),
    "a text for a prompt": (
        lambda: engine().request("abc", SHORT), TypeError, "found str 'abc'; params.tokenizer.encode makes one",
    ),
    "an empty sequence": (lambda: fnllm.score(tiny(), [[1], []]), ValueError, r"^sequences\[1\]: is empty"),
    "a number for sequences": (lambda: fnllm.score(tiny(), 5), TypeError, "^sequences must be text, .* found int 5"),
    "positions by site": (
        lambda: generate(capture={SITE: "last"}), TypeError, r"capture must be .*Capture\(sites, positions\).* found",
    ),
    "positions by site in a Capture": (lambda: Capture({SITE: "last"}), TypeError, "sites must be a name or several"),
    "max_tokens as an option": (
        lambda: generate(max_tokens=5), TypeError, r"no option 'max_tokens'; write sampling=fnllm.Sampling\(max_tokens",
    ),
    "dtype as an option": (lambda: engine(dtype="float32"), TypeError, r"'dtype'; write fnllm.load\(path, dtype="),
    "no graphs as elsewhere": (lambda: engine(enforce_eager=True), TypeError, "'enforce_eager'; write compile='none'"),
    "no flight": (
        lambda: engine().collect(add(engine())[0], None), TypeError, "flight must be what launch.* found None: .*noth",
    ),
    "a fork of a list": (lambda: fnllm.fork(add(engine())[0], [0]), TypeError, r"seq_id must be an int.*found \[0\]"),
    "an append to a name": (
        lambda: fnllm.append(add(engine())[0], "a", IDS), TypeError, "seq_id must be an integer.*found 'a'",
    ),
    "sampling": (lambda: engine().request(IDS, None), TypeError, "sampling must be a Sampling"),
    "seed": (lambda: engine().request(IDS, SHORT, seed=1.5), ValueError, "seed must be an integer"),
    "sample": (lambda: engine().request(IDS, SHORT, sample=-1), ValueError, "sample must be an integer"),
    "bias": (lambda: engine().request(IDS, Sampling(logit_bias={99: 1})), ValueError, "logit_bias has id 99, outside"),
    "stop": (lambda: engine().request(IDS, Sampling(stop="a")), ValueError, "needs text|for generate and stream"),
    "n": (lambda: engine().request(IDS, Sampling(n=2)), ValueError, "n=2 is for generate and stream.*sample=0, 1"),
    "prompt_logprobs": (lambda: engine().request(IDS, Sampling(prompt_logprobs=1)), ValueError, "use fnllm.score"),
    "fork": (lambda: fnllm.fork(*add(engine()), seed="a"), TypeError, "seed must be an integer"),
    "append": (lambda: fnllm.append(*add(engine()), 5), TypeError, "tokens must be a list of token ids, found int 5"),
    "long": (
        lambda: fnllm.generate(tiny(), [IDS, [1] * 41], SHORT, **SMALL), ValueError,
        r"prompts\[1\]: prompt has 41 tokens and can never run",
    ),
    "an event of too much": (
        lambda: fnllm.event("step", 3), TypeError, r"event 'step' takes \(\) after the state: too many positional",
    ),
    "an event of too little": (
        lambda: fnllm.event("append"), TypeError, r"event 'append' takes \(seq_id.*max_tokens.*: missing a required",
    ),
    "an event's option": (lambda: fnllm.event("add", IDS, SHORT, sed=1), TypeError, "event 'add' takes .*'sed'"),
    "log": (lambda: fnllm.replay(engine(), ["step"]), TypeError, "a log is a list of fnllm.event"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    call, kind, message = WRONG[name]
    # Under shape checking the signatures refuse some of them, before the functions can.
    with pytest.raises((kind, TypeError), match=f"{message}|Type-check error"):
        call()


def test_a_text_is_scored_as_a_text():
    params = fnllm.load(device="cpu")
    text = "In the beginning"
    ids = list(params.tokenizer.encode(text))
    (whole,), (same,) = fnllm.score(params, text), fnllm.score(params, [ids])
    assert whole.shape == (len(ids) - 1,) and torch.equal(whole, same)
    (again,) = fnllm.score(params, (one for one in [text]))
    assert torch.equal(whole, again)


@pytest.mark.parametrize("position", [300, -300, 2**70, -(2**70)])
def test_positions_that_a_request_never_reaches_give_empty_activations(position):
    one = generate(capture=Capture(("logits", SITE), (position,)))
    assert one.captured_at == () and set(one.captured) == {"logits", SITE}
    assert all(len(x) == 0 for x in one.captured.values())


def test_vectors_and_positions_may_be_numpys():
    vector = torch.randn(24, generator=torch.Generator().manual_seed(0))
    wanted = generate(edits=fnllm.steer(SITE, vector, 3.0))
    assert generate(edits=fnllm.steer(SITE, vector.numpy(), 3.0)).token_ids == wanted.token_ids
    assert generate(edits=fnllm.steer(SITE, vector.tolist(), 3.0)).token_ids == wanted.token_ids
    assert generate(capture=Capture(SITE, np.array([0, 2]))).captured_at == (0, 2)
    for two in (np.int64(2), np.array(2), torch.tensor([5, 1, 9]).argmax()):
        assert generate(capture=Capture(SITE, two)).captured_at == (2,)


def test_seeds_may_be_numpys():
    drawn = Sampling(temperature=1.0, max_tokens=6)
    for seed in (0, 5, 2**63 - 1):
        outs = [fnllm.generate(tiny(), IDS, drawn, seed=kind(seed), **SMALL)[0] for kind in (int, np.int64)]
        assert outs[0].token_ids == outs[1].token_ids
    worker = engine()
    for name in ("seed", "sample"):
        assert worker.request(IDS, drawn, **{name: np.int64(3)}) == worker.request(IDS, drawn, **{name: 3})
    state, seq_id = add(worker)
    forked = [fnllm.fork(state, seq_id, seed=kind(3)) for kind in (int, np.int64)]
    payloads = [state.scheduler.sequences[new_id].request.payload for state, new_id in forked]
    assert payloads[0] == payloads[1]


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize(
    "moved",
    [lambda s: s, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))],
    ids=["as it is", "deepcopy", "pickle"],
)
def test_a_state_goes_on_in_another_engine_of_the_same_model(steps, moved):
    """Whose cache is another: nothing in it is taken for the state's."""
    here, there = engine(), fnllm.engine(tiny()._replace(workspace={}), **SMALL)
    fnllm.generate(tiny()._replace(workspace=there.params.workspace), [1] * 30, SHORT, **SMALL)  # its blocks are in use
    state, seq_id = add(here)
    for _ in range(steps):
        state, _ = here.step(state)
    wanted = fnllm.tokens(drain(here, state), seq_id)
    assert fnllm.tokens(drain(there, moved(state)), seq_id) == wanted
    assert fnllm.tokens(drain(here, state), seq_id) == wanted  # and back


def test_a_state_of_other_sizes_is_refused():
    state, _ = add(engine())
    with pytest.raises(ValueError, match="engine of other sizes.*block_size=4.*block_size=8"):
        engine(block_size=8).step(state)
