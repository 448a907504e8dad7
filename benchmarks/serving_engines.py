"""The engines of serving.py, each in a process of its own: `serving_engines.py ENGINE SETTINGS_JSON`.

Names of workloads come by stdin, one a line; rows go to the file of the settings, one JSON line each. The last row of a
workload, and that of the start, have `ended`. What a peer needs is imported here alone.
"""

import faulthandler
import json
import signal
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

from workloads import Generate, Prompts, cost, measure

TEMPERATURE = 0.6
CACHE_BYTES = 44 << 30  # of keys and values, the same for each engine, since they share a GPU's memory
BLOCK = 128  # tokens of a block of fnllm's cache on a GPU


def fnllm_generate(s: SimpleNamespace) -> Generate:
    """This project on random weights, all graphs captured."""
    from provenance import random_params

    import fnllm

    params = random_params(s.size, dtype="bfloat16", device="cuda")
    blocks = CACHE_BYTES // (BLOCK * cost(s.size).cache_bytes)
    options = dict(compile=s.compile, max_model_len=s.max_model_len, num_blocks=blocks)
    engine = fnllm.engine(params, report=lambda line: print(line, flush=True), **options)
    engine.prepare(fnllm.Sampling(temperature=TEMPERATURE))

    def generate(prompts: list, lens: list) -> None:
        sampling = [fnllm.Sampling(temperature=TEMPERATURE, max_tokens=n, ignore_eos=True) for n in lens]
        fnllm.generate(params, prompts, sampling, progress=False, **options)

    return generate


def vllm_generate(s: SimpleNamespace) -> Generate:
    """vLLM on a checkpoint of this shape, as it is by default."""
    import vllm

    llm = vllm.LLM(
        s.checkpoint, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=s.max_model_len, seed=0,
        gpu_memory_utilization=0.42, kv_cache_memory_bytes=CACHE_BYTES,
    )  # fmt: skip

    def generate(prompts: list, lens: list) -> None:
        sampling = [
            vllm.SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n, detokenize=False) for n in lens
        ]
        llm.generate([dict(prompt_token_ids=ids) for ids in prompts], sampling, use_tqdm=False)

    return generate


def nano_generate(s: SimpleNamespace) -> Generate:
    """nano-vLLM on a checkpoint of this shape; it has no more than 4096 tokens a sequence in its own benchmark."""
    import torch
    from nanovllm import LLM, SamplingParams

    free, total = torch.cuda.mem_get_info()  # its share counts what others hold
    weights = cost(s.size).weight_bytes
    share = (total - free + CACHE_BYTES + 1.5 * weights) / total
    llm = LLM(s.checkpoint, enforce_eager=False, max_model_len=4096, gpu_memory_utilization=share)

    def generate(prompts: list, lens: list) -> None:
        sampling = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in lens]
        llm.generate(prompts, sampling, use_tqdm=False)

    return generate


ENGINES: dict[str, Callable[[SimpleNamespace], Generate]] = {
    "fnllm": fnllm_generate,
    "vllm": vllm_generate,
    "nano-vllm": nano_generate,
}


def version_of(package: str) -> str | None:
    """What is installed; None for a source tree."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def rounded(value: Any) -> Any:
    """Numbers to six digits."""
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main() -> None:
    engine, s = sys.argv[1], SimpleNamespace(**json.loads(sys.argv[2]))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # says where each thread is, for `serving.py` to end it then

    def emit(**row: Any) -> None:
        row = {name: rounded(value) for name, value in dict(engine=engine, size=s.size, **row).items()}
        with open(s.rows, "a") as file:
            file.write(json.dumps(row) + "\n")

    began = time.perf_counter()
    generate = ENGINES[engine](s)
    warm = Prompts(7)
    # Kernels and graphs of the largest batch, and of long prompts, are not part of the figures.
    generate(warm.make(16, 1024), [32] * 16)
    generate(warm.make(256, 100), [2] * 256)
    emit(workload="start", seconds=time.perf_counter() - began, version=version_of(engine), ended=True)
    for line in sys.stdin:
        which, began = line.strip(), time.perf_counter()
        try:
            for row in measure(generate, s.size, which):
                emit(workload=which, **row)
        except Exception as error:  # the next workload may still run
            emit(workload=which, error=f"{type(error).__name__}: {error}"[:300])
        emit(workload=which, total_seconds=time.perf_counter() - began, ended=True)


if __name__ == "__main__":
    main()
