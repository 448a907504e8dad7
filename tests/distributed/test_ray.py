"""examples/ray_batch.py on a real local Ray, with a worker or a rank that is killed on the way."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fnllm

pytest.importorskip("ray", reason="needs ray: pip install 'fnllm[ray]'")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]

HERE = Path(__file__).parent
spec = importlib.util.spec_from_file_location("ray_batch", HERE.parents[1] / "examples" / "ray_batch.py")
ray_batch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ray_batch)

ROWS = [{"id": f"row{i}", "prompt": [i + 1, 2 * i + 3, 7]} for i in range(9)]
REFUSED = {"id": "refused", "prompt": [9999]}


def write(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def batch(source: Path, out: Path, tp: int, marker: Path | None = None) -> int:
    """Run the example in a process of its own; the number of parts that it made."""
    command = [
        sys.executable,
        str(HERE / "ray_dying.py"),
        str(source),
        str(out),
        str(tp),
        *([str(marker)] if marker else []),
    ]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    assert marker is None or marker.exists(), "nothing was killed"
    return json.loads((out / "made").read_text())


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    sampling = fnllm.Sampling(temperature=0, max_tokens=5, ignore_eos=True)
    params = fnllm.load(HERE.parent / "oracle" / "qwen3-odd")
    outs = fnllm.generate(params, [row["prompt"] for row in ROWS], sampling, num_blocks=64)
    return {row["id"]: list(out.token_ids) for row, out in zip(ROWS, outs, strict=True)}


def tokens(out: Path) -> list[tuple[str, list[int]]]:
    return sorted((row["id"], row["token_ids"]) for row in ray_batch.results(out) if "error" not in row)


def test_a_dying_worker_loses_and_doubles_no_row_and_a_second_run_does_what_is_missing(tmp_path, expected):
    source, out = write(tmp_path / "in.jsonl", [*ROWS, REFUSED]), tmp_path / "out"
    assert batch(source, out, tp=1, marker=tmp_path / "killed") == 5
    assert tokens(out) == sorted(expected.items())
    (error,) = [row for row in ray_batch.results(out) if "error" in row]
    assert error["id"] == "refused" and "outside the vocabulary" in error["error"]
    # As after a run that was stopped: a part is missing, and another was half written.
    files = sorted(out.glob("part-*"))
    kept = {file: file.stat().st_mtime_ns for file in files[1:]}
    files[0].rename(out / "part-x.77.unfinished")
    assert batch(source, out, tp=1) == 1
    assert tokens(out) == sorted(expected.items())
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert list(out.glob("*.unfinished")) == []


def test_a_killed_rank_of_a_tensor_parallel_worker(tmp_path, expected):
    source, out = write(tmp_path / "in.jsonl", ROWS[:4]), tmp_path / "out"
    assert batch(source, out, tp=2, marker=tmp_path / "killed") == 2
    assert tokens(out) == sorted((id, ids) for id, ids in expected.items() if id < "row4")


def test_parts_are_cut_from_what_is_not_done_and_named_after_their_rows():
    cut = ray_batch.parts(ROWS, {"row1", "row4"}, 3)
    assert [[row["id"] for row in json.loads(part["rows"])] for part in cut] == [
        ["row0", "row2", "row3"], ["row5", "row6", "row7"], ["row8"],
    ]  # fmt: skip
    assert len({part["name"] for part in cut}) == 3
    assert ray_batch.parts(ROWS, {"row1", "row4"}, 3) == cut
    with pytest.raises(ValueError, match="two rows have the id 'row3'"):
        ray_batch.parts([*ROWS, ROWS[3]], set(), 3)


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    with pytest.raises(TypeError):
        ray_batch.write_whole(tmp_path / "part-a.jsonl", [{"id": 1}, {"id": object()}])
    assert list(tmp_path.glob("part-*.jsonl")) == []
