"""Reading a step's results back without stopping the device (effect): copies into pinned memory, then an event."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fnllm.step import StepOutput


class Readback(NamedTuple):
    """Results of one launched step while they are copied to the host: one row for each entry of the plan."""

    ids: Tensor  # [B], pinned, valid once `event` has happened
    logprob: Tensor | None  # [B], natural log
    top_ids: Tensor | None  # [B, n], most likely first
    top_logprobs: Tensor | None  # [B, n]
    captured: dict[str, Tensor]  # site -> [captured tokens, *width]; stays on the device
    event: "torch.cuda.Event | None"

    def wait(self) -> np.ndarray:
        """Wait for the copy and return the sampled ids."""
        if self.event is not None:
            self.event.synchronize()
        return self.ids.numpy()


def read_back(output: StepOutput, captured_tokens: int) -> Readback:
    """Start copying a step's output to the host; captured activations are cut to the requested tokens and cloned.

    They are cloned because the next step overwrites this one's buffers.
    """
    sampled = output.sampled
    captured = {site: x[:captured_tokens].clone() for site, x in output.captured.items()}
    parts = [sampled.ids, sampled.logprob, sampled.top_ids, sampled.top_logprobs]
    if sampled.ids.device.type == "cpu":
        return Readback(*(None if x is None else x.clone() for x in parts), captured, None)
    host = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True) for x in parts]
    for target, source in zip(host, parts, strict=True):
        if target is not None:
            target.copy_(source, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return Readback(*host, captured, event)
