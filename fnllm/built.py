"""The steps that a machine has built, and which of them are dropped for others."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fnllm.compiled import StepRunner
from fnllm.edits import Channel
from fnllm.held import equal
from fnllm.jobs import Variant
from fnllm.layers import Layers
from fnllm.sampler import SamplerFeatures
from fnllm.step import StepSpec
from fnllm.taps import Choice

MOST_CHANGED = 16  # sets of functions of callers' own whose steps are kept


@dataclass
class Built:
    """The steps that exist, those last used at the end, and what was tried and allocated for them."""

    runners: dict[StepSpec, StepRunner] = field(default_factory=dict)
    last: tuple[Variant, SamplerFeatures, StepRunner] | None = None  # found without hashing
    tried: set[Any] = field(default_factory=set)  # variants whose functions, and logits_fns that, have passed a trial
    choices: dict[tuple[Channel, ...], tuple[Choice, ...]] = field(default_factory=lambda: {(): ()})  # of each row
    joined: tuple[Channel, ...] = ()  # whose choices the rows that run were written to

    def again(self, variant: Variant, features: SamplerFeatures) -> StepRunner | None:
        """The runner that was used last, if it was for these."""
        if self.last is not None and equal(self.last[:2], (variant, features)):
            return self.last[2]
        return None

    def used(self, variant: Variant, features: SamplerFeatures, spec: StepSpec) -> StepRunner:
        """The runner of this spec, which is the one used last from now on."""
        self.runners[spec] = self.runners.pop(spec)
        self.last = (variant, features, self.runners[spec])
        return self.runners[spec]

    def make_room(self, spec: StepSpec, plain: Callable[[], StepSpec]) -> bool:
        """Before a caller's functions get their own steps, drop the least recently used ones if there are many.

        Otherwise a function that is defined anew for each call, such as a lambda in a loop, would fill the memory with
        graphs. Steps with the functions of the `plain` spec stay. Rows for the values of edits are dropped with the
        last step that reads them, unless running sequences have values there. Returns whether any were dropped.
        """
        if len(self.runners) < MOST_CHANGED:
            return False
        usual = functions_in(plain())
        known = dict.fromkeys(map(functions_in, reversed(self.runners)))  # found by hash, see `equal`
        known.pop(usual, None)
        if functions_in(spec) in {usual, *known} or len(known) < MOST_CHANGED:
            return False
        oldest = {*list(known)[MOST_CHANGED - 1 :]}
        for old in [one for one in self.runners if functions_in(one) in oldest]:
            del self.runners[old]
        read = {(), self.joined, spec.edits, *(one.edits for one in self.runners)}
        self.choices = {channels: some for channels, some in self.choices.items() if channels in read}
        self.tried.clear()
        self.last = None
        return True


def functions_in(spec: StepSpec) -> tuple[Layers, tuple[Channel, ...], tuple[Callable, ...]]:
    """The functions that a caller may give to a step."""
    return spec.layers, spec.edits, spec.features.logits_fns


def functions_of(spec: StepSpec) -> set[Callable]:
    """The same one by one, and fnllm's own among them."""
    return {*spec.layers, *(channel.apply for channel in spec.edits), *spec.features.logits_fns}
