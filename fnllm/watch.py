"""A time limit on waiting for the device (effect: a thread that may end the process).

Collectives of a captured step run on the device without the host, so torch.distributed's time limit does not apply.
"""

import os
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext

import torch

from fnllm.distributed import FAILED, timeout
from fnllm.tensor_parallel import TensorParallel


class Watch:
    """A context in which to wait; one thread's wait longer than `seconds` ends this rank, and with it the others."""

    def __init__(self, seconds: float, rank: int):
        self.seconds, self.rank = seconds, rank
        self.since: dict[int, float] = {}  # when each thread that waits began to
        threading.Thread(target=self._look, daemon=True).start()

    def __enter__(self) -> None:
        self.since[threading.get_ident()] = time.monotonic()

    def __exit__(self, *error: object) -> None:
        del self.since[threading.get_ident()]

    def _look(self) -> None:
        while True:
            time.sleep(min(1.0, self.seconds / 10))
            since = min(self.since.copy().values(), default=None)  # copied at once: threads come and go
            if since is not None and time.monotonic() - since > self.seconds:
                sys.stderr.write(
                    f"fnllm: rank {self.rank} has waited {self.seconds:g} s for a step: another rank hangs or is gone "
                    "(FNLLM_TIMEOUT_S sets the limit)\n"
                )
                sys.stderr.flush()
                os._exit(FAILED)


def watch(tp: TensorParallel, device: torch.device) -> AbstractContextManager:
    """The limit for steps on `device`; none with a single rank, or where the collectives have their own."""
    if tp.size == 1 or device.type != "cuda":
        return nullcontext()
    return Watch(timeout().total_seconds(), tp.rank)
