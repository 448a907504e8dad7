"""Reinforcement learning on one set of weights: generate, score, step, generate again (REINFORCE with group baselines).

The optimizer writes the same tensors that the engine reads: nothing is copied, and no cached prefix survives an update.
The task: continue a sentence with words that begin with s, no word twice. The reward is for a whole text, not for a
token; the model is not told which words those are.

    python examples/on_policy.py [folder or hub id] [plot.png]
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import fnllm

PROMPTS = ["And she", "Behold, the", "In the morning", "There was a"]


class Round(NamedTuple):
    """What one round of generating and learning brought."""

    reward: float  # mean over its texts
    gap: float  # largest difference between a token's log-probability in generation and in scoring
    text: str


def words_in_s(text: str) -> float:
    """Different words that begin with s, over all words of a text (at least 4)."""
    words = [word.strip(".,;:!?'\"()") for word in text.lower().split()]
    words = [word for word in words if word.isalpha()]
    return len({word for word in words if word.startswith("s")}) / max(len(words), 4)


def leaves(tree) -> list[Tensor]:
    """Every tensor of a parameter tree once: a tied head is its embedding."""
    found = {id(x): x for x in torch.utils._pytree.tree_leaves(tree)}
    return list(found.values())


def train(
    params: fnllm.Params,
    prompts: list,
    reward: Callable[[fnllm.Completion], float],
    *,
    rounds: int,
    samples: int = 16,
    length: int = 16,
    rate: float = 3e-4,
    report: Callable[[Round], None] = lambda one: None,
    **options,
) -> list[Round]:
    """Improve `params` in place so that completions of the prompts are rewarded; returns each round's figures."""
    weights, device = [x.requires_grad_() for x in leaves(params.tree)], params.tree["norm"].device
    optimizer = torch.optim.Adam(weights, lr=rate, betas=(0.9, 0.95))
    sampling = fnllm.Sampling(n=samples, max_tokens=length, logprobs=0, ignore_eos=True)
    history = []
    for number in range(rounds):
        outs = fnllm.generate(params, prompts, sampling, seed=number * 1000, **options)
        rewards = torch.tensor([reward(out) for out in outs], device=device).view(len(prompts), samples)
        advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        encode = params.tokenizer.encode if params.tokenizer else list
        ids = [list(encode(p) if isinstance(p, str) else p) for p in prompts for _ in range(samples)]
        logprobs = fnllm.score(params, [p + list(out.token_ids) for p, out in zip(ids, outs, strict=True)])
        new = torch.stack([x[-length:] for x in logprobs])
        loss = -(advantage.view(-1, 1) * new).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        drawn = torch.tensor([[x.logprob for x in out.logprobs] for out in outs], device=device)
        best = outs[int(rewards.argmax())]
        history.append(Round(rewards.mean().item(), (drawn - new.detach()).abs().max().item(), best.text))
        report(history[-1])
    return history


def main(path: str | None = None, out: str = "on_policy.png") -> None:
    params = fnllm.load(path or None, dtype="float32")  # steps this small are lost in bfloat16

    def say(one: Round) -> None:
        print(f"reward {one.reward:5.3f}   generate and score differ by {one.gap:.1e}   {one.text!r}", flush=True)

    history = train(
        params, PROMPTS, lambda out: words_in_s(out.text), rounds=24, report=say, max_num_seqs=64, max_model_len=128
    )
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot([one.reward for one in history])
    axes.set_xlabel("round")
    axes.set_ylabel("share of words that begin with s, each counted once")
    figure.savefig(out, dpi=120, bbox_inches="tight")
    print(f"wrote {out}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
