"""The blocks of the cache: who holds each, which are free, and which prefix of which prompt each full one carries.

A block is in exactly one of three places: held (in the table of `refs` sequences), free, or cached-only (held by none,
still carrying a published prefix, kept in order of last use until its room is needed). The prefix map is exact: a key
is the number of the parent entry and the block's own tokens, compared as such; a parent number stands for one content
for ever, so equal keys mean equal prefixes and no hash is trusted.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .evolve import evolve
from .line import Line, push_back, push_front, remove, take_front
from .pmap import Map

Parent = int | tuple[Hashable, Hashable]  # the number of an entry, or above the first block (cache_key, version)
Key = tuple[Parent, bytes]
NOT_READY = -1


class Entry(NamedTuple):
    """One full block's worth of tokens after one prefix: its number, its block, and who is computing it until then."""

    number: int
    block: int  # NOT_READY until the step that fills it is committed
    owner: int  # the sequence computing it; -1 once ready


class Block(NamedTuple):
    """A block in use: the number of tables that name it, and its key once it may be shared."""

    refs: int
    key: Key | None


PRIVATE = Block(1, None)


@dataclass(frozen=True)
class Pool:
    """All blocks and the prefix map. Blocks from `fresh` on have never been used and need no entry anywhere."""

    num_blocks: int
    fresh: int = 0
    free: Line = Line()
    cached: Line = Line()  # least recently used first
    blocks: Map = Map()  # block -> Block; free blocks have none
    prefix: Map = Map()  # Key -> Entry
    next_number: int = 0
    evictions: int = 0


def idle(pool: Pool) -> int:
    """Blocks that `take` can hand out: free ones and cached-only ones."""
    return len(pool.free) + pool.num_blocks - pool.fresh + len(pool.cached)


def take(pool: Pool, count: int) -> tuple[Pool, list[int]]:
    """Hands out `count` blocks with one reference each, evicting cached-only ones last; `count` <= `idle(pool)`."""
    free, taken = take_front(pool.free, count)
    fresh = min(pool.num_blocks, pool.fresh + count - len(taken))
    taken.extend(range(pool.fresh, fresh))
    cached, prefix, evictions = pool.cached, pool.prefix, pool.evictions
    if len(taken) < count:
        cached, evicted = take_front(cached, count - len(taken))
        drafted = prefix.mutate()
        for block in evicted:
            del drafted[pool.blocks[block].key]
        prefix = drafted.finish()
        evictions += len(evicted)
        taken.extend(evicted)
    blocks = pool.blocks.mutate()
    for block in taken:
        blocks[block] = PRIVATE
    changes = {"fresh": fresh, "free": free, "cached": cached, "prefix": prefix, "evictions": evictions}
    return evolve(pool, blocks=blocks.finish(), **changes), taken


def hold(pool: Pool, held: Iterable[int]) -> Pool:
    """Adds a reference to each block, as often as it is named; a cached-only one can no longer be evicted then."""
    counts, revived = Counter(held), []
    if not counts:
        return pool
    blocks = pool.blocks.mutate()
    for number, count in counts.items():
        block = blocks[number]
        if block.refs == 0:
            revived.append(number)
        blocks[number] = Block(block.refs + count, block.key)
    return evolve(pool, blocks=blocks.finish(), cached=remove(pool.cached, revived))


def drop(pool: Pool, table: Sequence[int]) -> Pool:
    """Takes back one reference of each block of a table.

    The last of the table goes first, so that in the line of eviction a block always stands before its parent.
    """
    blocks, cached, freed = pool.blocks.mutate(), [], []
    for number in reversed(table):
        block = blocks[number]
        if block.refs > 1:
            blocks[number] = Block(block.refs - 1, block.key)
        elif block.key is not None:
            blocks[number] = Block(0, block.key)
            cached.append(number)
        else:
            del blocks[number]
            freed.append(number)
    return evolve(
        pool, blocks=blocks.finish(), cached=push_back(pool.cached, cached), free=push_front(pool.free, freed)
    )


def publish(pool: Pool, filled: Iterable[tuple[Key, int, int, int]]) -> tuple[Pool, list[int]]:
    """Makes full blocks shareable and returns the number of each one's entry.

    Each item is (key, block, number announced for it or -1, sequence that filled it). When another block already
    carries the same prefix, that one stays and ours remains private; both continue under the same number.
    """
    prefix, blocks, number, numbers = pool.prefix.mutate(), pool.blocks.mutate(), pool.next_number, []
    for key, block, announced, owner in filled:
        entry, held = prefix.get(key), blocks[block]
        own = announced if entry is None else entry.number
        if own < 0:
            own, number = number, number + 1
        if entry is None or entry.block == NOT_READY:
            if held.key is None:
                prefix[key] = Entry(own, block, -1)
                blocks[block] = Block(held.refs, key)
            # A block has one key. A shared block may have got its own from another holder, by other numbers (a prefix
            # that was evicted and computed again has a new one); then nothing will come of what we announced.
            elif entry is not None and entry.owner == owner:
                del prefix[key]
        numbers.append(own)
    return evolve(pool, prefix=prefix.finish(), blocks=blocks.finish(), next_number=number), numbers


def announce(pool: Pool, parent: Parent, tokens: Sequence[bytes], owner: int) -> tuple[Pool, tuple[int, ...]]:
    """Enters the full blocks that `owner` is about to compute after `parent`, and returns their numbers.

    Others that need one of them wait for it rather than compute it twice; nobody can read it before `publish`.
    """
    if not tokens:
        return pool, ()
    prefix, number, numbers = pool.prefix.mutate(), pool.next_number, []
    for block_tokens in tokens:
        key = (parent, block_tokens)
        # Behind a new number there is nothing to be found.
        entry = prefix.get(key) if number == pool.next_number else None
        if entry is None:
            entry, number = Entry(number, NOT_READY, owner), number + 1
            prefix[key] = entry
        parent = entry.number
        numbers.append(parent)
    return evolve(pool, prefix=prefix.finish(), next_number=number), tuple(numbers)


def withdraw(pool: Pool, keys: Iterable[Key], owner: int) -> Pool:
    """Takes back what `owner` announced and has not filled."""
    prefix = pool.prefix.mutate()
    for key in keys:
        entry = prefix.get(key)
        if entry is not None and entry.block == NOT_READY and entry.owner == owner:
            del prefix[key]
    return evolve(pool, prefix=prefix.finish())


def forget(pool: Pool, lost: Iterable[int]) -> Pool:
    """Drops blocks from the prefix map, so that nobody finds them again; cached-only ones become free."""
    prefix, blocks, freed = pool.prefix.mutate(), pool.blocks.mutate(), []
    for number in lost:
        block = blocks.get(number)
        if block is None or block.key is None:
            continue
        del prefix[block.key]
        if block.refs:
            blocks[number] = Block(block.refs, None)
        else:
            del blocks[number]
            freed.append(number)
    return evolve(
        pool,
        prefix=prefix.finish(),
        blocks=blocks.finish(),
        cached=remove(pool.cached, freed),
        free=push_front(pool.free, freed),
    )


def match(pool: Pool, parent: Parent, tokens: Sequence[bytes]) -> tuple[list[Entry], Key | None]:
    """The entries of the longest cached prefix, and the key after them if a running sequence is computing it."""
    found: list[Entry] = []
    for block_tokens in tokens:
        key = (parent, block_tokens)
        entry = pool.prefix.get(key)
        if entry is None:
            return found, None
        if entry.block == NOT_READY:
            return found, key
        found.append(entry)
        parent = entry.number
    return found, None
