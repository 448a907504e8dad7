"""The scheduler: which tokens of which sequences each step computes, and in which blocks of the cache.

    state = init(SchedulerConfig(...))
    state, seq_id = add(state, Request(prompt, max_tokens))
    state, plan = schedule(state)           # may be called again before the commit: plans then are in flight
    state, events = commit(state, plan, tokens)

Beside these: `add_all`, `finish`, `abort`, `fork`, `truncate`, `append`, `preempt`, `park`, `invalidate` change
sequences from outside; `tokens`, `metrics`, `show`, `check` read a state. Pure functions over an immutable state: no
torch, no model, no clock, nothing random, and no decision that depends on the order of a hash table: every rank that
makes the same calls gets the same plans. The output of a sequence never depends on chunks, preemption, order, forks or
cache hits.

Any old state can be continued. There is one cache on the device, though: whoever goes back to a state calls `park` on
it, and `invalidate` with the blocks that plans have written since.
"""

from .accept import commit
from .checks import TokenIds, token_ids
from .config import SchedulerConfig, blocks_for, check_prompt_length, length_limit, max_running, prompt_limit
from .edit import append, fork, invalidate, truncate
from .invariants import check
from .lifecycle import abort, add, add_all, finish, tokens
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
    "TokenIds",
    "abort",
    "add",
    "add_all",
    "append",
    "blocks_for",
    "check",
    "check_prompt_length",
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
    "token_ids",
    "tokens",
    "truncate",
]
