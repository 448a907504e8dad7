"""Decode throughput against batch size, with the machine's limit: benchmarks/results/serving.json to a PNG."""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
SIZES = ("0.6b", "8b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", default=HERE / "results" / "serving.json")
    parser.add_argument("--out", default=HERE.parent / "docs" / "decode_throughput.png")
    args = parser.parse_args()
    results = json.loads(Path(args.results).read_text())
    decode = {key: [r for r in results[key] if r.get("workload") == "W3" and "batch" in r] for key in ("rows", "peers")}
    figure, axes = plt.subplots(1, len(SIZES), figsize=(10, 3.6), constrained_layout=True)
    for axis, size in zip(axes, SIZES, strict=True):
        mine = sorted((r["batch"], r["tok_s"], r["floor_tok_s"]) for r in decode["rows"] if r["size"] == size)
        batches = [batch for batch, _, _ in mine]
        axis.plot(batches, [floor for _, _, floor in mine], "--", color="grey", label="limit of the machine")
        axis.plot(batches, [rate for _, rate, _ in mine], "o-", color="tab:blue", label="fnllm")
        for peer, color in (("vllm", "tab:orange"), ("nano-vllm", "tab:green")):
            found = [r for r in decode["peers"] if (r["peer"], r["size"]) == (peer, size)]
            points = sorted((r["batch"], r["decode_tok_s"]) for r in found)
            axis.plot(*zip(*points, strict=True), "s:", markersize=4, color=color, label=peer)
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="batch size",
            ylabel="tokens/s",
            title=f"Qwen3-{size.upper()} shape, bf16",
        )
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
