"""Whether the weights changed that computed the cached keys: parameters, and what functions hold besides them."""

import collections
import dataclasses
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import fnllm.optimizers  # noqa: F401  (effect: has the steps of optimizers counted among the writes)

LARGEST = 4096  # a container with more entries is data, not weights: what counts is which one it is
MOST = 4 * LARGEST  # once so many things were found, further ones count by their identity too
OF_EVERY_MODULE = frozenset(torch.nn.Module().__dict__) - {"training"}
ITS_TREE = frozenset(("_parameters", "_buffers", "_modules"))
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque, types.MappingProxyType)
# Of these, and of dataclasses, equal ones are often made anew: they count by their type and by what they hold.
BY_CONTENT = (*CONTAINERS, range, slice, functools.partial, types.MethodType, types.SimpleNamespace)
DESCRIPTORS = (staticmethod, classmethod, property, functools.cached_property, functools.partialmethod)
# Folders whose code is not looked into, as that of installed packages is not: of fnllm, torch and Python itself.
OF_FNLLM_AND_TORCH = (os.path.dirname(__file__), os.path.dirname(torch.__file__))
OF_PYTHON = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
LIBRARIES = tuple(os.path.join(folder, "") for folder in (*OF_FNLLM_AND_TORCH, *OF_PYTHON))


class Itself:
    """Compares an object by identity, and keeps it alive, so that no other object gets its id."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)


CONSTANTS = (
    *(int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, types.NoneType),
    *(types.CodeType, Itself),  # code, since tools that reload a file give other code to the functions there are
)


class Seen(NamedTuple):
    """Tensors and constants at one look."""

    leaves: list[Tensor]  # kept, so that no other tensor gets their identity
    places: list[tuple]  # identity, address, shape and strides of each
    constants: list[tuple[type, Hashable]]
    writes: list[int]  # how often each was written, as PyTorch counts it


class Held(NamedTuple):
    """What functions read besides their arguments."""

    leaves: list[Tensor]  # each once
    constants: list[tuple[type, Hashable]]  # what identifies everything else, in the order in which it was found


def look(leaves: list[Tensor], constants: list[tuple[type, Hashable]]) -> Seen:
    """What distinguishes these tensors from others, and from themselves before a write; no values are read."""
    places = [(id(leaf), leaf.data_ptr(), leaf.shape, leaf.stride()) for leaf in leaves]
    return Seen(leaves, places, constants, [writes_to(leaf) for leaf in leaves])


def writes_to(x: Tensor) -> int:
    """How often a tensor's memory was written, as PyTorch counts it; of those made in inference mode it counts none."""
    return 0 if x.is_inference() else x._version


