"""The machines of given parameters, kept in their `workspace` and built at first use (effect)."""

from fnllm.ambient import set_aside
from fnllm.capture import Capture, expand
from fnllm.distributed import world
from fnllm.jobs import Variant
from fnllm.machine import Machine, Unbuilt
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
    place = workspace.setdefault(key, Unbuilt())  # one and the same for all threads that come before the machine
    if isinstance(place, Unbuilt):
        with place.lock:  # the memory is there for one machine
            if workspace[key] is place:
                resolved = resolve(wanted, params.config, weight.device.type == "cuda")
                with set_aside(weight.device):
                    workspace[key] = Machine(params, resolved, tp)
    return workspace[key]
