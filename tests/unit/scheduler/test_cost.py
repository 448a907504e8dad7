"""What a step costs, in calls: nothing for those that wait, and no more for many that run than for few."""

import sys

import numpy as np

from fnllm import scheduler
from fnllm.scheduler import Request, SchedulerConfig


def count_calls(function) -> int:
    """Python and C function calls that `function` makes: a measure of work that no other process disturbs."""
    calls = 0

    def hook(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(hook)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def queued(count: int) -> scheduler.SchedulerState:
    state = scheduler.init(SchedulerConfig(4000, 4, 16, 64, 64))
    for number in range(count):
        state, _ = scheduler.add(state, Request((number % 7, number % 5, number % 3), 4))
    return state


def drain(state: scheduler.SchedulerState) -> None:
    while True:
        state, plan = scheduler.schedule(state)
        if plan is None:
            return
        state, _ = scheduler.commit(state, plan, np.zeros(len(plan.rows), np.int32))


def test_a_long_queue_costs_linear_time(unchecked):
    short, long = (count_calls(lambda count=count: drain(queued(count))) for count in (500, 2000))
    assert long < 4.2 * short


def test_a_queue_of_equal_prompts_costs_linear_time(unchecked):
    def run(count):
        state = scheduler.init(SchedulerConfig(4000, 4, 16, 8, 64))
        for _ in range(count):
            state, _ = scheduler.add(state, Request((1,) * 40, 1))
        drain(state)

    short, long = (count_calls(lambda count=count: run(count)) for count in (100, 400))
    assert long < 4.2 * short


def decode_calls(running: int, waiting: int) -> int:
    state = scheduler.init(SchedulerConfig(4000, 64, running, 4096, 4096))
    for number in range(running + waiting):
        state, _ = scheduler.add(state, Request((number,), 4000))
    for _ in range(3):
        state, plan = scheduler.schedule(state)
        state, _ = scheduler.commit(state, plan, np.zeros(len(plan.rows), np.int32))
    tokens = np.zeros(running, np.int32)

    def step():
        after, plan = scheduler.schedule(state)
        scheduler.commit(after, plan, tokens)

    return count_calls(step)


def test_a_decode_step_costs_the_same_for_any_number_of_sequences(unchecked):
    few = decode_calls(running=8, waiting=0)
    assert decode_calls(running=300, waiting=0) == few
    assert decode_calls(running=8, waiting=2000) <= few + 10
