"""Runs examples/ray_batch.py with a worker or rank killed once: python ray_dying.py SOURCE OUT TP [MARKER]."""

import importlib
import json
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = [str(path) for path in (ROOT, ROOT / "kernels", ROOT / "weights", ROOT / "examples")]
sys.path[:0] = PATHS

import ray  # noqa: E402

ray_batch = importlib.import_module("ray_batch")
SOURCE, OUT, TP = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
MARKER = sys.argv[4] if len(sys.argv) > 4 else ""
MODEL = str(ROOT / "tests" / "oracle" / "qwen3-odd")
SAMPLING = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}


def first(marker: str) -> bool:
    """Whether this is the first of all processes that come here."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Dying(ray_batch.Worker):
    """Dies once, with a part of which it has made the results."""

    marker = MARKER

    def results(self, rows):
        made = super().results(rows)
        if self.tp == 1 and self.marker and first(self.marker):
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    def start(self):
        engine = super().start()
        if self.tp > 1 and self.marker and first(self.marker):
            ray.kill(engine.ranks[1])
        return engine


environment = {"PYTHONPATH": os.pathsep.join([*PATHS, str(Path(__file__).parent)]), "OMP_NUM_THREADS": "1"}
ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False,
         runtime_env={"env_vars": environment})  # fmt: skip
made = ray_batch.run(SOURCE, OUT, workers=2, tp=TP, part_rows=2, worker=Dying,
                     settings=(MODEL, SAMPLING, {"num_blocks": 32, "block_size": 4}))  # fmt: skip
(Path(sys.argv[2]) / "made").write_text(json.dumps(made))
