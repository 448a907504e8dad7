"""The serving benchmark: engines take turns, one that dies ends alone, and the table's ratios."""

import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# An engine that answers each workload with a row, writes down when it worked, and dies on one of them.
STAND_IN = """
import faulthandler, json, os, signal, subprocess, sys, time
faulthandler.register(signal.SIGUSR1)
name, rows, turns, dies_at = sys.argv[1:]
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
def emit(**row):
    with open(rows, "a") as file:
        file.write(json.dumps(dict(engine=name, size="0.6b", **row)) + "\\n")
emit(workload="start", helper=helper.pid, ended=True)
for line in sys.stdin:
    which = line.strip()
    if "!" + which == dies_at:
        time.sleep(600)
    if which == dies_at:
        print("no memory is left")
        os._exit(3)
    with open(turns, "a") as file:
        file.write(f"{name} {which}\\n")
    emit(workload=which, tok_s=100.0 if name == "fnllm" else 80.0, floor_tok_s=200.0)
    emit(workload=which, total_seconds=0.1, ended=True)
"""


@pytest.fixture
def serving(monkeypatch):
    """benchmarks/serving.py, which imports its neighbours by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import serving

    yield serving
    for name, module in list(sys.modules.items()):
        if str(BENCHMARKS) in str(module.__dict__.get("__file__")):
            del sys.modules[name]


def run(serving, folder: Path, deaths: dict[str, str], limit: float = 60) -> tuple[list[dict], list[str]]:
    """The rows of stand-ins that die, or with a ! stop, at the workloads named, and the turns that were taken."""
    program = folder / "stand_in.py"
    program.write_text(STAND_IN)
    commands = {
        name: [sys.executable, str(program), name, str(folder / f"{name}.jsonl"), str(folder / "turns"), at]
        for name, at in deaths.items()
    }
    *_, rows = serving.side_by_side(commands, ["W4", "W1", "W2"], folder, limit)
    return rows, (folder / "turns").read_text().splitlines()


def lives(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False
    return "\nState:\tZ" not in status


def test_engines_take_turns_at_each_workload(serving, tmp_path):
    rows, turns = run(serving, tmp_path, {"fnllm": "", "vllm": ""})
    assert turns == ["fnllm W4", "vllm W4", "fnllm W1", "vllm W1", "fnllm W2", "vllm W2"]
    assert [row["engine"] for row in rows if "tok_s" in row and row["workload"] == "W1"] == ["fnllm", "vllm"]
    assert not any("ended" in row or "error" in row for row in rows)


def test_an_engine_that_dies_leaves_its_rows_and_the_others_go_on(serving, tmp_path):
    rows, turns = run(serving, tmp_path, {"fnllm": "", "vllm": "W1"})
    assert turns == ["fnllm W4", "vllm W4", "fnllm W1", "fnllm W2"]
    (error,) = [row for row in rows if "error" in row]
    assert error["engine"] == "vllm" and "no memory is left" in error["error"]
    assert [row["workload"] for row in rows if row["engine"] == "vllm" and "tok_s" in row] == ["W4"]


def test_an_engine_that_stops_is_ended_and_said_where_it_was(serving, tmp_path):
    rows, turns = run(serving, tmp_path, {"fnllm": "", "vllm": "!W1"}, limit=3)
    assert turns == ["fnllm W4", "vllm W4", "fnllm W1", "fnllm W2"]
    (error,) = [row for row in rows if "error" in row]
    assert error["engine"] == "vllm" and "it did not answer for 3 s" in error["error"]
    assert "most recent call first" in (tmp_path / "vllm.log").read_text()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks processes up in /proc")
def test_what_an_engine_started_ends_with_it(serving, tmp_path):
    rows, _ = run(serving, tmp_path, {"fnllm": "", "vllm": "W1"})
    helpers = [row["helper"] for row in rows if "helper" in row]
    deadline = time.monotonic() + 10  # a process that was killed takes a moment to go
    while any(map(lives, helpers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(helpers) == 2 and not any(map(lives, helpers))


def test_the_table_has_ratios_to_the_best_other_and_to_the_limit(serving):
    rows = [
        dict(engine="fnllm", size="8b", workload="W1", tok_s=120.0, floor_tok_s=160.0),
        dict(engine="vllm", size="8b", workload="W1", tok_s=100.0),
        dict(engine="nano-vllm", size="8b", workload="W1", tok_s=80.0),
        dict(engine="fnllm", size="8b", workload="W5", case="shared prefix", ms=20.0, floor_ms=10.0),
        dict(engine="vllm", size="8b", workload="W5", case="shared prefix", ms=30.0),
        dict(engine="vllm", size="8b", error="ended"),
    ]
    first, second = serving.table(rows).splitlines()[2:]
    assert first == "| 8b | W1  | 120 tok/s | 100 tok/s | 80 tok/s | 1.20 | 75% |"
    assert second == "| 8b | W5 shared prefix | 20.0 ms | 30.0 ms |  | 1.50 | 50% |"
