"""The pages' code runs, and the numerics table names tests that exist."""

import re
from pathlib import Path

from examples_of import EXAMPLES, example

import fnllm
from fnllm_weights import LayerParams

DOCS = EXAMPLES.parent / "docs"
HERE = Path(__file__).parent


def run(page: str) -> dict:
    """The names that a page's Python has made after its last line."""
    scope: dict = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S):
        exec(compile(block, page, "exec"), scope)
    return scope


def test_your_first_experiment(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scope = run("first_experiment.md")
    assert (tmp_path / "first_experiment.png").stat().st_size > 5000
    assert scope["means"][2] == min(scope["means"])  # as the page says
    assert len({one.text for one in scope["outs"]}) > 15


def test_the_open_step(capsys):
    scope = run("open_step.md")
    params, dot = scope["params"], scope["dot"]
    sampling = fnllm.Sampling(max_tokens=6, logits_fn=scope["every_second_a_dot"])
    for one in fnllm.generate(params, scope["prompts"], sampling, seed=0):
        assert set(one.token_ids[1::2]) == {dot} and dot not in one.token_ids[::2]


def test_the_table_of_leaves_names_all_that_a_layer_may_have():
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "open_step.md").read_text(), re.M)
    assert {name for row in rows for name in re.findall(r"\w+", row)} == set(LayerParams.__annotations__)


def test_every_cell_of_the_numerics_table_names_a_test():
    named = set(re.findall(r"(test_[a-z0-9_]+)(?=[`\[])", (DOCS / "numerics.md").read_text()))
    source = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    missing = {name for name in named if f"def {name}(" not in source}
    assert len(named) >= 9 and not missing


def test_steering_moves_the_demo_models_voice():
    steering = example("steering")
    params = fnllm.load()
    low, high = steering.sweep(params, "layers.3.resid_post", [-2.0, 2.0], "In the morning", samples=6, length=30)
    assert sum(map(steering.leaning, high)) > sum(map(steering.leaning, low)) + 1


def test_patching_the_last_token_brings_the_answer_back():
    patching = example("activation_patching")
    params = fnllm.load()
    clean, corrupted = patching.aligned(params, patching.CLEAN, patching.CORRUPTED)
    answer = params.tokenizer.encode(" Moses")[-1]
    share = patching.effects(params, clean[-6:], corrupted[-6:], answer, "resid_pre")
    assert share.shape == (6, 6) and share[5, -1] > 0.9 and share[0, 0].abs() < 0.3


def test_the_logit_lens_ends_at_what_the_model_says():
    tokens, guesses, chances = example("logit_lens").lens(fnllm.load(), "And the LORD said", new_tokens=3)
    assert guesses[-1][-3:] == tokens[-3:]  # greedy: the last layer's guesses are the new tokens
    assert chances[-1].log().mean() > chances[0].log().mean()
