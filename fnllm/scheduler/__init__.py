"""The scheduler: which tokens of which sequences each step computes, and in which blocks of the cache.

Pure functions over an immutable state: `init`, `add`, `schedule`, `commit`, and the edits `finish`, `abort`, `fork`,
`truncate`, `append`, `preempt`, `park`, `invalidate`. No torch, no model, no clock, nothing random.
"""

from .accept import commit
from .config import SchedulerConfig, blocks_for, length_limit, max_running, prompt_limit
from .edit import append, fork, invalidate, truncate
from .invariants import check
from .lifecycle import abort, add, finish, tokens
from .planning import schedule
from .report import Metrics, metrics, show
from .request import Request, make_cache_key
from .residency import park, preempt
from .state import Counters, Events, Finished, Join, Plan, SchedulerState, init

__all__ = [
    "Counters",
    "Events",
    "Finished",
    "Join",
    "Metrics",
    "Plan",
    "Request",
    "SchedulerConfig",
    "SchedulerState",
    "abort",
    "add",
    "append",
    "blocks_for",
    "check",
    "commit",
    "finish",
    "fork",
    "init",
    "invalidate",
    "length_limit",
    "make_cache_key",
    "max_running",
    "metrics",
    "park",
    "preempt",
    "prompt_limit",
    "schedule",
    "show",
    "tokens",
    "truncate",
]
