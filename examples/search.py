"""Best of n, beam search and a small tree search: short loops over states whose sequences share cache blocks.

python examples/search.py [folder or hub id] [prompt]
"""

import sys
from typing import NamedTuple

import fnllm
from fnllm.engines import Engine


class Found(NamedTuple):
    """A continuation and the natural log of its probability."""

    tokens: tuple[int, ...]
    logprob: float


def best_of_n(params: fnllm.Params, prompt, n: int, length: int, seed: int = 0) -> Found:
    """The most likely of n samples. Their common prompt is computed once and shared."""
    sampling = fnllm.Sampling(n=n, max_tokens=length, logprobs=0)
    outs = fnllm.generate(params, [prompt], sampling, seed=seed, max_num_seqs=n)
    return max((Found(out.token_ids, sum(x.logprob for x in out.logprobs)) for out in outs), key=lambda f: f.logprob)


def beam_search(engine: Engine, prompt: list[int], width: int, length: int) -> list[Found]:
    """The `width` most likely continuations of `length` tokens that beam search finds, best first."""
    sampling = fnllm.Sampling(temperature=0, max_tokens=length, logprobs=width, ignore_eos=True)
    state, first = fnllm.add(engine.init(), engine.request(prompt, sampling))
    beams = {first: 0.0}
    for _ in range(length):
        drawn: dict[int, list[tuple[int, float]]] = {}
        while drawn.keys() != beams.keys():  # each beam draws one token; a new one may first wait for a row
            state, step = engine.step(state)
            for entry, seq_id in enumerate(step.plan.seq_ids.tolist()):
                if step.plan.samples[entry]:
                    top = zip(
                        step.results.top_ids[entry].tolist(), step.results.top_logprobs[entry].tolist(), strict=True
                    )
                    drawn[seq_id] = list(top)[:width]
        choices = [(beams[b] + logprob, b, token) for b, top in drawn.items() for token, logprob in top]
        chosen = sorted(choices, reverse=True)[:width]
        parents, beams = set(beams), {}
        for total, parent, token in chosen:
            state, child = fnllm.fork(state, parent)
            state = fnllm.truncate(state, child, len(fnllm.tokens(state, child)) - 1)
            left = length - (len(fnllm.tokens(state, child)) + 1 - len(prompt))
            state = fnllm.append(state, child, [token], max_tokens=left)
            beams[child] = total
        for parent in parents:
            state = fnllm.abort(state, parent)
    return [Found(fnllm.tokens(state, b)[len(prompt) :], total) for b, total in beams.items()]


def tree_search(
    engine: Engine, prompt: list[int], *, branch: int, keep: int, depth: int, span: int
) -> tuple[Found, str]:
    """Grow a tree of samples, `span` tokens at a time: each of `keep` leaves gets `branch` children, the best go on.

    Returns the best leaf and a picture of who shared which block when the tree was last grown.
    """
    sampling = fnllm.Sampling(max_tokens=span, logprobs=0, ignore_eos=True)
    state, root = fnllm.add(engine.init(), engine.request(prompt, sampling, seed=0))
    state, totals = run(engine, state)
    leaves, picture = {root: totals[root]}, ""
    for level in range(1, depth):
        children = {}
        for leaf, total in leaves.items():
            for number in range(branch):
                state, child = fnllm.fork(state, leaf, seed=1000 * level + 100 * number + leaf)
                state, children[child] = fnllm.append(state, child), total
        state, step = engine.step(state)
        picture = fnllm.show(state)
        state, totals = run(engine, state, step)
        grown = {child: total + totals[child] for child, total in children.items()}
        best = sorted(grown, key=grown.__getitem__, reverse=True)[:keep]
        for seq_id in (leaves.keys() | grown.keys()) - set(best):
            state = fnllm.abort(state, seq_id)
        leaves = {leaf: grown[leaf] for leaf in best}
    best = max(leaves, key=leaves.__getitem__)
    return Found(fnllm.tokens(state, best)[len(prompt) :], leaves[best]), picture


def run(engine: Engine, state: fnllm.State, step=None) -> tuple[fnllm.State, dict[int, float]]:
    """Step until nothing is left; also each sequence's sum of log-probabilities of drawn tokens, with `step`'s."""
    totals: dict[int, float] = {}
    while True:
        if step is not None:
            for entry, seq_id in enumerate(step.plan.seq_ids.tolist()):
                if step.plan.samples[entry]:
                    totals[seq_id] = totals.get(seq_id, 0.0) + float(step.results.logprob[entry])
        state, step = engine.step(state)
        if step is None:
            return state, totals


def main(path: str | None = None, prompt: str = "And it came to pass") -> None:
    params = fnllm.load(path or None)
    ids, say = list(params.tokenizer.encode(prompt)), params.tokenizer.decode
    engine = fnllm.engine(params, max_num_seqs=16, max_model_len=256, block_size=4)
    greedy = beam_search(engine, ids, 1, 16)[0]
    print(f"greedy      {greedy.logprob:8.2f} {say(greedy.tokens)!r}")
    for found in beam_search(engine, ids, 4, 16):
        print(f"beam of 4   {found.logprob:8.2f} {say(found.tokens)!r}")
    found = best_of_n(params, prompt, 8, 16)
    print(f"best of 8   {found.logprob:8.2f} {say(found.tokens)!r}")
    found, picture = tree_search(engine, ids, branch=4, keep=2, depth=4, span=4)
    print(f"tree        {found.logprob:8.2f} {say(found.tokens)!r}\n\n{picture}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
