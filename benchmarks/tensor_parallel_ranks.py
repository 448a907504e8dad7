"""One rank of benchmarks/tensor_parallel.py: torchrun ... tensor_parallel_ranks.py PART SETTINGS_JSON."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from timing import replay_seconds
from workloads import config_dict, measure

import fnllm
import fnllm.engines
import fnllm_weights
from fnllm.decode_layer import HEAD_DIMS
from fnllm.distributed import join, launched, local_device, world
from fnllm.one_shot import one_shot_tp
from fnllm.rope import make_rope
from fnllm.scoring import context, packed_batch
from fnllm.tensor_parallel import ProcessGroup

ROOT = Path(__file__).parents[1]
GREEDY = 16  # tokens compared for each prompt
LARGEST_SUM = 1 << 24  # bytes
TINY = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96
)


def emit(s: SimpleNamespace, **row: Any) -> None:
    """Add a result, on rank 0."""
    if launched().rank == 0:
        line = json.dumps(dict(ranks=s.ranks, all_reduce=os.environ.get("FNLLM_ALL_REDUCE", "usual"), **row))
        print(line, flush=True)
        with open(s.rows, "a") as file:
            file.write(line + "\n")


def group() -> ProcessGroup:
    import torch.distributed as dist
    import torch.distributed._functional_collectives  # noqa: F401  registers the functional ops

    return ProcessGroup(dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name)


def shape(size: str) -> fnllm_weights.ModelConfig:
    fields = config_dict("0.6b" if size == "tiny" else size)
    return fnllm_weights.ModelConfig.from_dict({**fields, **TINY, "vocab_size": 2000} if size == "tiny" else fields)


def options(s: SimpleNamespace, **more: Any) -> dict:
    return dict(
        compile=s.compile, max_model_len=4096, **({"num_blocks": 512, "max_num_seqs": 8} if s.cpu else {}), **more
    )


def equal(s: SimpleNamespace) -> None:
    """Greedy tokens of the oracle checkpoints in float32 through the captured step; logits of both dtypes to a file."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    kept = {}
    folders = [folder.parent for folder in sorted(Path(s.oracle).glob("*/config.json"))]
    compiled = s.compile != "none"
    for folder in [*folders, *([Path(s.smollm2)] if s.smollm2 else [])]:
        small = folder in folders
        golden = json.loads((folder if small else Path(s.oracle) / "smollm2").joinpath("golden.json").read_text())
        cases = [case for case in golden["prompts"].values() if case["greedy"]]
        params = fnllm.load(folder, dtype="float32", device=s.device)
        # Compiling each of many small models would take the time; one of them and the real one are.
        mode = s.compile if not small or folder.name == "qwen3-odd" else "graphs" if compiled else "none"
        sampling = fnllm.Sampling(temperature=0, max_tokens=GREEDY, ignore_eos=True)
        settings = dict(compile=mode, num_blocks=64, block_size=16, max_num_seqs=8, max_model_len=256)
        outs = fnllm.generate(params, [case["prompt"] for case in cases], sampling, **settings)
        same = [list(out.token_ids) == case["greedy"][:GREEDY] for out, case in zip(outs, cases, strict=True)]
        emit(s, part="equal", checkpoint=folder.name, compile=mode, prompts=len(same), equal_tokens=sum(same))
        for dtype in ("float32", "bfloat16"):
            params = params if dtype == "float32" else fnllm.load(folder, dtype=dtype, device=s.device)
            kept[folder.name, dtype] = logits_of(params, cases[-1]["prompt"] + cases[-1]["greedy"])
        if params.config.head_dim not in HEAD_DIMS:
            continue
        # One sequence in bfloat16 on a GPU takes the fused decode layers.
        alone = fnllm.generate(params, [cases[-1]["prompt"]], replace(sampling, logprobs=0), **settings)[0]
        kept[folder.name, "alone"] = (list(alone.token_ids), [entry.logprob for entry in alone.logprobs])
    if launched().rank == 0:
        torch.save(kept, Path(s.folder) / f"logits{s.ranks}.pt")


