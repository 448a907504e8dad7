"""The README's file tree, made from the first sentence of each module: python tests/readme_tree.py writes it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- tree: written by tests/readme_tree.py -->\n```\n", "```\n<!-- end of tree -->"
FOLDERS = ("fnllm", "kernels", "weights", "examples", "benchmarks", "tests")
WIDTH = 120
OTHERS = {  # what is no module
    "fnllm/demo/": "the small trained model behind `fnllm.load()`; its README says how it was made",
    "benchmarks/results/": "the JSON that each number in this README comes from",
    "tests/oracle/": "tiny checkpoints with golden logits and tokens, made with transformers",
}


def first_sentence(path: Path) -> str:
    """What a module says of itself, without the full stop."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return re.split(r"\.(?=\s|$)", text)[0]


def cut(text: str, width: int) -> str:
    """The text if it fits, else its clauses that do; a list is left out rather than cut in the middle.

    >>> cut("Tokens in: ids, each checked, and none twice", 30), cut("Tokens, checked, and none twice", 20)
    ('Tokens in', 'Tokens, checked')
    """
    if len(text) <= width:
        return text
    for marks in (r"[:;] | \(", r", ", r" "):
        places = [m.start() for m in re.finditer(marks, text) if 8 <= m.start() <= width]
        if places:
            kept = text[: places[-1]]
            return kept if kept.count("(") == kept.count(")") else kept[: kept.rindex("(")].rstrip()
    return text[:width]


def entries(folder: Path) -> Iterator[tuple[int, str, str]]:
    """(depth, name, what it is) of a folder's Python files, packages first named by themselves."""
    depth = len(folder.relative_to(ROOT).parts)
    yield depth - 1, f"{folder.name}/", ""
    for path in sorted(folder.iterdir(), key=lambda p: (p.is_dir(), p.name)):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py" and (path.name != "__init__.py" or path.stat().st_size > 0):
            yield depth, path.name, first_sentence(path)
        elif f"{name}/" in OTHERS:
            yield depth, f"{path.name}/", OTHERS[f"{name}/"]
        elif path.is_dir() and any(path.rglob("*.py")):
            yield from entries(path)


def tree() -> str:
    """The tree as the README shows it."""
    rows = [row for folder in FOLDERS for row in entries(ROOT / folder)]
    column = max(2 * depth + len(name) for depth, name, _ in rows) + 2
    lines = ("  " * depth + name.ljust(column - 2 * depth) + cut(what, WIDTH - column) for depth, name, what in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def written(readme: str) -> str:
    """The README with its tree brought up to date."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + tree() + END + rest.split(END)[1]


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
