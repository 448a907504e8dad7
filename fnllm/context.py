"""The context that every layer function receives: immutable, and everything that it may read."""

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from fnllm.batch import Batch
from fnllm.cache import KVCache
from fnllm.taps import Taps
from fnllm.tensor_parallel import TensorParallel
from fnllm_kernels.attention import ReferencePlan
from fnllm_weights import LocalSizes, ModelConfig

if TYPE_CHECKING:
    from fnllm.layers import Layers


class Context(NamedTuple):
    """Everything that a layer function may read besides its parameters and its input."""

    config: ModelConfig
    sizes: LocalSizes  # this rank's heads and widths
    tp: TensorParallel
    layers: "Layers"  # the functions in use, so that a swapped one can call the others
    batch: Batch
    cache: KVCache | None  # None in `score`, where the batch holds whole sequences
    backend: str  # of paged attention
    max_context: int  # bound on the keys of each sequence in the batch; 0: as many as the block tables hold
    # the attention backend's plan for `max_context`, by sliding window, made once per step: pass on both or neither
    metadata: dict[int, Tensor | ReferencePlan | None] | None
    taps: Taps
    layer: int = -1  # index of the decoder layer; -1 outside of the layers
    own: tuple[Tensor, ...] = ()  # parameters of this layer, or of the head, which no kernel of the step writes

    def tap(self, name: str, x: Tensor) -> Tensor:
        """Capture or edit an activation: `name` is the last part of a site such as `layers.3.resid_mid`."""
        site = name if self.layer < 0 else f"layers.{self.layer}.{name}"
        return self.taps(site, x, self)

    def owns(self, weight: Tensor) -> bool:
        """Whether a weight is a parameter, not made in the step: kernels may fetch it while those before still run."""
        return any(weight is mine for mine in self.own)