class Versions:
    """Version numbers for the contents of groups of tensors, by key; no number is used again for other contents.

    PyTorch counts the writes to a tensor, except those through `.data` or in inference mode: call `forget` after one of
    those.
    """

    def __init__(self) -> None:
        self.changes = 1
        self.first = 1  # given to a group at its first look: nothing is computed by it yet
        self.seen: dict[Hashable, tuple[Seen, int]] = {}  # at the last look, and the number given then

    def of(self, key: Hashable, leaves: list[Tensor], constants: Sequence = ()) -> tuple[int, bool]:
        """The version of what these tensors and constants hold, and whether graphs captured earlier are stale.

        They are stale if a tensor may have moved in memory or a constant has changed.
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
        """Drop the tensors of all groups except those with a wanted key, and the one without a key."""
        kept = {key: seen for key, seen in self.seen.items() if key is None or wanted(key)}
        if len(kept) < len(self.seen):  # those let go of may change, and be looked at again as if for the first time
            self.first = self.changes = self.changes + 1
        self.seen = kept

    def forget(self) -> None:
        """Give every group another version at its next look, which still notices moved tensors."""
        self.seen = {key: (seen._replace(writes=[-1]), number) for key, (seen, number) in self.seen.items()}

    def catch_up(self, changes: int) -> None:
        """`forget`, with new versions above the `changes` of every rank, so that all give the same ones."""
        self.changes = changes
        self.forget()


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
    """Whether a tree holds the same tensor objects as when `kept` was made from it; some 5 us for 230 of them.

    It does not look for writes to them: that takes five times as long (`look`), too long for every step.
    """
    return equal(tree, kept)


def equal(a: Any, b: Any) -> bool:
    """Whether two values are equal, where a tensor equals none but itself, as its hash says too.

    Functions may be objects that compare by what they hold, such as frozen dataclasses of tensors.
    """
    with ByIdentity():
        return a == b


def held_by(functions: Iterable[Any]) -> Held:
    """Every tensor that functions read besides their arguments, and constants that identify everything else they read.

    Numbers, strings and the like count by value; containers, dataclasses, namespaces, methods and partials by type and
    content; everything else by identity. Containers and the like, modules, callable objects, functions and classes are
    searched, and so is what a function names; among functions and classes that it names, only those of its own file.
    Not searched are code of installed packages, containers of more than `LARGEST` entries, and anything after the first
    `MOST` things. The identities of the given functions are not recorded.
    """
    leaves: list[Tensor] = []
    constants: list[tuple[type, Hashable]] = []
    first: dict[int, int] = {}  # where each thing was found first
    waiting = list(functions)  # grows, nearest first, and keeps what was made for this look from handing on an identity
    given = len(waiting)
    for at, x in enumerate(waiting):
        if isinstance(x, CONSTANTS):
            constants.append((type(x), value_of(x)))
            continue
        place = first.setdefault(id(x), at)
        if isinstance(x, Tensor) or place < at:
            constants.append((type(x), ~place))  # [a, b, a] is not [a, b, b]; negative, as no number of parts is
            if place == at:
                leaves.append(x)
            continue
        found, small = len(waiting), not isinstance(x, CONTAINERS) or len(x) <= LARGEST
        looked_through = small and found < MOST
        if looked_through:
            waiting.extend(parts(x))
        if looked_through and (isinstance(x, BY_CONTENT) or dataclasses.is_dataclass(type(x))):
            constants.append((type(x), len(waiting) - found))  # [[a], [b]] is not [[a, b], []]
        elif at >= given:
            constants.append((type(x), Itself(x)))
    return Held(leaves, constants)


def value_of(x: Any) -> Hashable:
    """What tells a constant from others of its type: -0.0 from 0.0, but no NaN from another."""
    if isinstance(x, np.generic):
        return x.dtype, x.tobytes()
    return repr(x) if isinstance(x, (float, complex)) else x


def parts(x: Any) -> Iterator[Any]:
    """What an object holds that may be, or hold, tensors or constants."""
    if isinstance(x, types.FunctionType):
        yield from beside_code(x)
        if not of_library(x.__globals__):
            yield x.__code__
            yield from named_by(x)
    elif isinstance(x, CONTAINERS):
        yield from x
        yield from x.values() if isinstance(x, (dict, types.MappingProxyType)) else ()
    elif isinstance(x, torch.nn.Module):
        yield from (*x._parameters.values(), *x._buffers.values(), *x._modules.values())
        for name, part in x.__dict__.items():
            if name not in OF_EVERY_MODULE or (part and name not in ITS_TREE):  # the latter are hooks
                yield part
        yield type(x)
    elif isinstance(x, type):
        for one in x.__mro__:
            if not of_library(getattr(sys.modules.get(one.__module__), "__dict__", {})):
                yield from (y for name, y in vars(one).items() if name[:2] != "__" or callable(y))
    elif isinstance(x, (range, slice)):
        yield from (x.start, x.stop, x.step)
    elif isinstance(x, functools.partial):
        yield from (x.func, x.args, x.keywords)
    elif isinstance(x, (types.MethodType, types.BuiltinMethodType)):
        yield from (getattr(x, "__func__", None), x.__self__)
        yield from () if isinstance(x.__self__, (type, types.ModuleType, torch.nn.Module)) else attributes(x.__self__)
    elif isinstance(x, DESCRIPTORS):
        yield from (getattr(x, name, None) for name in ("__func__", "fget", "func", "args", "keywords"))
    elif isinstance(x, types.SimpleNamespace) or dataclasses.is_dataclass(x):
        yield from attributes(x)
    elif callable(x):
        # What a library's objects note as they are called, such as a kernel its compiled forms, is no weight.
        library = of_library(getattr(sys.modules.get(type(x).__module__), "__dict__", {}))
        yield from (getattr(x, "__wrapped__", None),) if library else attributes(x)


def beside_code(x: types.FunctionType) -> Iterator[Any]:
    """What a function itself holds: defaults, attributes and what it closes over."""
    yield from (held for held in (x.__defaults__, x.__kwdefaults__, x.__dict__) if held)
    yield from (cell.cell_contents for cell in x.__closure__ or () if cell != types.CellType())


def named_by(x: types.FunctionType) -> Iterator[Any]:
    """The globals that a function names; those that are functions or classes of other files as no more than that."""
    for name in names_in(x.__code__):
        if name in x.__globals__:
            y = x.__globals__[name]
            if isinstance(y, types.FunctionType) and y.__globals__ is not x.__globals__:
                yield Itself(y)
                yield from beside_code(y)  # what it decorates may be of this file
            elif isinstance(y, type) and y.__module__ != x.__globals__.get("__name__"):
                yield Itself(y)
            else:
                yield y


def attributes(x: Any) -> Iterator[Any]:
    """What an object holds, in its `__dict__`, in the slots of its classes, and in these."""
    yield getattr(x, "__dict__", {})
    for one in type(x).__mro__:
        slots = (name for name, y in vars(one).items() if isinstance(y, types.MemberDescriptorType))
        yield from (getattr(x, name, None) for name in slots)
    yield type(x)


def of_library(names: Mapping[str, Any]) -> bool:
    """Whether these are the globals of a module that was installed, or came with Python; a notebook has no file."""
    file = names.get("__file__")
    if not isinstance(file, str):
        return names.get("__name__") in sys.builtin_module_names
    return file.startswith(LIBRARIES) or "site-packages" in file or "dist-packages" in file


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names that a function looks up, those in the functions and comprehensions inside it too."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_in(inner)
