"""The machines of some parameters, in their `workspace`: found again, or built at first use (effect)."""

import contextlib
import threading
from collections.abc import Hashable, Iterator

from fnllm.ambient import set_aside
from fnllm.capture import Capture, expand
from fnllm.distributed import world
from fnllm.jobs import Variant
from fnllm.machine import Machine
from fnllm.options import EngineOptions, resolve
from fnllm.tensor_parallel import TensorParallel
from fnllm_weights import Params


def machine_for(
    params: Params,
    variant: Variant,
    tp: TensorParallel | None,
    wanted: EngineOptions,
) -> Machine:
    """The machine of these parameters and options, built at first use, with the variant's names checked."""
    for channel in variant.edits:
        expand(params.config, Capture(channel.site))
    tp = tp or world(params.shard)
    workspace = {} if params.workspace is None else params.workspace
    weight = params.tree["norm"]
    num_ids = None if params.tokenizer is None else params.tokenizer.num_ids
    key = (wanted, tp, params.config, params.shard, weight.dtype, weight.device, num_ids)
    with alone_with((id(workspace), key)):
        if workspace.get(key) is None:
            resolved = resolve(wanted, params.config, weight.device.type == "cuda")
            with set_aside(weight.device):
                workspace[key] = Machine(params, resolved, tp)
        return workspace[key]


CHANGED, BUILDING = threading.Condition(), set()  # which machines the threads of this process build just now


@contextlib.contextmanager
def alone_with(machine: Hashable) -> Iterator[None]:
    """Within it no other thread builds, or asks for, the same machine: the memory is there for one."""
    with CHANGED:
        CHANGED.wait_for(lambda: machine not in BUILDING)
        BUILDING.add(machine)
    try:
        yield
    finally:
        with CHANGED:
            BUILDING.remove(machine)
            CHANGED.notify_all()
