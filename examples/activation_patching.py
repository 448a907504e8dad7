"""Activation patching (Meng et al. 2022, Vig et al. 2020): which activations carry the difference between two prompts.

The corrupted prompt is run with one activation of the clean run patched in, for every layer and position. The result is
the share of the clean answer's log-probability that is recovered. All patches of one layer are one call of `score`.

    python examples/activation_patching.py [folder or hub id] [plot.png]
"""

import sys

import torch
from jaxtyping import Float
from torch import Tensor

import fnllm

CLEAN = "Moses and Aaron went in, and the LORD spake unto"
CORRUPTED = "Emma and Harriet went in, and the girl came unto"


def effects(
    params: fnllm.Params, clean: list[int], corrupted: list[int], answer: int, site: str
) -> Float[Tensor, "L T"]:
    """Recovered share of the answer's log-probability: 0 as corrupted, 1 as clean, by layer and position.

    `site` is a site's last part, such as "resid_pre"; both prompts must have one length.
    """
    if len(clean) != len(corrupted):
        raise ValueError(f"the prompts have {len(clean)} and {len(corrupted)} tokens; give prompts of one length")
    sites = tuple(f"layers.{i}.{site}" for i in range(params.config.num_hidden_layers))
    with torch.no_grad():
        known = fnllm.score(params, [clean + [answer]], capture=sites)[0]
        high = known.logprobs[-1]
        low = fnllm.score(params, [corrupted + [answer]])[0][-1]
        rows = []
        for at in sites:
            edits = [[fnllm.patch(at, known.captured[at][t : t + 1], t)] for t in range(len(clean))]
            scored = fnllm.score(params, [corrupted + [answer]] * len(clean), edits=edits)
            rows.append(torch.stack([(x[-1] - low) / (high - low) for x in scored]))
    return torch.stack(rows).cpu()


def aligned(params: fnllm.Params, clean: str, corrupted: str) -> tuple[list[int], list[int]]:
    """Both prompts' ids, the longer one cut at its front so that the ends meet."""
    a, b = (list(params.tokenizer.encode(text)) for text in (clean, corrupted))
    length = min(len(a), len(b))
    return a[-length:], b[-length:]


def main(path: str | None = None, out: str = "activation_patching.png") -> None:
    params = fnllm.load(path or None)
    clean, corrupted = aligned(params, CLEAN, CORRUPTED)
    greedy = fnllm.Sampling(temperature=0, max_tokens=1)
    answer = fnllm.generate(params, [clean], greedy, max_num_seqs=4, max_model_len=256)[0].token_ids[0]
    print(f"clean answer: {params.tokenizer.decode([answer])!r}")
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4), sharey=True)
    for axis, site in zip(axes, ("resid_pre", "attn_out", "mlp_out"), strict=True):
        share = effects(params, clean, corrupted, answer, site)
        image = axis.imshow(share.numpy(), aspect="auto", origin="lower", cmap="RdBu", vmin=-1, vmax=1)
        names = [repr(params.tokenizer.decode([i]))[1:-1] for i in corrupted]
        axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
        axis.set_title(f"{site} from the clean run")
        best = divmod(int(share.argmax()), share.shape[1])
        print(f"{site:10} largest effect {share.max():5.2f} at layer {best[0]}, position {best[1]}")
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="share of the answer brought back", fraction=0.02, pad=0.01)
    figure.savefig(out, dpi=120, bbox_inches="tight")
    print(f"wrote {out}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
