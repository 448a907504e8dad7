"""What a caller's surroundings change about torch, put aside while the engine works (effect: thread-local modes)."""

import contextlib

import torch


def set_aside(device: torch.device) -> contextlib.AbstractContextManager:
    """Within it neither inference mode nor autocast is on; costs nothing where they are off.

    The engine's tensors outlive a call: made under inference mode they could not be written outside of it, and autocast
    would give the cache another dtype than it has.
    """
    inference, autocast = torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device.type)
    if not inference and not autocast:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    if inference:
        stack.enter_context(torch.inference_mode(False))
    if autocast:
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack
