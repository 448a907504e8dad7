"""Engine options: an immutable, validated value, and the pure functions that turn it into sizes."""

import dataclasses
import functools
import operator
from dataclasses import dataclass
from typing import Any

from fnllm.numerics import BACKEND, check_numerics
from fnllm.rope import context_limit
from fnllm.sampling import Sampling, check_flag, check_number, named_options
from fnllm_kernels.attention import BACKENDS
from fnllm_weights import ModelConfig

SIZES = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks", "max_chunk")
# eager; eager in CUDA graphs (no compile time); compiled; compiled in CUDA graphs
COMPILE_MODES = ("none", "graphs", "inductor", "reduce-overhead")
BACKENDS_ON_CPU = ("reference", BACKEND)
TRACED_MODES, CAPTURED_MODES = ("inductor", "reduce-overhead"), ("graphs", "reduce-overhead")
# What callers give to `generate` or `engine` among its options, and where it belongs.
ELSEWHERE = {
    **{field.name: f"write sampling=fnllm.Sampling({field.name}=...)" for field in dataclasses.fields(Sampling)},
    **{name: f"write fnllm.load(path, {name}=...)" for name in ("device", "dtype", "revision")},
    "enforce_eager": "write compile='none'",
    "tensor_parallel_size": "start the script by torchrun, with a process for each GPU",
}


@functools.partial(named_options, elsewhere=ELSEWHERE)
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine, also accepted by `generate` and `stream`; None lets the engine choose.

    `compile` is "none" (eager), "graphs" (eager in CUDA graphs, no compile time), "inductor" (torch.compile) or
    "reduce-overhead" (torch.compile in CUDA graphs). Raises TypeError or ValueError that names the option.
    """

    max_model_len: int | None = None  # most tokens of one sequence, prompt and output; None: max_position_embeddings
    max_num_seqs: int = 256  # most sequences that run at a time
    max_num_batched_tokens: int | None = None  # most tokens of one step; None: 8192 on a GPU, 2048 on a CPU
    block_size: int | None = None  # tokens of a cache block; None: 128 on a GPU, 16 on a CPU
    num_blocks: int | None = None  # cache blocks; None: as many as fit in memory, but no more than can be used
    utilization: float | None = None  # share of the device's memory that may be used; None: 0.9 of a GPU, 0.2 of a host
    prefix_cache: bool = True  # reuse cached blocks of equal prompt beginnings
    chunked_prefill: bool = True  # a prompt may take several steps; False: it waits for a step that holds all of it
    max_chunk: int | None = None  # most tokens of one prefill chunk; None: max_num_batched_tokens
    compile: str | None = None  # see above; None: reduce-overhead on a GPU, none on a CPU
    attention: str | None = None  # backend: reference, triton, fa3, fa2; None: the fastest one installed
    numerics: str = "default"  # or batch_invariant: a request's bits do not depend on what else is in its batch

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, positive(name, value))
        for name in ("prefix_cache", "chunked_prefill"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))
        if self.utilization is not None:
            share = check_number("utilization", self.utilization, above=0.0, high=1.0)
            object.__setattr__(self, "utilization", share)
        if self.compile is not None and self.compile not in COMPILE_MODES:
            raise ValueError(f"compile must be one of {', '.join(COMPILE_MODES)}, found {self.compile!r}")
        if self.attention is not None and self.attention not in BACKENDS:
            raise ValueError(f"attention must be one of {', '.join(BACKENDS)}, found {self.attention!r}")
        check_numerics(self.numerics)
        if self.numerics == "batch_invariant" and self.compile in TRACED_MODES:
            raise ValueError(
                "numerics='batch_invariant' needs compile='none' or 'graphs', since code that is compiled for other "
                f"sizes may round differently; found compile={self.compile!r}"
            )
        if self.numerics == "batch_invariant" and self.attention not in (None, BACKEND):
            raise ValueError(
                f"numerics='batch_invariant' uses its own attention backend; found attention={self.attention!r}, leave "
                "it out"
            )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Engine options with everything decided but what free memory and installed packages decide; fields as there."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int | None
    utilization: float
    prefix_cache: bool
    chunked_prefill: bool
    max_chunk: int | None
    compile: str
    attention: str | None
    numerics: str

    @property
    def traced(self) -> bool:
        """Whether steps go through torch.compile."""
        return self.compile in TRACED_MODES

    @property
    def captured(self) -> bool:
        """Whether steps are replayed as CUDA graphs."""
        return self.compile in CAPTURED_MODES


def positive(name: str, value: Any) -> int:
    """A size as a plain int; numpy's integers are some, too."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} must be a positive integer, found {value!r}")
    return number


def resolve(options: EngineOptions, config: ModelConfig, on_gpu: bool) -> Settings:
    """What the options mean for this model on this kind of device.

    Raises ValueError for a `max_model_len` beyond the positions that the model was made for, and for what a CPU cannot
    run.
    """
    limit = context_limit(config)
    if limit is not None and (options.max_model_len or 0) > limit:
        raise ValueError(
            f"max_model_len={options.max_model_len} is more than the {limit} positions this model was made for "
            f"(max_position_embeddings={config.max_position_embeddings}, rope scaling {config.rope.rope_type!r}); "
            f"beyond them its output is not meaningful: use {limit} or less, or a config whose rope scaling extends it"
        )
    if options.compile in CAPTURED_MODES and not on_gpu:
        raise ValueError(
            f"compile={options.compile!r} replays CUDA graphs and the parameters are on a CPU; use 'inductor' or 'none'"
        )
    if options.attention not in (None, *BACKENDS_ON_CPU) and not on_gpu:
        raise ValueError(
            f"attention={options.attention!r} runs on a GPU and the parameters are on a CPU; use 'reference', or None, "
            "which chooses it there"
        )
    invariant = options.numerics == "batch_invariant"
    fastest = "none" if not on_gpu else "graphs" if invariant else "reduce-overhead"
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    decided = dict(
        max_model_len=options.max_model_len or config.max_position_embeddings,
        max_num_batched_tokens=options.max_num_batched_tokens or (8192 if on_gpu else 2048),
        block_size=options.block_size or (128 if on_gpu else 16),
        utilization=options.utilization or (0.9 if on_gpu else 0.2),
        compile=options.compile or fastest,
        attention=BACKEND if invariant else options.attention,
    )
    return Settings(**{**given, **decided})
