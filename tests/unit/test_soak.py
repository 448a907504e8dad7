"""The soak of benchmarks/: a short run finds nothing, and finds each of several planted faults."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

import fnllm.engines
import fnllm.layers

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def soak(monkeypatch):
    """`soak` of benchmarks/soak.py, which imports its neighbours by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import soak

    yield lambda **more: soak.soak(
        **{"size": "tiny", "dtype": "float32", "device": "cpu", "seed": 5, "moves": 100, "minutes": 0, "few": True,
           "compile": "none", "tolerance": None, **more}
    )  # fmt: skip
    for name in [
        name for name, module in sys.modules.items() if str(BENCHMARKS) in str(module.__dict__.get("__file__"))
    ]:
        del sys.modules[name]


def test_a_short_run_is_well_and_checks_what_it_generates(soak):
    found = soak(moves=200)
    assert found["ok"], (found["problems"], found["shown_faults"])
    assert found["tokens_checked"] > 300 and found["counts"]["turns checked"] > 30
    assert {"fork", "truncate", "append", "abort", "keep", "invariants"} <= set(found["counts"])
    assert found["counts"]["preemptions"] > 0 and found["counts"]["cached prompt tokens"] > 0
    assert found["largest_logprob_error"] < 1e-4


def test_equal_seeds_make_equal_runs(soak):
    first, second = soak(moves=60), soak(moves=60)
    assert first["counts"] == second["counts"] != soak(moves=60, seed=6)["counts"]


def skip_a_slot(monkeypatch):
    """Every seventh slot of the cache is never written."""
    whole = fnllm.layers.store_kv
    monkeypatch.setattr(
        fnllm.layers, "store_kv",
        lambda k, v, k_cache, v_cache, slots: whole(k, v, k_cache, v_cache, torch.where(slots % 7 == 3, -1, slots)),
    )  # fmt: skip


def share_blocks_whatever_the_edits(monkeypatch):
    monkeypatch.setattr(fnllm.engines, "edit_key", lambda edits: ())


def trust_blocks_that_others_wrote(monkeypatch):
    monkeypatch.setattr(
        fnllm.engines.Engine, "recover", lambda engine, state: dataclasses.replace(state, clock=engine.machine.clock)
    )


def draw_with_one_seed(monkeypatch):
    monkeypatch.setattr(fnllm.engines, "child_seed", lambda seed, sample: seed)


@pytest.mark.parametrize(
    ("plant", "seed"),
    [
        (skip_a_slot, 5),
        (trust_blocks_that_others_wrote, 5),
        (draw_with_one_seed, 5),
        (share_blocks_whatever_the_edits, 1),  # soon has requests of other edits and a common beginning
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_found(soak, monkeypatch, plant, seed):
    plant(monkeypatch)
    found = soak(seed=seed, moves=120)
    assert not found["ok"] and found["faults"] > 0
    one = found["shown_faults"][0]
    assert {"kind", "move", "player", "tokens", "sampling", "seed"} <= set(one)
