"""A checkpoint of random weights for programs that must load one: `python benchmarks/checkpoints.py 8b FOLDER`.

Made by this command it has a tokenizer too, the demo's, without which some do not start.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

ROOM = 40e9  # bytes; the largest shape takes 16 GB


def room_for_checkpoint() -> Path:
    """/dev/shm where it is large enough; else the folder for temporary files, which are read from the page cache."""
    shared = Path("/dev/shm")
    return shared if shared.exists() and shutil.disk_usage(shared).free > ROOM else Path(tempfile.gettempdir())


def make_checkpoint(folder: Path, size: str, device: str, tokenizer: bool = False) -> None:
    """Random bf16 weights in one of the workloads' shapes, unless they are there, and if asked the demo's tokenizer."""
    if (folder / "config.json").exists():
        return
    from provenance import ROOT, random_params
    from workloads import SHAPES, config_dict

    import fnllm

    unfinished = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    fnllm.save(random_params(size, dtype="bfloat16", device=device), unfinished)
    if size in SHAPES:  # with the fields that other programs read
        (unfinished / "config.json").write_text(json.dumps(config_dict(size)) + "\n")
    if tokenizer:
        for file in (ROOT / "fnllm" / "demo").glob("tokenizer*.json"):
            shutil.copy(file, unfinished)
    unfinished.rename(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    make_checkpoint(args.folder, args.size, args.device, tokenizer=True)