def opened(s: SimpleNamespace) -> None:
    """Captures, edits, swapped layers, forks and replays in captured steps; and that the batch-invariant numerics
    score the bits that they generate. What one rank found is left in a file, which more ranks compare with."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    sys.path.append(str(ROOT / "tests" / "distributed"))
    import checks_open

    for name in ("qwen3-odd", "qwen2-window"):
        params = fnllm.load(Path(s.oracle) / name, dtype="float32", device=s.device)
        mode, file = dict(compile=s.compile), Path(s.folder) / f"opened-{name}.pt"
        found = [checks_open.captured(params, **mode), checks_open.states(params, **mode)]
        if launched().size == 1:
            torch.save(found, file)
        else:
            checks_open.expect(found, torch.load(file, params.tree["norm"].device, weights_only=False), name)
        emit(s, part="open", checkpoint=name, compile=s.compile, ok=True)
    for dtype in ("float32", "bfloat16"):
        params = fnllm.load(Path(s.oracle) / "qwen3-odd", dtype=dtype, device=s.device)
        mode = dict(numerics="batch_invariant", compile="none" if s.cpu else "graphs", num_blocks=64, block_size=16)
        sampling = replace(checks_open.GREEDY, logprobs=0)
        outs = fnllm.generate(params, checks_open.PROMPTS, sampling, **mode)
        scored = fnllm.score(
            params, [[*p, *out.token_ids] for p, out in zip(checks_open.PROMPTS, outs, strict=True)],
            numerics="batch_invariant",
        )  # fmt: skip
        equal = [
            one[len(p) - 1 :].tolist() == [entry.logprob for entry in out.logprobs]
            for p, out, one in zip(checks_open.PROMPTS, outs, scored, strict=True)
        ]
        emit(s, part="open", numerics="batch_invariant", dtype=dtype, ok=all(equal))


def logits_of(params: fnllm.Params, ids: list[int]) -> torch.Tensor:
    device, tp = params.tree["norm"].device, world(params.shard)
    batch = packed_batch(torch.tensor(ids, device=device), [len(ids)], make_rope(params.config, device))
    with torch.no_grad():
        ctx = context(params, batch, fnllm.Layers(), tp=tp)
        local = ctx.layers.lm_head(params.tree["lm_head"], fnllm.forward(params.tree, ctx), ctx)
        return tp.all_gather(local)[:, : params.config.vocab_size].float().cpu()


def random_model(s: SimpleNamespace) -> fnllm.Params:
    """Random weights of the shape, each rank its own part of one model."""
    config, place = shape(s.size), launched()
    device = local_device(s.device)
    if place.size > 1:
        join(device)
    tree = fnllm_weights.init(config, dtype="float32" if s.cpu else "bfloat16", device=device, shard=place)
    return fnllm.Params(config, None, tree, place, {})


def serve(s: SimpleNamespace) -> None:
    """The workloads, and where a decode step's time goes."""
    params = random_model(s)
    if s.one_rank_group:  # what the collectives of one rank cost, and that they can be captured
        join_alone(s)
        fnllm.engines.world = lambda shard: group()

    def generate(prompts: list, lens: list) -> None:
        sampling = [fnllm.Sampling(temperature=0.6, max_tokens=n, ignore_eos=True) for n in lens]
        vocabulary = params.config.vocab_size
        fnllm.generate(params, [[t % vocabulary for t in p] for p in prompts], sampling, progress=False, **options(s))

    began = time.perf_counter()
    generate([[1, 2, 3]], [8])
    emit(s, part="serve", size=s.size, workload="start", seconds=time.perf_counter() - began)
    if s.cpu:
        began = time.perf_counter()
        generate([[1, 2, 3]] * 4, [16] * 4)
        emit(s, part="serve", size=s.size, workload="four of 16", seconds=time.perf_counter() - began)
        return
    began = time.perf_counter()
    fnllm.engine(params, **options(s)).prepare(fnllm.Sampling(temperature=0.6))  # no graph is made in what follows
    emit(s, part="serve", size=s.size, workload="prepare", seconds=time.perf_counter() - began)
    for which in s.work.split(","):
        for row in measure(generate, s.size, which):
            emit(s, part="serve", size=s.size, workload=which, **row)
    for batch in (1, 32, 256):
        emit(s, part="serve", size=s.size, workload="profile", **profile(generate, batch))


