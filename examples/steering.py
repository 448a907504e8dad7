"""A steering vector from pairs of prompts (Turner et al. 2023; Rimsky et al. 2023), at several strengths in one batch.

The vector is the difference between the mean residual streams of two kinds of text; added during generation, it moves
the text towards the first kind. Here: scripture against novels, measured by words that only one of them uses.

    python examples/steering.py [folder or hub id] [plot.png]
"""

import sys

import torch
from jaxtyping import Float
from torch import Tensor

import fnllm

PAIRS = [
    ("And the LORD spake unto Moses, saying,", "Elizabeth was pleased with the visit, and said,"),
    ("Thus saith the LORD of hosts, the God of Israel;", "She was not at all in the humour for company;"),
    ("And it came to pass in those days, that the children", "It was a delightful visit, and the young ladies"),
    ("Behold, the days come, saith the LORD, that I will", "My dear Emma, said Mr. Knightley, I hope you will"),
    ("The king of Judah did that which was evil in the sight", "The drawing-room was full of people, and Mrs. Bennet"),
    ("Woe unto you, scribes and Pharisees, hypocrites! for ye", "Mr. Darcy bowed, and Miss Bingley was silent; for he"),
]
SCRIPTURE = (
    "unto thou thee thy ye hath saith LORD lord god king israel behold shall house children sons people land".split()
)
NOVELS = (
    "mr mrs miss she her very elizabeth emma anne marianne elinor feelings could would sister indeed pleasure".split()
)


def direction(params: fnllm.Params, site: str, pairs=PAIRS) -> Float[Tensor, " H"]:
    """Mean difference of the mean activations at a site between the first and the second texts of the pairs."""
    sequences = [list(params.tokenizer.encode(text)) for pair in pairs for text in pair]
    means = [scored.captured[site].mean(0) for scored in fnllm.score(params, sequences, capture=site)]
    return torch.stack(means[0::2]).mean(0) - torch.stack(means[1::2]).mean(0)


def leaning(text: str) -> float:
    """Share of the marked words that are scripture's: 1 all, 0 none, 0.5 without any."""
    words = [word.strip(".,;:!?'\"()").lower() for word in text.split()]
    ours, others = (sum(word in (w.lower() for w in kind) for word in words) for kind in (SCRIPTURE, NOVELS))
    return (ours + 1) / (ours + others + 2)


def sweep(
    params: fnllm.Params, site: str, scales: list[float], prompt: str, samples: int = 8, length: int = 40
) -> list[list[str]]:
    """Texts for every scale, all in one call: each request of the batch has its own edit."""
    vector = direction(params, site)
    sampling = fnllm.Sampling(temperature=0.8, top_p=0.95, n=samples, max_tokens=length, ignore_eos=True)
    edits = [[fnllm.steer(site, vector, scale)] for scale in scales]
    outs = fnllm.generate(
        params, [prompt] * len(scales), sampling, edits=edits, seed=0, max_num_seqs=64, max_model_len=256
    )
    texts = [out.text for out in outs]
    return [texts[i * samples : (i + 1) * samples] for i in range(len(scales))]


def main(path: str | None = None, out: str = "steering.png") -> None:
    params = fnllm.load(path or None)
    site = f"layers.{params.config.num_hidden_layers // 2}.resid_post"
    scales = [-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0]
    texts = sweep(params, site, scales, "In the morning")
    means = [sum(map(leaning, some)) / len(some) for some in texts]
    for scale, mean, some in zip(scales, means, texts, strict=True):
        print(f"scale {scale:5.1f}   scripture {mean:4.2f}   {some[0]!r}")
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(scales, means, "o-")
    axes.set_xlabel(f"strength of the vector at {site}")
    axes.set_ylabel("share of scripture's words")
    axes.set_ylim(0, 1)
    figure.savefig(out, dpi=120, bbox_inches="tight")
    print(f"wrote {out}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
