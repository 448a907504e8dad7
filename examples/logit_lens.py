"""Logit lens (nostalgebraist 2020): what the head would predict after every layer, while the model generates.

python examples/logit_lens.py [folder or hub id] [prompt] [plot.png]
"""

import sys

import torch
from jaxtyping import Float
from torch import Tensor

import fnllm


def lens(
    params: fnllm.Params, prompt: str, new_tokens: int = 8
) -> tuple[list[str], list[list[str]], Float[Tensor, "L T"]]:
    """(the tokens read, each layer's best guess at the next one, the probability each layer gives to what came)."""
    count = params.config.num_hidden_layers
    capture = fnllm.Capture("layers.*.resid_post", "all")
    sampling = fnllm.Sampling(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    out = fnllm.generate(params, [prompt], sampling, capture=capture, max_num_seqs=4, max_model_len=256)[0]
    ids = list(params.tokenizer.encode(prompt)) + list(out.token_ids)
    guesses, chances = [], []
    for layer in range(count):
        stream = out.captured[f"layers.{layer}.resid_post"]
        scale = torch.rsqrt(stream.float().pow(2).mean(-1, keepdim=True) + params.config.rms_norm_eps)
        logits = (params.tree["norm"] * (stream * scale)).float() @ params.tree["lm_head"].float().T
        probabilities = logits.softmax(-1)
        guesses.append([params.tokenizer.decode([int(i)]) for i in logits.argmax(-1)])
        chances.append(probabilities.cpu().gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return [params.tokenizer.decode([i]) for i in ids], guesses, torch.stack(chances)


def plot(tokens: list[str], guesses: list[list[str]], chances: Float[Tensor, "L T"], path: str) -> None:
    """A table of guesses, coloured by the probability of the token that came."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(0.9 * len(tokens), 0.45 * len(guesses) + 1.5))
    picture = axes.imshow(chances.numpy(), aspect="auto", origin="lower", cmap="viridis", vmin=0, vmax=1)
    for layer, row in enumerate(guesses):
        for place, text in enumerate(row):
            colour = "white" if chances[layer, place] < 0.6 else "black"
            axes.text(place, layer, repr(text)[1:-1], ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(tokens) - 1), [repr(t)[1:-1] for t in tokens[:-1]], rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(guesses)))
    axes.set_xlabel("token read")
    axes.set_ylabel("after layer")
    axes.set_title("best guess at the next token; colour: probability of the one that came")
    figure.colorbar(picture)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(path: str | None = None, prompt: str = "And the LORD said unto Moses,", out: str = "logit_lens.png") -> None:
    tokens, guesses, chances = lens(fnllm.load(path or None), prompt)
    for layer, (row, p) in enumerate(zip(guesses, chances, strict=True)):
        print(f"layer {layer:2}: mean log-probability of what came {p.log().mean():7.2f}   {row}")
    plot(tokens, guesses, chances, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main(*sys.argv[1:4])
