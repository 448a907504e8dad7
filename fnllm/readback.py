"""Reading a step's results back without stopping the device (effect): copies into pinned memory behind an event."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fnllm.step import StepOutput


class Readback(NamedTuple):
    """Results of one launched step on their way to the host."""

    ids: Tensor  # pinned, valid once `event` has happened
    logprob: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None
    captured: dict[str, Tensor]  # stay on the device
    event: "torch.cuda.Event | None"

    def wait(self) -> np.ndarray:
        """The sampled ids, once they are here."""
        if self.event is not None:
            self.event.synchronize()
        return self.ids.numpy()


def read_back(output: StepOutput, captured_tokens: int) -> Readback:
    """Start copying a step's output to the host; captured activations are cut to what was asked for and cloned, since
    the next step writes over the buffers of this one."""
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
