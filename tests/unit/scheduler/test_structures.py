"""The persistent map and line against dict and list, and the doctests of the package."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnllm import scheduler
from fnllm.scheduler import line as lines
from fnllm.scheduler.evolve import evolve
from fnllm.scheduler.pmap import Map, PlainMap
from fnllm.scheduler.recent import no_tokens, record, sampled
from fnllm.scheduler.rows import begin_block, empty_rows, make_roster, update_rows

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


@given(st.data(), st.integers(1, 5), st.sampled_from([1, 3, 6, 8, 16, 24]))
@settings(max_examples=100, deadline=None)
def test_recent_tokens_are_the_last_of_each_row_s_list_and_the_past_stays(data, rows, block_size):
    recent, model, past = no_tokens(rows, block_size), [[0] * block_size for _ in range(rows)], []
    for commit in range(data.draw(st.integers(1, 3 * block_size))):
        count = data.draw(st.integers(0, rows))
        taken = slice(0, count) if data.draw(st.booleans()) else np.array(range(rows)[rows - count :], np.int32)
        recent = record(recent, taken, np.full(count, 1 + commit, np.int32), commit)
        got = range(rows)[taken] if isinstance(taken, slice) else taken.tolist()
        model = [[*tokens[1:], 1 + commit if row in got else None] for row, tokens in enumerate(model)]
        past.append((recent, model, commit + 1))
    for old, content, next_commit in past[:: max(1, block_size // 2)]:
        wanted = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, unique=True))
        for row, packed in zip(wanted, sampled(old, np.array(wanted), next_commit), strict=True):
            tokens = np.frombuffer(packed, np.int32).tolist()
            assert len(tokens) == block_size
            assert all(want in (None, token) for want, token in zip(content[row], tokens, strict=True))


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 40), st.integers(0, 12)), min_size=1, max_size=9),
    st.integers(0, 30),
    st.integers(1, 9),
)
@settings(max_examples=200, deadline=None)
def test_a_roster_names_the_rows_that_decode_and_who_begins_a_block(content, step, block_size):
    used, decoding, computed, left = (np.array(column) for column in zip(*content, strict=True))
    rows = update_rows(
        empty_rows(len(content), block_size),
        seq_id=np.where(used, 100 + np.arange(len(content)), -1).astype(np.int32),
        decoding=decoding,
        computed=computed.astype(np.int32),
        limit=(computed + 1 + left).astype(np.int32),
    )
    roster = make_roster(rows, step, block_size)
    want = [row for row, (here, decodes, _, more) in enumerate(content) if here and decodes and more]
    assert roster.rows.tolist() == np.arange(len(content))[roster.index].tolist() == want
    assert roster.seq_ids.tolist() == [100 + row for row in want]
    assert roster.advance.tolist() == [int(row in want) for row in range(len(content))]
    assert not want or roster.until == step + min(content[row][3] for row in want)
    for ahead in range(2 * block_size):
        first = [row for row in want if (content[row][2] + ahead) % block_size == 0]
        found, ids = begin_block(roster, step + ahead)
        assert found.tolist() == first and ids.tolist() == [100 + row for row in first]


def test_a_field_that_is_none_is_named():
    with pytest.raises(TypeError, match="Counters has no field finnished"):
        evolve(scheduler.Counters(), finnished=1)


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
