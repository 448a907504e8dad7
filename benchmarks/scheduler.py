"""Host time of the scheduler: a steady decode step, what lies before the first step, and a long queue drained.

python benchmarks/scheduler.py            # prints, and writes benchmarks/results/scheduler.json
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from fnllm import scheduler
from fnllm.scheduler.pmap import Map

RESULTS = Path(__file__).parent / "results" / "scheduler.json"
BLOCK_SIZE = 128  # what an engine on a GPU uses
GOALS_US = {256: 150, 1024: 500}


def filled_state(running: int, steps: int, seed: int = 0) -> scheduler.SchedulerState:
    """`running` sequences past their prompts, of spread lengths, with room for `steps` more tokens each."""
    rng = np.random.default_rng(seed)
    longest = 4 * BLOCK_SIZE
    length = longest + 2 * steps + 64
    config = scheduler.SchedulerConfig(
        num_blocks=running * (length // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        max_num_seqs=running,
        max_num_batched_tokens=max(8192, running),
        max_model_len=length,
    )
    state = scheduler.init(config)
    for prompt_len in rng.integers(1, longest, running).tolist():
        prompt = tuple(rng.integers(0, 50_000, prompt_len).tolist())
        request = scheduler.Request(prompt, length, stop_token_ids=frozenset([60_000, 60_001]))
        state, _ = scheduler.add(state, request)
    while True:
        state, plan = scheduler.schedule(state)
        state, _ = scheduler.commit(state, plan, rng.integers(0, 50_000, len(plan.rows)))
        if plan.num_decode == running:
            return state


def time_decode(running: int, steps: int, ahead: bool) -> dict[str, float]:
    """Microseconds of schedule + commit per step; with `ahead` the next plan is made before the last is committed.

    The functions are pure, so each step is also repeated: `best_of_9_mean_us` is the mean over steps of the fastest
    repetition, which is what the code costs where no other process takes the core. The other figures are of the first
    call of each step, as an engine makes it.
    """
    state = filled_state(running, steps)
    tokens = np.random.default_rng(1).integers(0, 50_000, (steps, running), dtype=np.int32)
    in_flight = None
    if ahead:
        state, in_flight = scheduler.schedule(state)
    wall, cpu = np.zeros((steps, 9)), np.zeros(steps)
    for step in range(steps):
        for repetition in range(wall.shape[1]):
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            after, plan = scheduler.schedule(state)
            after, _ = scheduler.commit(after, in_flight if ahead else plan, tokens[step])
            wall[step, repetition] = time.perf_counter() - begin
            if repetition == 0:
                cpu[step] = time.thread_time() - begin_cpu
        assert plan.num_decode == running
        state, in_flight = after, plan
    return {"best_of_9_mean_us": round(1e6 * float(wall.min(1).mean()), 1), **_summary(wall[:, 0], cpu)}


def _summary(wall: np.ndarray, cpu: np.ndarray) -> dict[str, float]:
    return {
        "median_us": round(1e6 * float(np.median(wall)), 1),
        "mean_us": round(1e6 * float(wall.mean()), 1),
        "p99_us": round(1e6 * float(np.percentile(wall, 99)), 1),
        "cpu_mean_us": round(1e6 * float(cpu.mean()), 1),
    }


def time_churn(running: int, steps: int) -> dict[str, float]:
    """The same with a request ending and another one, of one block, joining in every step, one plan ahead."""
    rng = np.random.default_rng(0)
    outputs = running  # of one in each step, so that one ends in each step
    config = scheduler.SchedulerConfig(running * (outputs // BLOCK_SIZE + 3), BLOCK_SIZE, running, 8192, 4096)
    state, in_flight, wall, cpu = scheduler.init(config), None, [], []
    for step in range(2 * running + steps):
        prompt = tuple(rng.integers(0, 50_000, BLOCK_SIZE).tolist())
        request = scheduler.Request(prompt, outputs, stop_token_ids=frozenset([60_000, 60_001]))
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        state, _ = scheduler.add(state, request)
        state, plan = scheduler.schedule(state)
        if in_flight is not None:
            state, _ = scheduler.commit(state, in_flight, np.full(len(in_flight.rows), step, np.int32))
        wall.append(time.perf_counter() - begin)
        cpu.append(time.thread_time() - begin_cpu)
        in_flight = plan
    return _summary(np.array(wall[-steps:]), np.array(cpu[-steps:]))


def time_queue(prompts: int, shared: bool) -> dict[str, float]:
    """Seconds to add `prompts` requests and to run all of them to their end, 256 at a time."""
    rng = np.random.default_rng(0)
    config = scheduler.SchedulerConfig(8192, BLOCK_SIZE, 256, 8192, 4096)
    head = tuple(rng.integers(0, 50_000, 3 * BLOCK_SIZE).tolist()) if shared else ()
    requests = [
        scheduler.Request(head + tuple(rng.integers(0, 50_000, int(length)).tolist()), 16)
        for length in rng.integers(8, 256, prompts)
    ]
    state = scheduler.init(config)
    begin = time.perf_counter()
    for request in requests:
        state, _ = scheduler.add(state, request)
    added, steps = time.perf_counter(), 0
    while True:
        state, plan = scheduler.schedule(state)
        if plan is None:
            break
        state, _ = scheduler.commit(state, plan, np.zeros(len(plan.rows), np.int32))
        steps += 1
    end, now = time.perf_counter(), scheduler.metrics(state)
    assert now.counters.finished == prompts and now.blocks_held == 0
    return {
        "add_s": round(added - begin, 3),
        "drain_s": round(end - added, 3),
        "steps": steps,
        "us_per_prompt": round(1e6 * (end - begin) / prompts, 1),
        "cached_tokens": now.counters.cached_tokens,
    }


def time_admission(prompts: list[tuple[int, ...]], cached: tuple[int, ...], repetitions: int = 15) -> dict[str, float]:
    """Milliseconds before the first step of a call: making the requests, adding them and planning the step; the
    fastest of the repetitions. The cache holds the prompt `cached` beforehand, if there is one."""
    times = np.zeros((repetitions, 3))
    for repetition in range(repetitions):
        state = scheduler.init(scheduler.SchedulerConfig(8192, BLOCK_SIZE, 256, 8192, 4096))
        if cached:
            state, _ = scheduler.add(state, scheduler.Request(cached, 0))
            state, plan = scheduler.schedule(state)
            state, _ = scheduler.commit(state, plan, np.zeros(len(plan.rows), np.int32))
        marks = [time.perf_counter()]
        requests = [scheduler.Request(prompt, 128, stop_token_ids=frozenset([60_000])) for prompt in prompts]
        marks.append(time.perf_counter())
        for request in requests:
            state, _ = scheduler.add(state, request)
        marks.append(time.perf_counter())
        state, plan = scheduler.schedule(state)
        marks.append(time.perf_counter())
        times[repetition] = np.diff(marks)
    names = ("request_ms", "add_ms", "schedule_ms")
    milliseconds = dict(zip(names, (1e3 * times.min(0)).round(2).tolist(), strict=True))
    return milliseconds | {"sequences": len(plan.rows), "tokens": int(plan.query_lens.sum())}


def environment() -> dict[str, str]:
    """Versions, machine, date and commit."""
    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=here).stdout.strip()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "map": Map.__module__.split(".")[0],
        "cpu": next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), ""),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "load_average": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Host time of the scheduler")
    parser.add_argument("--steps", type=int, default=640, help="decode steps timed for each setting")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args(argv)
    decode = {}
    for running, goal in GOALS_US.items():
        for ahead in (False, True):
            name = f"{running} running{', one plan ahead' if ahead else ''}"
            decode[name] = time_decode(running, options.steps, ahead) | {"goal_us": goal}
            print(f"decode step, {name}: {decode[name]}", flush=True)
    churn = {}
    for running in GOALS_US:
        churn[f"{running} running"] = time_churn(running, options.steps)
        print(f"step in which one ends and one joins, {running} running: {churn[f'{running} running']}", flush=True)
    rng = np.random.default_rng(0)
    head = tuple(rng.integers(0, 50_000, 2048).tolist())
    alike = [head + tuple(rng.integers(0, 50_000, 64).tolist()) for _ in range(64)]
    mixed = [tuple(rng.integers(0, 50_000, length).tolist()) for length in rng.integers(100, 1025, 256).tolist()]
    admission = {
        "64 prompts of 2,112 tokens, 2,048 of them cached": time_admission(alike, head),
        "256 prompts of 100 to 1,024 tokens": time_admission(mixed, ()),
    }
    print(f"before the first step: {admission}", flush=True)
    queues = {}
    for prompts in (5_000, 20_000):
        for shared in (False, True):
            name = f"{prompts} prompts{', shared prefix' if shared else ''}"
            queues[name] = time_queue(prompts, shared)
            print(f"queue, {name}: {queues[name]}", flush=True)
    report = {
        "block_size": BLOCK_SIZE,
        "decode_step": decode,
        "step_with_one_ending_and_one_joining": churn,
        "before_the_first_step": admission,
        "queue": queues,
        "environment": environment(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
