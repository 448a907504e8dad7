"""Edits: pure functions applied to activations at named sites, chosen per request; steering, ablation, patching.

A `Channel` (site, function, shapes) is compiled into the step; a request's values are rows of tensors that it reads.
"""

import numbers
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnllm.ambient import in_torch_func


@dataclass(frozen=True, eq=False)
class Edit:
    """Applies `apply(x, ctx, *values) -> y` to an activation `x` [tokens, ...] at a site; y has x's shape and dtype.

    `values` are tensors of any shape that belong to the request. `apply` gets each with a leading axis of tokens, where
    row t belongs to the request of token t; `ctx.batch.positions[t]` is the position of that token in its sequence.
    Edits with the same function and equal shapes share one compiled step whatever their values, so define the function
    once instead of writing a lambda in each call. Raises TypeError or ValueError for other sites, functions or values.
    """

    site: str
    apply: Callable[..., Tensor]
    values: Any = ()  # a tensor or several; stored as a tuple

    def __post_init__(self) -> None:
        if not isinstance(self.site, str) or "*" in self.site:
            raise ValueError(
                f"site must be one name, as in 'layers.3.resid_post', found {self.site!r}; give an edit for each layer"
            )
        if not isinstance(self.values, (Tensor, Iterable)):
            raise TypeError(
                f"values of the edit at {self.site} must be a tensor or several, found {self.values!r}; "
                "torch.tensor makes one of a number"
            )
        values = (self.values,) if isinstance(self.values, Tensor) else tuple(self.values)
        for index, value in enumerate(values):
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"values[{index}] of the edit at {self.site} must be a tensor, found {type(value).__name__}"
                )
        check_function(f"apply of the edit at {self.site}", self.apply)
        object.__setattr__(self, "values", values)


class Channel(NamedTuple):
    """The static part of an edit: what a compiled step knows of it."""

    site: str
    apply: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


def steer(site: str, vector: Any, scale: float = 1.0, *, start: int = 0) -> Edit:
    """Add `scale * vector` at every token from position `start` on (Turner et al. 2023, activation addition).

    `vector` has the shape of one token's activation at the site, such as [hidden_size]: a tensor, or anything that
    `torch.as_tensor` takes. Raises TypeError or ValueError that names the argument.
    """
    if not isinstance(scale, (numbers.Real, Tensor)):
        raise TypeError(f"scale must be a number, found {kind_of(scale)}")
    return Edit(site, add_vector, (scale * tensor_of("vector", vector), place("start", start)))


def ablate(site: str, direction: Any) -> Edit:
    """Remove the component along `direction` at every token (Arditi et al. 2024, directional ablation).

    With the unit vector d along `direction`, an activation x becomes x - (x . d) d. `direction` has the shape of one
    token's activation at the site. Raises ValueError if its length is 0, infinite or NaN.
    """
    direction = tensor_of("direction", direction)
    length = direction.to(torch.promote_types(direction.dtype, torch.float32)).norm()
    # Under torch.func it may stand for many lengths, of which none can be looked at.
    if not in_torch_func() and (not length > 0 or length == torch.inf):
        raise ValueError(f"direction has the length {float(length)}; its length must be above 0 and finite")
    return Edit(site, remove_direction, direction / length.to(direction.dtype))


def patch(site: str, rows: Any, position: int) -> Edit:
    """Replace the activations at positions `position` to `position + n - 1` by `rows` [n, *width] from another run.

    `width` is the shape of one token's activation at the site. Raises TypeError or ValueError that names the argument.
    """
    rows = tensor_of("rows", rows)
    if rows.dim() < 2 or len(rows) == 0:
        raise ValueError(
            f"rows must be at least one row of activations, [n, *width]; found shape {tuple(rows.shape)}; pass a "
            "single row as rows[None]"
        )
    return Edit(site, replace_rows, (rows, place("position", position)))


def tensor_of(name: str, x: Any) -> Tensor:
    """What torch.as_tensor makes of an argument. Raises TypeError where it can make nothing of it."""
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        several = isinstance(x, (list, tuple)) and any(isinstance(one, Tensor) for one in x)
        advice = ": torch.stack makes one of several" if several else ""
        raise TypeError(
            f"{name} must be a tensor, or an array or list of numbers that torch.as_tensor takes; "
            f"found {kind_of(x)}{advice}"
        ) from error


