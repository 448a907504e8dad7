"""Runs the two examples for torchrun one after the other: starting the ranks takes longer than either."""

import runpy
from pathlib import Path

for name in ("quickstart.py", "torchrun_generate.py"):
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / name), run_name="__main__")
