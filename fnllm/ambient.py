"""Setting aside torch modes and garbage collection while the engine works (effect)."""

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch
from torch._C._functorch import maybe_current_level

NEVER = 2**31 - 1  # collections of the middle generation before one of all


def set_aside(device: torch.device) -> contextlib.AbstractContextManager:
    """Within it neither inference mode nor autocast is on, and the GPU is the current one; costs nothing if so already.

    The engine's tensors outlive a call: made under inference mode they could not be written outside of it, and autocast
    would give the cache another dtype than it has.
    """
    inference, autocast = torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device.type)
    if not inference and not autocast:
        return at_device(device)
    stack = contextlib.ExitStack()
    stack.enter_context(at_device(device))
    if inference:
        stack.enter_context(torch.inference_mode(False))
    if autocast:
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


def at_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Within it a GPU is the current one: there, whatever their tensors, Triton's kernels, graphs and events go."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@contextlib.contextmanager
def full_collections_off(graphs_traced: Callable[[], int]) -> Iterator[None]:
    """Within it Python's garbage collector searches young objects only, in all threads of the process.

    What compiling leaves alive, some 600,000 objects, takes it half a second to look through, and a GPU waits for the
    next step as long. Steps leave no reference cycles. Those that a caller's functions or threads leave may hold
    tensors, and are found while they are young. Calls may overlap: the one that finds full collections off leaves them.

    The collection that tracing a graph makes due is made at the end, and not in the middle of what the caller does
    next. Python makes the one after it when a quarter more objects live.
    """
    usual = gc.get_threshold()
    gc.set_threshold(*usual[:2], NEVER)
    traced = graphs_traced()
    try:
        yield
    finally:
        if usual[2] != NEVER:
            gc.set_threshold(*usual)
            if gc.isenabled() and graphs_traced() != traced:
                gc.collect()


def in_torch_func() -> bool:
    """Whether a transform of torch.func is at work, in which a tensor may stand for many and nothing is recomputed."""
    return maybe_current_level() is not None
