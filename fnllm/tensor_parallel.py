"""Tensor parallelism as a value: this rank, the number of ranks, and the three collectives of sharded functions.

A function that communicates takes a `TensorParallel` argument; nothing else in a step communicates with other ranks.
There are `SINGLE` (one rank, every collective is the identity), `process_group_tp` (torch.distributed, also inside a
compiled graph), `one_shot_tp` (sums through the GPUs' memory) and `simulate` (N ranks as threads of one process, for
tests and experiments).
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class TensorParallel(Protocol):
    """This rank's index among `size` ranks, and the collectives; hashable, so a compiled step may close over it.

    No collective changes its argument. Every rank must make the same calls in the same order with equal shapes.
    """

    @property
    def rank(self) -> int:
        """The index of this rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks."""
        ...

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The elementwise maximum of `x` over the ranks."""
        ...

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The `x` of all ranks, concatenated along `dim` in rank order."""
        ...


@dataclass(frozen=True)
class Single:
    """One rank: nothing to exchange."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x


SINGLE = Single()


@dataclass(frozen=True)
class ProcessGroup:
    """Ranks of a torch.distributed group, by its registered name: unlike the group itself, a traceable constant."""

    rank: int
    size: int
    group_name: str

    # The functional ops are used directly: their eager wrappers return a tensor subclass that waits on first use, which
    # would leak into the caller's values, and the wrappers' names change between torch versions.
    def all_reduce(self, x: Tensor) -> Tensor:
        refuse_gradients(x)
        return _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", self.group_name))

    def all_reduce_max(self, x: Tensor) -> Tensor:
        refuse_gradients(x)
        return _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "max", self.group_name))

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        refuse_gradients(x)
        stacked = _wait(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), self.size, self.group_name))
        # The op concatenates along the first axis: take the ranks' axis apart and move it next to `dim`.
        dim = dim % x.dim()
        by_rank = stacked.reshape(self.size, *x.shape)
        return by_rank.movedim(0, dim).flatten(dim, dim + 1)


def refuse_gradients(x: Tensor) -> None:
    """ValueError where a gradient would be lost or wrong: the ops of a process group have none, or that of another sum.

    Of every rank's loss instead of this one's, where PyTorch gives them one.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(
            "gradients do not pass between the ranks of a process group; wrap the call in torch.no_grad(), train on "
            "one rank, or use fnllm.simulate, through which they do"
        )


def _wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


def process_group_tp(group: Any = None) -> TensorParallel:
    """The `TensorParallel` of a torch.distributed process group; `None` is the default group.

    Works on gloo and NCCL, eager and under `torch.compile(fullgraph=True)`. A group of one rank gives `SINGLE`.

    Raises:
        RuntimeError: if torch.distributed is not initialised.
    """
    import torch.distributed as dist
    import torch.distributed._functional_collectives  # noqa: F401  registers the functional ops

    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("process_group_tp found no process group; call torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    if dist.get_world_size(group) == 1:
        return SINGLE
    return ProcessGroup(dist.get_rank(group), dist.get_world_size(group), group.group_name)


class Call(NamedTuple):
    """One exchange: which, and the shape of this rank's argument."""

    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Through:
    """The exchanges of `inner`, but those that a subclass makes in another way."""

    inner: TensorParallel

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.inner.all_reduce(x)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return self.inner.all_reduce_max(x)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return self.inner.all_gather(x, dim)


@dataclass(frozen=True)
class Ordered(Through):
    """A `TensorParallel` that adds sums in rank order: an all-reduce may cut and order them by the batch's size."""

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self.inner.all_gather(x[None], 0).unbind()
        return sum(parts[1:], parts[0])


