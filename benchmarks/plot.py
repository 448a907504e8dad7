"""Decode throughput against batch size, with the machine's limit: benchmarks/results/serving.json to a PNG."""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
# Best of nano-vLLM, vLLM 0.26 and (at batch 1) gpt-fast on the same kind of machine, in an earlier run.
PEERS = {
    "0.6b": {1: 864, 8: 4014, 32: 13566, 64: 22109, 128: 31660, 256: 43027},
    "8b": {1: 198, 8: 1495, 32: 5719, 64: 10407, 128: 16546, 256: 20898},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", default=HERE / "results" / "serving.json")
    parser.add_argument("--out", default=HERE.parent / "docs" / "decode_throughput.png")
    args = parser.parse_args()
    rows = [r for r in json.loads(Path(args.results).read_text())["rows"] if r["workload"] == "W3" and "batch" in r]
    figure, axes = plt.subplots(1, len(PEERS), figsize=(10, 3.6), constrained_layout=True)
    for axis, (size, peers) in zip(axes, PEERS.items(), strict=True):
        mine = sorted((r["batch"], r["tok_s"], r["floor_tok_s"]) for r in rows if r["size"] == size)
        batches = [batch for batch, _, _ in mine]
        axis.plot(batches, [floor for _, _, floor in mine], "--", color="grey", label="limit of the machine")
        axis.plot(batches, [rate for _, rate, _ in mine], "o-", color="tab:blue", label="fnllm")
        axis.plot(list(peers), list(peers.values()), "s:", color="tab:orange", label="best peer, earlier run")
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
