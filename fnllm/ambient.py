"""What surrounds the engine and is put aside while it works (effect: torch's modes, Python's collector)."""

import contextlib
import gc
from collections.abc import Iterator

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


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Within it Python looks for garbage only when told to.

    What compiling leaves alive, some 600,000 objects, takes it half a second to look through, and a GPU waits for the
    next step as long. Steps leave no reference cycles, so that nothing but a caller's own functions needs it.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
