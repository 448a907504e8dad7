"""The pages tell the truth: their Python runs, their commands are real, their file tree and links are up to date."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import readme_tree

from fnllm import cli

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/architecture.md")  # of other pages unit/open/test_docs.py runs the code
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """(line, text) of a page's fenced blocks in one language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)) + 1, match.group(1)) for match in found]


def commands() -> list[list[str]]:
    """Every command line of every page, as words."""
    texts = [text for page in PAGES for _, text in blocks(page, "console")]
    return [shlex.split(line[2:], comments=True) for text in texts for line in text.splitlines() if line[:2] == "$ "]


def test_python_of_the_readme_runs_from_top_to_bottom(capsys):
    names: dict = {}
    for line, text in blocks("README.md", "python"):
        exec(compile("\n" * (line - 1) + text, "README.md", "exec"), names)
    assert "nats a token" in capsys.readouterr().out


def test_first_example_has_at_most_eight_lines():
    _, text = blocks("README.md", "python")[0]
    assert len([line for line in text.splitlines() if line]) <= 8


def test_python_of_the_architecture_page_runs():
    for line, text in blocks("docs/architecture.md", "python"):
        exec(compile("\n" * (line - 1) + text, "docs/architecture.md", "exec"), {})


def test_first_command_generates_text(capsys):
    command = next(words for words in commands() if words[0] == "fnllm")
    assert cli.main(command[1:]) == 0
    assert len(capsys.readouterr().out.split()) > 20


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_command_is_real(words):
    """What a test cannot run (downloads, other models, this very suite) is checked for what it names."""
    program, rest = words[0], words[1:]
    named = {name: value for name, _, value in (word.partition("=") for word in words) if value}
    if program == "fnllm":
        cli.parser().parse_args(rest)
    elif program == "pip":
        known = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        for extra in re.findall(r"\.\[(\w+)\]", " ".join(rest)):
            assert f"\n{extra} = [" in known
    elif program == "pytest":
        for word in rest:
            assert word.startswith("-") or " " in word or word.isidentifier() or (ROOT / word).exists()
        packages = named.get("--jaxtyping-packages", "beartype.beartype").split(",")
        assert all((ROOT / folder / package).is_dir() for package in packages[:-1] for folder in [home(package)])
    else:
        assert program in ("python", "torchrun", "ruff", "pyright", "pre-commit", "bash"), program
        for word in rest:
            if word.endswith((".py", "run")) and word != "run":
                assert (ROOT / word).is_file(), word


def home(package: str) -> str:
    """The folder that an import name lies in."""
    return {"fnllm": ".", "fnllm_kernels": "kernels", "fnllm_weights": "weights"}[package]


def test_ci_runs_the_two_commands():
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    install, generate, install_tests, test = commands()[:4]
    assert (install, install_tests, test) == (["pip", "install", "."], ["pip", "install", ".[test]"], ["pytest"])
    assert f'fnllm generate "{generate[2]}"' in script
    assert re.search(r"^pip install .* \.$", script, re.MULTILINE)
    assert "'.[test]'" in script
    assert re.search(r"^pytest -q", script, re.MULTILINE)


def test_file_tree_is_up_to_date():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme_tree.written(readme) == readme, "run: python tests/readme_tree.py"


def test_file_tree_lists_every_file_that_git_has():
    listed = subprocess.run(
        ["git", "ls-files", "fnllm/*.py", "kernels/*.py", "weights/*.py", "examples/*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    shown = readme_tree.tree()
    missing = [path for path in listed.stdout.split() if f"{Path(path).name} " not in shown]
    assert not missing


def test_every_module_says_what_it_is_in_a_sentence():
    folders = [ROOT / folder for folder in readme_tree.FOLDERS]
    files = [path for folder in folders for path in folder.rglob("*.py") if path.stat().st_size]
    silent = [path for path in files if not 10 < len(readme_tree.first_sentence(path)) < 260]
    assert not silent


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [page for page in DOCS if f"]({page})" not in readme]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *DOCS])
def test_links_and_named_files_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#]+)\)", text)
    named = re.findall(r"`((?:examples|benchmarks|tests|docs|fnllm|kernels|weights)/[\w/.-]+)`", text)
    missing = [link for link in links if "://" not in link and not (folder / link).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing
