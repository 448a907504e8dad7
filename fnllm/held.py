"""What computed the cached keys, and whether it changed: parameters, and what functions hold beside them."""

import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import fnllm.optimizers  # noqa: F401  (effect: has the steps of optimizers counted among the writes)

LARGEST = 4096  # a container with more entries is data, not weights
OF_EVERY_MODULE = frozenset(torch.nn.Module().__dict__) - {"training"}
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
CONSTANTS = (int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, types.NoneType)


class Seen(NamedTuple):
    """Tensors and constants at one look."""

    leaves: list[Tensor]  # kept, so that no other tensor gets their identity
    places: list[tuple]  # identity, address, shape and strides of each
    constants: list[tuple[type, Hashable]]
    writes: list[int]  # how often each was written, as PyTorch counts it


class Held(NamedTuple):
    """What functions read beside their arguments."""

    leaves: list[Tensor]  # each once
    constants: list[tuple[type, Hashable]]  # numbers, strings and their like, in the order in which they were found


def look(leaves: list[Tensor], constants: list[tuple[type, Hashable]]) -> Seen:
    """What tells these tensors from others, and from themselves before a write; none of them is read."""
    places = [(id(leaf), leaf.data_ptr(), leaf.shape, leaf.stride()) for leaf in leaves]
    return Seen(leaves, places, constants, [writes_to(leaf) for leaf in leaves])


def writes_to(x: Tensor) -> int:
    """How often a tensor's memory was written, as PyTorch counts it; of those made in inference mode it counts none."""
    return 0 if x.is_inference() else x._version


class Versions:
    """Numbers for what groups of tensors hold, each group named by a key; no number comes again for other contents.

    PyTorch counts the writes to a tensor, but for those through `.data` or in inference mode: after one of them,
    `forget` what was seen.
    """

    def __init__(self) -> None:
        self.changes = 1
        self.first = 1  # given to a group at its first look: nothing is computed by it yet
        self.seen: dict[Hashable, tuple[Seen, int]] = {}  # at the last look, and the number given then

    def of(self, key: Hashable, leaves: list[Tensor], constants: Sequence = ()) -> tuple[int, bool]:
        """The number for what these tensors and constants hold, and whether graphs from before this look are stale.

        They are where a tensor may lie elsewhere now, or a constant is another.
        """
        now, (before, number) = look(leaves, list(constants)), self.seen.get(key, (None, 0))
        stale = before is None or (before.places, before.constants) != (now.places, now.constants)
        if before is None:
            number = self.first
        elif stale or before.writes != now.writes:
            number = self.changes = self.changes + 1
        self.seen[key] = now, number
        return number, stale

    def keep(self, wanted: Callable[[Any], bool]) -> None:
        """Let go of the tensors of all groups but those with a wanted key, and the one without a key."""
        kept = {key: seen for key, seen in self.seen.items() if key is None or wanted(key)}
        if len(kept) < len(self.seen):  # those let go of may change, and be looked at again as if for the first time
            self.first = self.changes = self.changes + 1
        self.seen = kept

    def forget(self) -> None:
        """Give every group another number at its next look, which still tells what lies elsewhere."""
        self.seen = {key: (seen._replace(writes=[-1]), number) for key, (seen, number) in self.seen.items()}


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Every tensor of a tree of dicts, lists and tuples; a weight may be several, as quantised ones are."""
    if isinstance(tree, Tensor):
        yield tree
    else:
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_of(part)


class ByIdentity(TorchFunctionMode):
    """Within it a tensor equals none but itself: Python compares what containers hold by identity before it asks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> bool:
        return False


def in_own_containers(tree: Any) -> Any:
    """The same tensors in dicts, lists and tuples of their own, which do not change with the tree's."""
    if isinstance(tree, dict):
        return {key: in_own_containers(part) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        parts = map(in_own_containers, tree)
        return list(parts) if isinstance(tree, list) else tuple(parts)
    return tree


def same_tensors(tree: Any, kept: Any) -> bool:
    """Whether a tree holds the very tensors that it held when `kept` was made of it; some 5 us for 230 of them.

    Writes to them are not looked for: that takes five times as long (`look`), which not every step can wait for.
    """
    with ByIdentity():
        return tree == kept


def held_by(functions: Iterable[Any]) -> Held:
    """Every tensor and constant that some functions read beside their arguments.

    Looked through are modules, containers, dataclasses, namespaces, attributes of callable objects, and functions of
    the same file that a function calls by name; not what functions of other files and other objects hold, nor a
    container of more than `LARGEST` entries.
    """
    leaves: list[Tensor] = []
    constants: list[tuple[type, Hashable]] = []
    seen: dict[int, Any] = {}  # kept, so that nothing that was made for this look hands on its identity
    waiting = list(functions)
    while waiting:
        x = waiting.pop()
        if isinstance(x, CONSTANTS):
            constants.append((type(x), repr(x) if isinstance(x, (float, complex)) else x))  # for -0.0 and NaN
        elif id(x) not in seen:
            seen[id(x)] = x
            if isinstance(x, Tensor):
                leaves.append(x)
            else:
                waiting += parts(x)
    return Held(leaves, constants)


def parts(x: Any) -> Iterator[Any]:
    """What a function or container holds that may hold tensors or constants."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        yield from (getattr(x, one.name, None) for one in dataclasses.fields(x))
    if isinstance(x, torch.nn.Module):
        for module in x.modules():
            yield from module._parameters.values()
            yield from module._buffers.values()
            yield from (part for name, part in module.__dict__.items() if name not in OF_EVERY_MODULE)
        yield type(x).forward
    elif isinstance(x, types.SimpleNamespace):
        yield x.__dict__
    elif isinstance(x, (dict, list, tuple)):
        if len(x) <= LARGEST:
            yield from x
            yield from x.values() if isinstance(x, dict) else ()
    elif isinstance(x, functools.partial):
        yield from (x.func, x.args, x.keywords)
    elif isinstance(x, types.MethodType):
        yield x.__func__
        yield from (x.__self__,) if isinstance(x.__self__, torch.nn.Module) else attributes(x.__self__)
    elif isinstance(x, types.FunctionType):
        yield from (x.__defaults__ or (), x.__kwdefaults__ or {})
        yield from (cell.cell_contents for cell in x.__closure__ or () if cell != types.CellType())
        for name in names_in(x.__code__):
            y = x.__globals__.get(name, types)
            of_this_file = isinstance(y, types.FunctionType) and y.__globals__ is x.__globals__
            if of_this_file or not isinstance(y, (type, types.ModuleType, *FUNCTIONS)):
                yield y
    elif callable(x) and not isinstance(x, type):
        yield from attributes(x)
        yield type(x).__call__


def attributes(x: Any) -> Iterator[Any]:
    """What an object holds, in its `__dict__` or in the slots of its classes."""
    yield getattr(x, "__dict__", {})
    for one in type(x).__mro__:
        slots = (name for name, y in vars(one).items() if isinstance(y, types.MemberDescriptorType))
        yield from (getattr(x, name, None) for name in slots)


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names that a function looks up, those in the functions and comprehensions inside it too."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_in(inner)
