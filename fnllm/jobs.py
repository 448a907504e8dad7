"""What a machine gets besides its plans: a caller's layers, edits and captures, and each request's settings."""

from collections.abc import Callable
from typing import NamedTuple

from fnllm.capture import NOTHING, Capture
from fnllm.edits import Channel, Edit
from fnllm.layers import Layers
from fnllm.sampler.features import has_penalty
from fnllm.sampling import Sampling


class Variant(NamedTuple):
    """What a caller may change about the computation without touching the machine."""

    layers: Layers = Layers()
    edits: tuple[Channel, ...] = ()  # which its requests may use
    capture: tuple[str, ...] = ()  # sites, of which its requests may ask

    def own_functions(self) -> list[Callable]:
        """The functions that are not fnllm's own layers, in one order on all ranks."""
        return [*self.layers.swapped().values(), *(channel.apply for channel in self.edits)]


class Job(NamedTuple):
    """What the device must know of a request beyond its tokens."""

    sampling: Sampling
    seed: int
    prompt_length: int
    tokens: tuple[int, ...] = ()  # the known tokens, for rows that look back at them
    edits: tuple[Edit, ...] = ()
    capture: Capture = NOTHING


def looks_back(sampling: Sampling) -> bool:
    """Whether a request's sampling depends on the tokens before."""
    return has_penalty(sampling) or sampling.logits_fn is not None
