"""A persistent line of distinct non-negative ints: join or leave at either end or in the middle in O(1).

The waiting queue, the free blocks and the cached blocks in order of last use are such lines. A line is a doubly linked
list whose links are a persistent `Map`, so an old line stays valid and shares nearly all memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from .pmap import Map

END = -1


@dataclass(frozen=True, slots=True)
class Line:
    """Links of each item to its neighbours (`END` at the ends), and the first and last item."""

    links: Map = Map()
    first: int = END
    last: int = END

    def __len__(self) -> int:
        return len(self.links)

    def __contains__(self, item: object) -> bool:
        return item in self.links


def push_back(line: Line, items: Sequence[int]) -> Line:
    """The line with `items` joined at its end, in order.

    >>> list(iterate(push_back(push_back(Line(), [4, 2]), [7])))
    [4, 2, 7]
    """
    if not items:
        return line
    links, last = line.links.mutate(), line.last
    if last != END:
        links[last] = (links[last][0], items[0])
    for before, item, after in zip((last, *items), items, (*items[1:], END), strict=False):
        links[item] = (before, after)
    return Line(links.finish(), items[0] if last == END else line.first, items[-1])


def push_front(line: Line, items: Sequence[int]) -> Line:
    """The line with `items` put before its start one after the other, so the last of them comes out first.

    >>> list(iterate(push_front(push_back(Line(), [4]), [2, 7])))
    [7, 2, 4]
    """
    if not items:
        return line
    links, first, last = line.links.mutate(), line.first, line.last
    for item in items:
        links[item] = (END, first)
        if first == END:
            last = item
        else:
            links[first] = (item, links[first][1])
        first = item
    return Line(links.finish(), first, last)


def remove(line: Line, items: Sequence[int]) -> Line:
    """The line without `items`, each of which must be in it.

    >>> list(iterate(remove(push_back(Line(), [4, 2, 7, 1]), [2, 1])))
    [4, 7]
    """
    if not items:
        return line
    links, first, last = line.links.mutate(), line.first, line.last
    for item in items:
        before, after = links.pop(item)
        if before == END:
            first = after
        else:
            links[before] = (links[before][0], after)
        if after == END:
            last = before
        else:
            links[after] = (before, links[after][1])
    return Line(links.finish(), first, last)


def iterate(line: Line) -> Iterator[int]:
    """The items from first to last."""
    item = line.first
    while item != END:
        yield item
        item = line.links[item][1]


def take_front(line: Line, count: int) -> tuple[Line, list[int]]:
    """The line without its first `count` items, and those items.

    >>> take_front(push_back(Line(), [4, 2, 7]), 2)[1]
    [4, 2]
    """
    taken = list(islice(iterate(line), count))
    return remove(line, taken), taken
