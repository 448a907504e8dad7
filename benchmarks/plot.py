"""Decode throughput against batch size, with the machine's limit: benchmarks/results/serving.json to a PNG."""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
SIZES = ("0.6b", "8b")
STYLES = (("fnllm", "o-", "tab:blue"), ("vllm", "s:", "tab:orange"), ("nano-vllm", "s:", "tab:green"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", default=HERE / "results" / "serving.json")
    parser.add_argument("--out", default=HERE.parent / "docs" / "decode_throughput.png")
    args = parser.parse_args()
    results = json.loads(Path(args.results).read_text())
    decode = [row for row in results["rows"] if row.get("workload") == "W3" and "batch" in row]
    figure, axes = plt.subplots(1, len(SIZES), figsize=(10, 3.6), constrained_layout=True)
    for axis, size in zip(axes, SIZES, strict=True):
        limit = sorted({(row["batch"], row["floor_tok_s"]) for row in decode if row["size"] == size})
        batches = [batch for batch, _ in limit]
        axis.plot(batches, [floor for _, floor in limit], "--", color="grey", label="limit of the machine")
        for engine, style, color in STYLES:
            mine = (row for row in decode if (row["engine"], row["size"]) == (engine, size))
            points = sorted((row["batch"], row["tok_s"]) for row in mine)
            if points:
                axis.plot(*zip(*points, strict=True), style, markersize=4, color=color, label=engine)
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