def profile(generate: Any, batch: int, tokens: int = 32) -> dict:
    """Shares of the device's time in decode steps of this batch, by kind of kernel."""
    prompts = [[7 + n, 3, 5] for n in range(batch)]
    generate(prompts, [4] * batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        generate(prompts, [tokens] * batch)
    times = {event.key: event.self_device_time_total for event in seen.key_averages()}
    total = sum(times.values())
    signs = ("nccl", "allreduce", "all_reduce", "push_words", "push_blocks")
    reduces = sum(time for name, time in times.items() if any(sign in name.lower() for sign in signs))
    return dict(
        batch=batch,
        step_device_us=total / tokens,
        all_reduce_us=reduces / tokens,
        all_reduce_share=reduces / max(total, 1e-9),
    )


def join_alone(s: SimpleNamespace) -> None:
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    join(local_device(s.device))


def reduce(s: SimpleNamespace) -> None:
    """Microseconds of one all-reduce among 72 in a captured graph: by the group, by the project's kernel over peer
    memory, and by PyTorch's."""
    join_alone(s)
    device, usual = local_device(s.device), group()
    ways = dict(group=usual.all_reduce, one_shot=one_shot_tp(usual, LARGEST_SUM).all_reduce)
    wrong = check_sums(s, ways["one_shot"], device, 5 if s.cpu else 500)
    emit(s, part="sums", way="one_shot", wrong=wrong)
    for way, all_reduce in {**ways, **({} if s.cpu else dict(torch_one_shot=torch_one_shot(usual, device)))}.items():
        for rows in (1, 8, 32, 64, 128, 256, 512, 1024, 2048):
            x = torch.full((rows, 4096), 2.0**-80, dtype=torch.bfloat16, device=device)
            try:
                if not torch.equal(all_reduce(x), x * s.ranks):
                    raise ArithmeticError("the sum is wrong")
                emit(s, part="reduce", way=way, rows=rows, bytes=x.nbytes, us=time_reduces(all_reduce, x))
            except Exception as error:
                emit(s, part="reduce", way=way, rows=rows, error=f"{type(error).__name__}: {error}"[:300])


def check_sums(s: SimpleNamespace, all_reduce: Callable, device: torch.device, exchanges: int = 500) -> int:
    """How many of many sums of random sizes, with ranks that come late in turns, were not exact."""
    dtypes, place = (torch.bfloat16, torch.float16, torch.float32), launched()
    host, wrong = torch.Generator().manual_seed(0), []
    for turn in range(exchanges):
        size = 2 * int(10 ** (6 * torch.rand(1, generator=host).item()))
        sources = [torch.Generator(device).manual_seed(turn * place.size + rank) for rank in range(place.size)]
        parts = [torch.randn(size, generator=source, device=device).to(dtypes[turn % 3]) for source in sources]
        if turn % place.size == place.rank and device.type == "cuda":
            torch.cuda._sleep(int(1e5 * torch.rand(1).item()))
        expected = sum(part.float() for part in parts).to(parts[0].dtype)
        wrong.append((all_reduce(parts[place.rank]) != expected).any())
    return int(torch.stack(wrong).sum())


def torch_one_shot(tp: ProcessGroup, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """PyTorch's sum in one kernel over its symmetric memory, with barriers."""
    import torch.distributed._symmetric_memory as symmetric_memory

    shared = symmetric_memory.empty(LARGEST_SUM // 2, dtype=torch.bfloat16, device=device)
    symmetric_memory.rendezvous(shared, tp.group_name)

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        mine = shared[: x.numel()]
        return torch.ops.symm_mem.one_shot_all_reduce_copy(mine, x.view(-1), "sum", tp.group_name).view(x.shape)

    return all_reduce


def time_reduces(all_reduce: Callable, x: torch.Tensor, count: int = 72) -> float:
    def run() -> torch.Tensor:
        y = x  # grows to at most ranks^72 times x, infinite or not
        for _ in range(count):
            y = all_reduce(y)
        return y

    if not x.is_cuda:
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) / count * 1e6
    return replay_seconds(run) / count * 1e6


def save(s: SimpleNamespace) -> None:
    """A checkpoint to load, of random weights."""
    config = shape(s.load_size)
    device = local_device(s.device)
    tree = fnllm_weights.init(config, dtype="bfloat16", device=device)
    fnllm.save(fnllm.Params(config, None, tree, fnllm_weights.Shard(), {}), Path(s.folder) / "checkpoint")


def load(s: SimpleNamespace) -> None:
    """Seconds and bytes of each rank."""
    place, device = launched(), local_device(s.device)
    join_alone(s)
    import torch.distributed as dist

    folder = Path(s.folder) / "checkpoint"
    for cache in ("first", "again"):  # the second time the files are in the host's memory
        dist.barrier()
        began = time.perf_counter()
        _, report = fnllm_weights.load_with_report(folder, device=device, rank=place.rank, size=place.size)
        seconds = time.perf_counter() - began
        found: list = [None] * place.size
        dist.all_gather_object(found, (seconds, report.nbytes))
        on_disk = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        emit(
            s,
            part="load",
            size=s.load_size,
            cache=cache,
            on_disk=on_disk,
            seconds=[f[0] for f in found],
            bytes=[f[1] for f in found],
        )


def fault(s: SimpleNamespace) -> None:
    """Decode until the last rank is killed, or hangs, in the middle of captured steps."""
    params = random_model(s)
    join_alone(s)
    sampling = fnllm.Sampling(temperature=0.6, max_tokens=2000, ignore_eos=True)
    victim = launched().rank == launched().size - 1

    def strike() -> None:
        Path(s.folder, "struck").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    for count, _ in enumerate(fnllm.stream(params, [[1, 2, 3]] * 4, sampling, **options(s))):
        if victim and count == 40 and s.kind == "kill":
            threading.Timer(0.05, strike).start()
        if victim and count == 40 and s.kind == "hang":
            Path(s.folder, "struck").write_text(str(time.time()))
            time.sleep(3600)


if __name__ == "__main__":
    part, settings = sys.argv[1], SimpleNamespace(**json.loads(sys.argv[2]))
    if settings.cpu:
        torch.set_num_threads(1)
    dict(equal=equal, open=opened, serve=serve, reduce=reduce, save=save, load=load, fault=fault)[part](settings)
