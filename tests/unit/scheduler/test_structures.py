"""The persistent map and line against dict and list, and the doctests of the package."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnllm import scheduler
from fnllm.scheduler import line as lines
from fnllm.scheduler.pmap import Map, PlainMap

# Few distinct keys, some of which fall into one leaf of a PlainMap (4096 apart) or hash alike (-1 and -2).
KEYS = st.sampled_from([0, 1, 2, 63, 64, 4096, 8192, 2**60, -1, -2, "a", ((), b"ab"), (3, b"ab")])
CHANGES = st.lists(st.tuples(st.sampled_from(["set", "delete", "draft"]), KEYS, st.integers(0, 9)), max_size=40)


@pytest.mark.parametrize("kind", [Map, PlainMap])
@given(changes=CHANGES)
@settings(max_examples=50, deadline=None)
def test_a_map_is_a_dict_whose_past_stays(kind, changes):
    now, model, past = kind(), {}, []
    for change, key, value in changes:
        past.append((now, dict(model)))
        if change == "set":
            now, model = now.set(key, value), {**model, key: value}
        elif key in model and change == "delete":
            now = now.delete(key)
            del model[key]
        elif change == "draft":
            draft = now.mutate()
            draft[key] = value
            assert draft[key] == draft.get(key) == value and key in draft
            draft["more"] = 1
            assert draft.pop("more") == 1 and draft.get("more", 7) == 7
            if "a" in draft:
                del draft["a"]
            now = draft.finish()
            model[key] = value
            model.pop("a", None)
        past.append((now, dict(model)))
    for old, content in past[::5]:
        assert dict(old.items()) == content and len(old) == len(content) and set(old) == set(content)
        assert all(old[key] == old.get(key) == value and key in old for key, value in content.items())
    with pytest.raises(KeyError):
        now["absent"]
    with pytest.raises(KeyError):
        now.delete("absent")
    assert now.get("absent", 3) == 3 and "absent" not in now


@given(st.lists(st.tuples(st.sampled_from(["back", "front", "remove", "take"]), st.integers(0, 12)), max_size=40))
@settings(max_examples=200, deadline=None)
def test_a_line_is_a_list_whose_past_stays(changes):
    now, model, past = lines.Line(), [], []
    for change, item in changes:
        if change == "back" and item not in model:
            now, model = lines.push_back(now, [item]), [*model, item]
        elif change == "front" and item not in model:
            now, model = lines.push_front(now, [item]), [item, *model]
        elif change == "remove" and item in model:
            now, model = lines.remove(now, [item]), [other for other in model if other != item]
        elif change == "take":
            now, taken = lines.take_front(now, item % 3)
            assert taken == model[: item % 3]
            model = model[item % 3 :]
        past.append((now, list(model)))
    for old, content in past:
        assert list(lines.iterate(old)) == content and len(old) == len(content)
        assert all(item in old for item in content)


def test_doctests_hold():
    for module in pkgutil.iter_modules(scheduler.__path__, "fnllm.scheduler."):
        failed, _ = doctest.testmod(importlib.import_module(module.name))
        assert failed == 0, module.name


PLANS = """
import sys
if {blocked}:
    sys.modules["immutables"] = None
import numpy as np
from fnllm import scheduler
from fnllm.scheduler.pmap import Map, PlainMap
assert (Map is PlainMap) >= {blocked}
assert "torch" not in sys.modules or "fnllm.model" in sys.modules
state = scheduler.init(scheduler.SchedulerConfig(20, 4, 6, 16, 40))
for n in range(30):
    state, _ = scheduler.add(state, scheduler.Request(tuple((n * k) % 3 for k in range(1, 4 + n % 14)), n % 7))
while True:
    state, plan = scheduler.schedule(state)
    if plan is None:
        break
    print(plan.seq_ids.tolist(), plan.prefill_tokens.tolist(), [c.tolist() for c in plan.table_updates])
    print([(join.row, join.length, join.block_table.tolist()) for join in plan.joins])
    state, _ = scheduler.commit(state, plan, (plan.starts + plan.seq_ids) % 3)
    scheduler.check(state)
"""


def test_plans_do_not_depend_on_the_map_or_on_hash_seeds():
    pytest.importorskip("immutables")
    runs = [
        subprocess.run(
            [sys.executable, "-c", PLANS.format(blocked=blocked)],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        for blocked, seed in ((False, "0"), (True, "1"))
    ]
    assert runs[0].returncode == runs[1].returncode == 0, runs[0].stderr + runs[1].stderr
    assert runs[0].stdout == runs[1].stdout and len(runs[0].stdout) > 1000