def place(name: str, position: Any) -> Tensor:
    """A position as a tensor. Raises TypeError or ValueError unless it is an integer of at least 0."""
    try:
        number = operator.index(position)
    except TypeError:
        raise TypeError(f"{name} must be an integer, found {position!r}") from None
    if not 0 <= number < 2**63:
        raise ValueError(f"{name} counts from the first token and must be at least 0, below 2**63; found {number}")
    return torch.tensor(number, device="cpu")


def add_vector(x: Tensor, ctx: Any, vector: Tensor, start: Tensor) -> Tensor:
    on = column(ctx.batch.positions >= start, x)
    return torch.where(on, (x + vector).to(x.dtype), x)


def remove_direction(x: Tensor, ctx: Any, direction: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    unit = direction.to(wide)
    along = (x * unit).flatten(1).sum(-1)  # heads and their width are one space
    return (x - column(along, x) * unit).to(x.dtype)


def replace_rows(x: Tensor, ctx: Any, rows: Tensor, position: Tensor) -> Tensor:
    """`rows` and `position` have an entry for each sequence, see `values_for`."""
    entry = ctx.batch.entry
    row = ctx.batch.positions - position[entry]
    inside = (row >= 0) & (row < rows.shape[1])
    return torch.where(column(inside, x), rows[entry, row.clamp(0, rows.shape[1] - 1)].to(x.dtype), x)


def values_for(channel: "Channel", values: Sequence[Tensor], entry: Tensor) -> list[Tensor]:
    """What the channel's function gets of values with an entry for each sequence: a row for each token.

    `patch` takes one row of the n that a token's sequence has: it gets them by sequence, as n for each token are many.
    """
    return list(values) if own_function(channel) is replace_rows else [value[entry] for value in values]


def own_function(channel: "Channel") -> Callable[..., Tensor]:
    """The channel's function as it was given: a trial wraps it."""
    return getattr(channel.apply, "__wrapped__", channel.apply)


def width_given(channel: "Channel") -> tuple[int, ...] | None:
    """The width of the activations that the values of steer, ablate and patch are made for; None for other edits."""
    apply = own_function(channel)
    if apply not in (add_vector, remove_direction, replace_rows):
        return None
    return channel.shapes[0][1:] if apply is replace_rows else channel.shapes[0]


def column(of_tokens: Tensor, x: Tensor) -> Tensor:
    """A value for each token, broadcast over the other axes of `x`."""
    return of_tokens.view(-1, *(1,) * (x.dim() - 1))


def edits_of_each(edits: Any, count: int) -> list[tuple[Edit, ...]]:
    """Each of `count` prompts' edits: the same for all, or a list with one entry (some edits, or None) for each.

    Raises TypeError or ValueError that says what is wrong; also for as many edits in a flat list as there are prompts,
    which would be all of them on each, where a caller may mean one each.
    """
    if not isinstance(edits, (Edit, Iterable, type(None))):
        raise TypeError(f"edits must be an Edit, several, or a list with some for each prompt; found {kind_of(edits)}")
    given = [edits] if isinstance(edits, Edit) else list(edits or ())
    if all(isinstance(edit, Edit) for edit in given):
        if len(given) == count > 1:
            raise ValueError(
                f"edits are a flat list of {count} for {count} prompts: write [[a], [b], ...] for one on each, or "
                f"[[a, b, ...]] * {count} for all of them on each prompt"
            )
        return [tuple(given)] * count
    each = [(one,) if isinstance(one, Edit) else tuple(one or ()) for one in given]
    for index, some in enumerate(each):
        if not all(isinstance(edit, Edit) for edit in some):
            raise TypeError(f"edits[{index}] must be an Edit, several, or None; found {kind_of(given[index])}")
    if len(each) != count:
        raise ValueError(
            f"{count} prompts and {len(each)} lists of edits; give edits for all prompts, or one list for each"
        )
    return each


def with_own_values(each: Iterable[Sequence[Edit]]) -> list[tuple[Edit, ...]]:
    """Each request's edits with copies of their values, one copy per edit.

    Cached prefixes are keyed by content: if a caller writes to a tensor while a request that uses it waits or runs,
    neither what the request computes nor what is found under its key may change.
    """
    requests, copies = [tuple(edits) for edits in each], {}
    for edit in (edit for edits in requests for edit in edits):
        if edit not in copies:
            copies[edit] = replace(edit, values=[value.detach().clone() for value in edit.values])
    return [tuple(copies[edit] for edit in edits) for edits in requests]


def channel_of(edit: Edit) -> Channel:
    """The static part of an edit."""
    shapes, dtypes = tuple(tuple(v.shape) for v in edit.values), tuple(v.dtype for v in edit.values)
    return Channel(edit.site, edit.apply, shapes, dtypes)


def channels_of(choices: Iterable[Sequence[Edit]]) -> tuple[Channel, ...]:
    """Channels that contain, at each site, every request's edits in the order in which they apply.

    The order of the requests has no influence, so that steps are reused for another order, except among different
    functions with the same name at one site: what else distinguishes them differs from rank to rank.

    >>> a, b = Edit("x", abs), Edit("x", max)
    >>> [c.apply.__name__ for c in channels_of([[b, a], [b], [a, b]])]
    ['abs', 'max', 'abs']
    """
    at_site: dict[str, dict[tuple[Channel, ...], None]] = {}
    for edits in choices:
        channels = [channel_of(edit) for edit in edits]
        for site in {channel.site for channel in channels}:
            at_site.setdefault(site, {})[tuple(channel for channel in channels if channel.site == site)] = None
    return tuple(channel for site in sorted(at_site) for channel in merged(sorted(at_site[site], key=order_of)))


def order_of(channels: Sequence[Channel]) -> tuple:
    """Sorts the edits of requests at one site: the longest first, which often hold the others."""
    return -len(channels), [(full_name(c.apply), c.shapes, str(c.dtypes)) for c in channels]


def merged(requests: Iterable[Sequence[Channel]]) -> list[Channel]:
    """Channels among which each request's are a subsequence."""
    channels: list[Channel] = []
    for own in requests:
        at = 0
        for channel in own:
            at = find(channel, channels, at)
            if at == len(channels):
                channels.append(channel)
            at += 1
    return channels


def find(channel: Channel, channels: Sequence[Channel], start: int) -> int:
    """The first place of a channel from `start` on, their number if there is none.

    By hash first, as in a dict: functions may be objects whose == asks the tensors that they hold.
    """
    number = hash(channel)
    places = range(start, len(channels))
    return next((i for i in places if hash(channels[i]) == number and channels[i] == channel), len(channels))


def placed(edits: Sequence[Edit], channels: Sequence[Channel]) -> list[Edit | None]:
    """For each channel the edit that uses it. Raises ValueError for an edit that no channel is there for."""
    places: list[Edit | None] = [None] * len(channels)
    behind: dict[str, int] = {}  # by site, the channel of the edit before
    for edit in edits:
        channel = channel_of(edit)
        at = find(channel, channels, behind.get(edit.site, 0))
        if at == len(channels):
            raise ValueError(
                f"this engine was not built for the edit {name_of(edit.apply)} at {edit.site} with values of shapes "
                f"{channel.shapes}; give engine(edits=...) one of this function and these shapes, in this order"
            )
        places[at], behind[edit.site] = edit, at + 1
    return places


def edit_key(edits: Sequence[Edit]) -> Hashable:
    """What tells two edits apart for the prefix cache: function and values, by content. () without edits."""
    return tuple((channel_of(edit), tuple(map(content, edit.values))) for edit in edits)


def content(x: Tensor) -> bytes:
    """The bytes of a tensor."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check_function(where: str, function: Any) -> None:
    """Raise TypeError for what cannot be called, or cannot be a key: steps and cached prefixes are kept by function."""
    if not callable(function):
        raise TypeError(f"{where} must be a function, found {kind_of(function)}")
    try:
        hash(function)
    except TypeError:
        raise TypeError(
            f"{where} must be hashable, since steps and cached prefixes are kept by it, and {name_of(type(function))} "
            "is not; define it with @dataclass(frozen=True), or with __hash__ beside __eq__"
        ) from None


def kind_of(x: Any) -> str:
    """A value for an error message, or only its type if the value may be long."""
    return repr(x) if isinstance(x, (str, int, float, type(None))) else type(x).__name__


def full_name(function: Callable) -> tuple[str, str]:
    """A function's module and name, or those of a callable object's type: the same in every process."""
    return str(getattr(function, "__module__", None)), getattr(function, "__qualname__", type(function).__qualname__)


def name_of(function: Callable) -> str:
    """A function's name for an error message."""
    return getattr(function, "__qualname__", repr(function))
