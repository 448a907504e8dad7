"""A persistent mapping: every change gives a new map, shares nearly all memory with the old one, and leaves it valid.

`Map` is the hash trie of the package `immutables` where that is installed (it has no wheels for the newest Pythons),
and otherwise `PlainMap`, which does the same at a few microseconds a change instead of one. In a `PlainMap` two levels
of 64 branches lead to 4096 small dicts, chosen by the key's hash; a change copies one dict and the two branches above.
"""

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

try:
    import immutables
except ImportError:
    immutables = None

BITS = 6
MASK = (1 << BITS) - 1
ALL = (1 << 2 * BITS) - 1
_ROOT = (({},) * (MASK + 1),) * (MASK + 1)


class Readable:
    """How a map and a draft of one look a key up."""

    __slots__ = ("_root", "_count")
    _root: Any  # 64 branches of 64 dicts each
    _count: int

    def __contains__(self, key: Hashable) -> bool:
        place = hash(key)
        return key in self._root[place >> BITS & MASK][place & MASK]

    def __getitem__(self, key: Hashable) -> Any:
        place = hash(key)
        return self._root[place >> BITS & MASK][place & MASK][key]

    def get(self, key: Hashable, default: Any = None) -> Any:
        """The value of `key`, or `default`."""
        place = hash(key)
        return self._root[place >> BITS & MASK][place & MASK].get(key, default)


class PlainMap(Readable):
    """An immutable mapping. The order of iteration depends on the hashes alone and not on the history."""

    __slots__ = ()

    def __init__(self, root: tuple = _ROOT, count: int = 0) -> None:
        self._root = root
        self._count = count

    def __len__(self) -> int:
        return self._count

    def items(self) -> Iterator[tuple[Any, Any]]:
        """All (key, value) pairs."""
        return (item for branch in self._root for leaf in branch for item in leaf.items())

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self.items())

    def set(self, key: Hashable, value: Any) -> "PlainMap":
        """The map with `key` set.

        >>> old = PlainMap().set("a", 1)
        >>> new = old.set("a", 2).set("b", 3)
        >>> old["a"], new["a"], len(old), len(new)
        (1, 2, 1, 2)
        """
        high, low = hash(key) >> BITS & MASK, hash(key) & MASK
        root, branch = list(self._root), list(self._root[high])
        branch[low] = leaf = {**branch[low], key: value}
        count = self._count + len(leaf) - len(self._root[high][low])
        root[high] = tuple(branch)
        return PlainMap(tuple(root), count)

    def delete(self, key: Hashable) -> "PlainMap":
        """The map without `key`; KeyError if it is not there."""
        draft = self.mutate()
        del draft[key]
        return draft.finish()

    def mutate(self) -> "Draft":
        """A draft that begins as this map."""
        return Draft(self._root, self._count)


class Draft(Readable):
    """A map being changed in place by one function, from `mutate` to `finish`; nobody else sees it."""

    __slots__ = ("_own",)

    def __init__(self, root: tuple, count: int) -> None:
        self._root = list(root)
        self._count = count
        self._own: dict[int, dict] = {}  # the leaves copied so far, by place

    def __setitem__(self, key: Hashable, value: Any) -> None:
        leaf = self._leaf(hash(key) & ALL)
        self._count += key not in leaf
        leaf[key] = value

    def __delitem__(self, key: Hashable) -> None:
        del self._leaf(hash(key) & ALL)[key]
        self._count -= 1

    def pop(self, key: Hashable) -> Any:
        """Removes `key` and returns its value; KeyError if it is not there."""
        value = self._leaf(hash(key) & ALL).pop(key)
        self._count -= 1
        return value

    def _leaf(self, place: int) -> dict:
        leaf = self._own.get(place)
        if leaf is None:
            branch = self._root[place >> BITS]
            if type(branch) is tuple:  # a list is a copy of our own
                branch = self._root[place >> BITS] = list(branch)
            leaf = branch[place & MASK] = self._own[place] = branch[place & MASK].copy()
        return leaf

    def finish(self) -> PlainMap:
        """The changed map; the draft must not be used any more."""
        root = self._root
        for index in {place >> BITS for place in self._own}:
            root[index] = tuple(root[index])
        return PlainMap(tuple(root), self._count)


if TYPE_CHECKING:
    Map: TypeAlias = PlainMap
else:
    Map = PlainMap if immutables is None else immutables.Map
