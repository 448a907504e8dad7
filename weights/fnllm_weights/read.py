"""Carry out a load plan: this rank's bytes from the files to its device, with parallel threads (effect).

A file is mapped, so a slice touches no other byte of it. Towards a GPU each thread copies chunks from the page cache
into pinned buffers of its own and sends them on a stream of its own: while one chunk travels, the next is copied.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .plan import Copy, LoadPlan, chunks
from .shard import Path, index_of

CHUNK = 16 << 20  # bytes; large enough for the bus to run at full speed, small enough to share out evenly
GPU_THREADS = 8


class LoadReport(NamedTuple):
    """A report of a load: bytes of weights, seconds from allocation to the last byte, and bytes of each tensor."""

    nbytes: int
    seconds: float
    tensors: dict[str, int]

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        return f"{self.nbytes / 1e9:.2f} GB in {self.seconds:.2f} s ({self.gb_per_s:.1f} GB/s)"


def execute(
    plan: LoadPlan, folder: FilePath, dtype: torch.dtype, device: torch.device
) -> tuple[dict[Path, Tensor], LoadReport]:
    """Allocate the leaves, zero their padding and fill the rest.

    Raises ValueError if a file cannot be opened or two tensors that the plan calls equal are not.
    """
    began = time.perf_counter()
    handles = {file: _open(folder / file) for file in {copy.file for copy in plan.copies}}
    handles |= {copy.twin.file: _open(folder / copy.twin.file) for copy in plan.copies if copy.twin}
    with torch.inference_mode(False):  # the threads that fill them are in no mode, nor is whoever trains them
        tensors = {leaf.path: torch.empty(leaf.shape, dtype=dtype, device=device) for leaf in plan.leaves}
    for leaf in plan.leaves:
        for box in leaf.padding:
            tensors[leaf.path][index_of(box)].zero_()
    work = [part for copy in plan.copies for part in chunks(copy, CHUNK)]
    threads = max(1, min(_threads(device), len(work)))
    ready = torch.cuda.Event() if device.type == "cuda" else None
    if ready is not None:
        ready.record(torch.cuda.current_stream(device))
    with ThreadPoolExecutor(threads) as pool:
        shares = [work[start::threads] for start in range(threads)]
        if ready is None:
            counts = [pool.submit(_fill, share, handles, tensors) for share in shares]
        else:
            counts = [pool.submit(_fill_gpu, share, handles, tensors, device, ready) for share in shares]
        read = sum((count.result() for count in counts), Counter())
    return tensors, LoadReport(sum(read.values()), time.perf_counter() - began, dict(read))


def _threads(device: torch.device) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # On the CPU torch's own threads share each copy; ours multiply them only where torch was told to use few.
    return min(GPU_THREADS, cores) if device.type == "cuda" else min(16, cores // torch.get_num_threads())


def _fill(work: Iterable[Copy], handles: Mapping[str, Any], tensors: Mapping[Path, Tensor]) -> Counter[str]:
    read: Counter[str] = Counter()
    for copy in work:
        tensors[copy.path][index_of(copy.dest)].copy_(_read(handles, copy, read))
    return read


def _fill_gpu(
    work: Iterable[Copy],
    handles: Mapping[str, Any],
    tensors: Mapping[Path, Tensor],
    device: torch.device,
    ready: Any,  # the CUDA event after which the tensors may be written
) -> Counter[str]:
    read: Counter[str] = Counter()
    # A new thread starts on device 0, where even pinned memory would open a context.
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        buffers = [torch.empty(CHUNK, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
        sent = [torch.cuda.Event() for _ in range(2)]
        # The tensors' memory may still be in use by kernels queued earlier, and their padding is being zeroed.
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            for number, copy in enumerate(work):
                part = _read(handles, copy, read)
                sent[number % 2].synchronize()
                staged = stage(part, buffers[number % 2])
                target = tensors[copy.path][index_of(copy.dest)]
                # Another dtype is converted on the device: on the CPU that would cost more than the reading.
                moved = staged if staged.dtype == target.dtype else staged.to(device, non_blocking=True)
                target.copy_(moved, non_blocking=True)
                sent[number % 2].record(stream)
        stream.synchronize()
    return read


def stage(part: Tensor, buffer: Tensor) -> Tensor:
    """`part` copied into the first bytes of a flat byte buffer, or as it is if the buffer is too small.

    By numpy, which does it in this very thread; torch would start its thread pool from each of ours.
    """
    nbytes = part.numel() * part.element_size()
    if nbytes > buffer.numel():
        return part
    staged = buffer[:nbytes].view(part.dtype).view(part.shape)
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[part.element_size()]
    np.copyto(staged.view(bits).numpy(), part.view(bits).numpy())
    return staged


def _read(handles: Mapping[str, Any], copy: Copy, read: Counter[str]) -> Tensor:
    part = handles[copy.file].get_slice(copy.tensor)[index_of(copy.source)]
    read[copy.tensor] += part.numel() * part.element_size()
    if copy.twin:
        other = handles[copy.twin.file].get_slice(copy.twin.tensor)[index_of(copy.source)]
        read[copy.twin.tensor] += other.numel() * other.element_size()
        if not torch.equal(part, other.to(part.dtype)):
            raise ValueError(
                f"config.json ties {copy.twin.tensor} to {copy.tensor}, but the checkpoint holds both and they differ; "
                "set tie_word_embeddings to false to use both"
            )
    return part


def _open(file: FilePath) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