@dataclass(frozen=True, eq=False)
class Counting(Through):
    """A `TensorParallel` that notes its exchanges in `calls`; for eager tests, since a graph notes only its tracing."""

    calls: list[Call] = field(default_factory=list)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls.append(Call("all_reduce", tuple(x.shape)))
        return super().all_reduce(x)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        self.calls.append(Call("all_reduce_max", tuple(x.shape)))
        return super().all_reduce_max(x)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        self.calls.append(Call("all_gather", tuple(x.shape)))
        return super().all_gather(x, dim)


def counting(tp: TensorParallel) -> Counting:
    """`tp` with a list `calls` of (kind, shape) of every exchange made through it."""
    return Counting(tp)


class _Abandoned(Exception):
    """Another rank ended without coming to the exchange that this one waits in."""


@dataclass(frozen=True, eq=False)
class _Meeting:
    """Where the simulated ranks exchange: turn -> rank -> what it brought, and the ranks that have ended."""

    size: int
    made: list[int]  # exchanges begun, by rank
    changed: threading.Condition = field(default_factory=threading.Condition)
    turns: dict[int, dict[int, tuple[Call, Tensor]]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def exchange(self, rank: int, call: Call, x: Tensor) -> list[Tensor]:
        with self.changed:
            turn = self.made[rank]
            self.made[rank] += 1
            brought = self.turns.setdefault(turn, {})
            brought[rank] = (call, x)
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(brought) == self.size or self.ended - brought.keys())
            if len(brought) < self.size:
                raise _Abandoned(f"ranks {sorted(self.ended - brought.keys())} ended before exchange {turn}, {call}")
            self.turns.pop(turn - 1, None)  # all have come to this one, so all have read the last
        calls = [brought[r][0] for r in range(self.size)]
        if len(set(calls)) > 1:
            raise ValueError(f"the ranks made different collective calls: {calls}; every rank must make the same calls")
        return [brought[r][1] for r in range(self.size)]

    def leave(self, rank: int) -> None:
        with self.changed:
            self.ended.add(rank)
            self.changed.notify_all()


@dataclass(frozen=True, eq=False)
class Simulated:
    """One rank of a simulation; it meets the others for every exchange."""

    rank: int
    size: int
    meeting: _Meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        # Summed in rank order on every rank, so that all ranks hold equal bits.
        parts = self.meeting.exchange(self.rank, Call("all_reduce", tuple(x.shape)), x)
        return sum(parts[1:], parts[0].clone())

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, Call("all_reduce_max", tuple(x.shape)), x)).amax(0)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, Call("all_gather", tuple(x.shape)), x), dim)


class Simulation(NamedTuple):
    """What `simulate` returns: each rank's result, and the collective calls that every rank made."""

    results: list
    calls: list[Call]


def simulate(size: int, fn: Callable[..., Any], *per_rank_args: Sequence[Any]) -> Simulation:
    """Run `fn(tp, *args)` on `size` ranks in this process; each of `per_rank_args` holds one value per rank.

    The ranks are threads with the caller's grad and inference modes. The first error of a rank ends the others and is
    raised here. Gradients pass through the collectives.

    Raises:
        ValueError: if an argument does not hold `size` values, or the ranks make different collective calls.
    """
    for i, values in enumerate(per_rank_args):
        if len(values) != size:
            raise ValueError(f"per_rank_args[{i}] holds {len(values)} values for size={size}; give one value per rank")
    meeting = _Meeting(size, [0] * size)
    ranks = [counting(Simulated(r, size, meeting) if size > 1 else SINGLE) for r in range(size)]
    results: list = [None] * size
    errors: list[BaseException] = []
    abandoned: list[_Abandoned] = []
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def work(r: int) -> None:
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                results[r] = fn(ranks[r], *(values[r] for values in per_rank_args))
        except _Abandoned as consequence:
            abandoned.append(consequence)
        except BaseException as error:  # an exit, or a test's skip, is one as well
            errors.append(error)
        finally:
            meeting.leave(r)

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if abandoned:
        raise ValueError(f"{abandoned[0]}; every rank must make the same calls")
    return Simulation(results, ranks[0].calls)
