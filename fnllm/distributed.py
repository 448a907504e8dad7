"""Joining the other ranks (effect): torchrun's environment, made into a `TensorParallel` value.

Every rank runs the same script on the same inputs. `agree` checks this once per call. `join` makes sure that a rank
which fails ends at once and says why, so that the launcher can end the others.
"""

import importlib
import os
import secrets
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from fnllm.fingerprint import fingerprint
from fnllm.one_shot import one_shot_tp
from fnllm.tensor_parallel import SINGLE, TensorParallel, process_group_tp
from fnllm_weights import Params, Shard

TIMEOUT_NAME, TIMEOUT_SECONDS = "FNLLM_TIMEOUT_S", 600.0
# Sums by NCCL or gloo, or those it suits through peer memory (see one_shot.py); unset: what the machine's links allow.
ALL_REDUCE_NAME, ALL_REDUCES = "FNLLM_ALL_REDUCE", ("group", "one_shot")
FAILED, INTERRUPTED = 1, 130  # exit statuses
# What gloo and NCCL say on a rank that was waiting for one that is gone.
CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


def launched() -> Shard:
    """This process's place among the ranks that torchrun started; one of one outside torchrun."""
    return Shard(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def timeout() -> timedelta:
    """How long a rank waits for the others: FNLLM_TIMEOUT_S seconds; ValueError when that is no positive number."""
    text = os.environ.get(TIMEOUT_NAME, str(TIMEOUT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"{TIMEOUT_NAME} must be a positive number of seconds, found {text!r}")
    return timedelta(seconds=seconds)


def join(device: torch.device) -> None:
    """Initialise torch.distributed for the ranks that torchrun started, unless the script did."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout(), device_id=device)
    else:
        # Imported later, as torch._dynamo does at the first draw, its functions take the group for a default argument
        # and keep it for ever: gloo's threads outlive the interpreter, and may abort a run that went well at its end.
        importlib.import_module("torch.distributed.nn.functional")
        dist.init_process_group("gloo", timeout=timeout())
    sys.excepthook = end_rank
    # Not through atexit: finalizers run from the newest to the oldest, so captured graphs go before the connections.
    weakref.finalize(sys.modules[__name__], leave)


def leave() -> None:
    """Give the connections back at the end of a script that went well."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def end_rank(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The excepthook of a rank: say what happened and end now.

    An orderly end would wait for the device, and the device for the other ranks. Ending closes the connections, and
    torchrun ends whoever still waits. What only follows from another rank's end takes one line, so that the first error
    is the one that shows.
    """
    rank = launched().rank
    if issubclass(kind, RuntimeError) and any(sign in str(error) for sign in CONSEQUENCES):
        lines = [f"fnllm: rank {rank} stopped, because another rank has ended; its error says why\n"]
    else:
        late = "Timed out" in str(error) and issubclass(kind, RuntimeError)
        cause = f" (another rank did not come; {TIMEOUT_NAME} sets the limit)" if late else ""
        lines = [f"fnllm: rank {rank} failed{cause}:\n", *traceback.format_exception(kind, error, trace)]
    sys.stdout.flush()
    sys.stderr.write("".join(lines))  # in one piece: the ranks share a terminal
    sys.stderr.flush()
    os._exit(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else FAILED)


def local_device(device: str | torch.device | None) -> torch.device:
    """The device of this rank: `device` if given, otherwise its own GPU, or the CPU if there are no GPUs.

    Raises ValueError for an unknown device, and when the machine has fewer GPUs than ranks.
    """
    try:
        wanted = torch.device("cuda" if device is None and torch.cuda.is_available() else device or "cpu")
    except (RuntimeError, TypeError):
        raise ValueError(f"device={device!r} is not known; use 'cpu', 'cuda' or 'cuda:1'") from None
    if wanted.type != "cuda" or wanted.index is not None:
        return wanted
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if not count:
        raise ValueError(f"device={device!r}: PyTorch finds no GPU on this machine; use device='cpu'")
    if index >= count:
        raise ValueError(
            f"LOCAL_RANK={index} has no GPU: this machine shows {count}; start --nproc-per-node {count} or less"
        )
    return torch.device("cuda", index)


def peers_share_memory(size: int) -> bool:
    """Whether each rank's GPU can read the others' memory: all of them are in this machine and linked.

    Sums are then faster through it: 2.0 against 10.9 us for 8 KB on two H200, and 1.3 times the tokens of a decode step
    of one sequence (benchmarks/results/tensor_parallel.json).
    """
    if os.environ.get("LOCAL_WORLD_SIZE") != str(size) or torch.cuda.device_count() < size:
        return False
    return all(torch.cuda.can_device_access_peer(a, b) for a in range(size) for b in range(size) if a != b)


def world(shard: Shard) -> TensorParallel:
    """The `TensorParallel` of parameters that hold one shard.

    Raises ValueError when the process group's ranks are not the shards.
    """
    if shard.size == 1:
        return SINGLE
    tp = process_group_tp()
    if (tp.rank, tp.size) != shard:
        raise ValueError(
            f"these params are shard {shard.rank} of {shard.size}, and this process is rank {tp.rank} of {tp.size}; "
            "load under torchrun, or give engine(..., tp=process_group_tp(group)) the group that holds the shards"
        )
    how = os.environ.get(ALL_REDUCE_NAME) or ALL_REDUCES[peers_share_memory(shard.size)]
    if how not in ALL_REDUCES:
        raise ValueError(f"{ALL_REDUCE_NAME} must be one of {', '.join(ALL_REDUCES)}, found {how!r}")
    return one_shot_tp(tp) if how == "one_shot" else tp


def exchange_numbers(tp: TensorParallel, device: torch.device, numbers: list[int]) -> list[list[int]]:
    """Every rank's numbers (64 bits), in rank order."""
    mine = torch.tensor([numbers], dtype=torch.int64, device=device)
    return tp.all_gather(mine, 0).tolist()


def agree(params: Params, seed: int | None, **inputs: Any) -> int:
    """The seed of a call whose inputs are equal on all ranks: the one given, or one drawn on rank 0.

    Ranks that ran different inputs would wait for each other in different places. Raises ValueError on every rank,
    naming the argument and the ranks, when their fingerprints differ.
    """
    drawn = secrets.randbits(63) if seed is None else seed
    if params.shard.size == 1:
        return drawn
    # What the ranks did before shows in what they find in their caches.
    steps = [place.clock for place in (params.workspace or {}).values() if place.clock is not None]
    checked: Mapping[str, Any] = {**inputs, "seed": seed, "earlier calls": steps}
    rows = exchange_numbers(
        world(params.shard), params.tree["norm"].device, [*map(fingerprint, checked.values()), drawn]
    )
    for place, name in enumerate(checked):
        different = [rank for rank, row in enumerate(rows) if row[place] != rows[0][place]]
        if different:
            raise ValueError(
                f"{name} on rank{'s' * (len(different) > 1)} {', '.join(map(str, different))} differ from rank 0's; "
                "every rank must make the same call, so build its arguments from the same data in the same order"
            )
    return rows[0][-1]


def least(tp: TensorParallel, device: torch.device, count: Callable[[], int]) -> int:
    """The smallest count of the ranks; when `count` raises on one of them, all raise."""
    if tp.size == 1:
        return count()
    refusal: Exception | None = None
    try:
        mine = count()
    except Exception as error:  # the others wait for this rank's number
        mine, refusal = -1, error
    counts = [row[0] for row in exchange_numbers(tp, device, [mine])]
    if refusal is not None:
        raise refusal
    if min(counts) < 0:
        raise ValueError(f"rank {counts.index(-1)} refused; its error says why")
    return min(counts)


def together(load: Callable[[], Params]) -> Params:
    """`load()` on all ranks: params for all of them or an error on every one.

    Raises the rank's own error, or ValueError that quotes the first other one, or that names ranks whose models differ.
    """
    import torch.distributed as dist

    params, mine = None, None
    try:
        params = load()
    except Exception as error:
        mine = error
    said: list[Any] = [None] * dist.get_world_size()
    report = (
        None if params is None else fingerprint((params.config, params.tree["norm"].dtype, params.tokenizer is None))
    )
    dist.all_gather_object(said, report if mine is None else f"{type(mine).__name__}: {mine}")
    if mine is not None:
        raise mine
    for rank, message in enumerate(said):
        if isinstance(message, str):
            raise ValueError(f"rank {rank} could not load: {message}")
    if different := [rank for rank, message in enumerate(said) if message != said[0]]:
        raise ValueError(f"ranks {different} loaded another model or dtype than rank 0; give all the same checkpoint")
    assert params is not None
    return params
