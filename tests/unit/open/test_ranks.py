"""Captures, edits, scores and invariant bits over two simulated ranks: equal to one."""

import threading

import pytest
import torch
from examples_of import EXAMPLES

import fnllm
import fnllm_weights

ORACLE = EXAMPLES.parent / "tests" / "oracle"
PROMPTS = [[3, 14, 15, 92, 65, 35, 89, 79, 33], [8, 9, 79]]
GREEDY = fnllm.Sampling(temperature=0, max_tokens=5, ignore_eos=True, logprobs=0)
SITES = ("layers.1.resid_post", "layers.0.q", "layers.1.k", "layers.2.v", "logits")


def run(params, tp, **options):
    """Tokens, log-probabilities and captured activations of the prompts, through the engine."""
    edits = [fnllm.steer("layers.1.mlp_out", torch.linspace(-1, 1, params.config.hidden_size))]
    engine = fnllm.engine(params, tp=tp, edits=edits, capture=SITES, num_blocks=32, block_size=4, **options)
    state, ids, found, logprobs = engine.init(), [], {}, {}
    for prompt in PROMPTS:
        state, seq_id = fnllm.add(state, engine.request(prompt, GREEDY))
        ids.append(seq_id)
    step = True
    while step:
        state, step = engine.step(state)
        for rows in step.captured if step else ():
            for site, x in step.results.captured.items():
                found.setdefault((rows.seq_id, site), []).append(x[rows.first : rows.first + len(rows.positions)])
        for entry, seq_id in enumerate(step.plan.seq_ids.tolist() if step else ()):
            if step.plan.samples[entry]:
                logprobs.setdefault(seq_id, []).append(float(step.results.logprob[entry]))
    tokens = [fnllm.tokens(state, i) for i in ids]
    return tokens, logprobs, {key: torch.cat(parts) for key, parts in found.items()}


@pytest.mark.parametrize("name, size", [("qwen3-tiny", 2), ("qwen3-odd", 2), ("qwen3-tiny", 4)])
def test_ranks_capture_and_edit_as_one(name, size):
    single = run(fnllm.load(ORACLE / name, device="cpu"), None)
    shards = [fnllm_weights.load(ORACLE / name, device="cpu", rank=r, size=size) for r in range(size)]
    for tokens, logprobs, found in fnllm.simulate(size, lambda tp, p: run(p, tp), shards).results:
        assert tokens == single[0]
        for seq_id, values in logprobs.items():
            assert values == pytest.approx(single[1][seq_id], abs=1e-4)
        assert found.keys() == single[2].keys()
        for key, x in found.items():
            torch.testing.assert_close(x, single[2][key], rtol=1e-4, atol=1e-4, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("site, whole", [("layers.0.q", (4, 16)), ("layers.1.v", (2, 16)), ("logits", (160,))])
def test_an_edit_of_the_whole_where_ranks_see_parts_says_so(site, whole):
    """What to do instead is said, too, and does what the whole edit does on one rank."""
    vector = torch.linspace(-1, 1, torch.Size(whole).numel()).view(whole)
    shards = [fnllm_weights.load(ORACLE / "qwen3-tiny", device="cpu", rank=r, size=2) for r in range(2)]

    def scores(tp, params, edit):
        with torch.no_grad():
            return fnllm.score(params, PROMPTS, edits=edit, tp=tp)

    with pytest.raises(ValueError, match="part of one of 2 ranks: use a fnllm.Edit whose function selects its part"):
        fnllm.simulate(2, lambda tp, params: scores(tp, params, fnllm.steer(site, vector)), shards)

    def add_part(x, ctx, values):
        width = x.shape[1]
        return x + values[:, ctx.tp.rank * width : (ctx.tp.rank + 1) * width]

    single = scores(None, fnllm.load(ORACLE / "qwen3-tiny", device="cpu"), fnllm.steer(site, vector))
    parts = fnllm.simulate(2, lambda tp, params: scores(tp, params, fnllm.Edit(site, add_part, vector)), shards)
    for one in parts.results:
        torch.testing.assert_close(one, single, rtol=1e-4, atol=1e-4)


def test_two_ranks_score_the_bits_they_generate():
    shards = [fnllm_weights.load(ORACLE / "qwen3-tiny", device="cpu", rank=r, size=2) for r in range(2)]

    def both(tp, params):
        edits = [fnllm.steer("layers.1.mlp_out", torch.linspace(-1, 1, params.config.hidden_size))]
        tokens, logprobs, _ = run(params, tp, numerics="batch_invariant", max_chunk=4)
        with torch.no_grad():
            scored = fnllm.score(params, tokens, edits=edits, numerics="batch_invariant", tp=tp)
        return logprobs, [x[-5:].tolist() for x in scored]

    for logprobs, scored in fnllm.simulate(2, both, shards).results:
        assert [logprobs[seq_id] for seq_id in sorted(logprobs)] == scored


def test_a_rank_without_memory_for_captures_refuses_for_all(monkeypatch):
    """The others would else wait for it in the first step."""
    ranks = threading.local()
    monkeypatch.setattr("fnllm.machine.memory_of", lambda device: (10**4 if ranks.mine else 10**12, 10**12))

    def reserve(tp, params):
        ranks.mine = tp.rank
        machine = fnllm.engine(params, tp=tp, num_blocks=32, block_size=4).machine
        with pytest.raises(ValueError) as refused:
            machine.reserve_for_captures(10**5, lambda line: None)
        return str(refused.value)

    shards = [fnllm_weights.load(ORACLE / "qwen3-tiny", device="cpu", rank=r, size=2) for r in range(2)]
    for said in fnllm.simulate(2, reserve, shards).results:
        assert said.startswith("capture would take up to 0.00 GB and only 0.00 GB are free on cpu; ask for fewer")
