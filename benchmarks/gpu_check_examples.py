"""Every script of examples/ that needs no network, run as a user runs it: gpu_check_examples.py SETTINGS_JSON.

For gpu_checks.py. One row a script: its arguments, exit status, seconds and last line. A script that is neither run nor
left out for a reason is a failure, so that a new one gets its line here.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpu_check_parts import emit

ROOT = Path(__file__).parents[1]
LIMIT_S = 280  # of one script
# Arguments of each script; {data} is a folder that `lay_out` fills. Without a checkpoint they run the demo model.
ARGUMENTS: dict[str, list[str]] = {
    "activation_patching": [],
    "logit_lens": [],
    "on_policy": [],
    "quickstart": [],
    "ray_batch": ["{data}/prompts.jsonl", "{data}/results", "--max-tokens", "8"],
    "search": [],
    "steering": [],
    "swap_layers": [],
    "torchrun_generate": [],
    "toy_tensor_parallel": [],
    "train_demo": ["{data}", "{data}/trained", "--minutes", "0.05", "--batch", "2", "--context", "64"],
}
LEFT_OUT = {"demo_text": "needs texts that Debian packages", "make_smollm2": "downloads a wheel"}
PACKAGES = {"ray_batch": "ray", "activation_patching": "matplotlib", "logit_lens": "matplotlib",
            "on_policy": "matplotlib", "steering": "matplotlib"}  # fmt: skip


def examples(s: SimpleNamespace) -> None:
    """This process's share of the scripts."""
    for script in sorted((ROOT / "examples").glob("*.py"))[s.job :: s.jobs]:
        name = script.stem
        needed = PACKAGES.get(name)
        if name in LEFT_OUT:
            found: dict[str, Any] = dict(left_out=LEFT_OUT[name], ok=True)
        elif name not in ARGUMENTS:
            found = dict(left_out="no arguments are known for it", ok=False)
        elif needed and importlib.util.find_spec(needed) is None:
            found = dict(left_out=f"{needed} is not installed here", ok=True)
        else:
            with tempfile.TemporaryDirectory() as folder:
                lay_out(Path(folder))
                found = run(script, [part.format(data=folder) for part in ARGUMENTS[name]], s, folder)
        emit(s, part="examples", example=name, device=s.device, **found)


def lay_out(folder: Path) -> None:
    """What scripts with a data folder look for in it: prompts, a text in documents, the demo model's tokenizer."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    documents = [text[at : at + 500] for at in range(0, min(len(text), 25_000), 500)]
    (folder / "text.txt").write_text("\f".join(documents), encoding="utf-8")
    (folder / "tokenizer.json").write_bytes((ROOT / "fnllm" / "demo" / "tokenizer.json").read_bytes())
    rows = [dict(id=number, prompt="And it came to pass") for number in range(5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run(script: Path, arguments: list[str], s: SimpleNamespace, folder: str) -> dict[str, Any]:
    """How a script ended."""
    if script.stem == "train_demo" and s.device == "cpu":
        arguments = [*arguments, "--eager"]
    env = dict(os.environ) if s.device == "cuda" else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, str(script), *arguments], cwd=folder, env=env, capture_output=True, text=True,
            timeout=min(LIMIT_S, s.limit), errors="replace",
        )  # fmt: skip
        status, said, wrong = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        said, wrong = (str(part or b"", "utf-8", "replace") for part in (error.stdout, error.stderr))
        status = f"ended after {error.timeout:.0f} s"
    seconds = round(time.perf_counter() - began, 1)
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    row = dict(status=status, seconds=seconds, last=last[:300], ok=status == 0)
    return row if status == 0 else dict(row, said=wrong[-1500:])


if __name__ == "__main__":
    examples(SimpleNamespace(**json.loads(sys.argv[1])))
