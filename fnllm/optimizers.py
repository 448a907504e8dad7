"""Counting an optimizer's step as a write to its weights, where PyTorch does not (effect: a hook on all optimizers)."""

from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


# Not traced: in a compiled step the count would be lost. Whoever makes an optimizer has loaded the compiler already.
@_disable_dynamo
def count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count one write to every weight that a step may have written uncounted; some 20 us for 230 of them."""
    torch.autograd.graph.increment_version(written_uncounted(optimizer))


def written_uncounted(optimizer: Optimizer) -> list[Tensor]:
    """The weights that a step may have written without a count in `tensor._version`.

    Those are the weights that kernels of `fused=True` write, and those that third-party optimizers write, by their own
    kernels or through `.data`. Others are not counted: autograd graphs that hold an unwritten weight must still work.
    """
    foreign = not type(optimizer).__module__.startswith("torch.")
    groups = [one for one in optimizer.param_groups if one.get("fused") or foreign and not one.get("differentiable")]
    weights = [weight for one in groups for weight in one["params"]]
    # Without any gradient it was a hook of the optimizer's own that has cleared them since.
    return [weight for weight in weights if weight.grad is not None] or weights


register_optimizer_step_post_hook(count_step)  # as often as this module is loaded, so once
