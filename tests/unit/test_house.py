"""House rules that a program can check: who imports whom, what importing needs, file sizes, docstrings, the wheel."""

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import fnllm

ROOT = Path(__file__).parents[2]
PACKAGES = {"fnllm": ROOT / "fnllm", "fnllm_kernels": ROOT / "kernels", "fnllm_weights": ROOT / "weights"}
SOURCES = sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))
AROUND = sorted(path for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))

# The order inside fnllm: a module imports only from lines above its own. `__init__` loads names at their first use.
LAYERS = """
    ambient optimizers
    fallbacks fingerprint fusing held completion sampling packed_attention rope tensor_parallel edits scheduler cache
    one_shot capture taps sampler text prompts progress
    distributed batch state failures writes row_features
    loading watch context rows
    layers
    jobs parameters decode_layer numerics
    model
    step
    options
    buckets
    compiled readback
    built trial
    machine scoring
    workspace
    engines
    tracks log
    generation
    inspecting chatting bench
    launch
    cli
"""
LEVEL = {name: level for level, line in enumerate(LAYERS.strip().splitlines()) for name in line.split()}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether at import time) of each import in a file, those for type checkers left out."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                inside = "." * child.level + (child.module or "")
                whole = inside in ("fnllm", ".")  # then the names are modules
                yield from ((f"{inside}.{alias.name}" if whole else inside, at_import) for alias in child.names)
            inner = at_import and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from walk(child, inner)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), True)


def part(module: str) -> str:
    """The module of fnllm, or its subpackage, that a dotted name belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def test_every_module_has_a_place_in_the_order():
    parts = {path.relative_to(ROOT / "fnllm").parts[0].removesuffix(".py") for path in (ROOT / "fnllm").rglob("*.py")}
    assert parts ^ set(LEVEL) == {"__init__"}, "give it a line in LAYERS, above those that import it"


def test_imports_inside_fnllm_point_one_way():
    against = []
    for path in (ROOT / "fnllm").rglob("*.py"):
        here = path.relative_to(ROOT / "fnllm").parts[0].removesuffix(".py")
        for module, at_import in imports(path):
            there = part(module)
            if module.split(".")[0] == "fnllm" and at_import and here not in ("__init__", there):
                against += [f"{here} imports {there}"] if LEVEL[there] >= LEVEL[here] else []
    assert not against


@pytest.mark.parametrize(("package", "allowed"), [
    ("fnllm_kernels", {"fnllm_kernels", "torch", "triton", "flash_attn", "flash_attn_interface", "jaxtyping", "numpy"}),
    ("fnllm_weights", {"fnllm_weights", "torch", "safetensors", "tokenizers", "jinja2", "huggingface_hub", "jaxtyping",
                       "numpy"}),
])  # fmt: skip
def test_siblings_import_neither_each_other_nor_fnllm(package, allowed):
    found = {module.split(".")[0] for path in PACKAGES[package].rglob("*.py") for module, _ in imports(path)}
    assert found - allowed - {""} <= set(sys.stdlib_module_names)


def test_scheduler_imports_no_torch():
    found = {module.split(".")[0] for path in (ROOT / "fnllm/scheduler").rglob("*.py") for module, _ in imports(path)}
    assert found - set(sys.stdlib_module_names) <= {"", "fnllm", "numpy", "jaxtyping", "immutables"}


def test_nothing_postpones_annotations():
    """Postponed annotations are strings, in which shapes are not checked."""
    assert not [path.name for path in SOURCES if any(module == "__future__" for module, _ in imports(path))]


def test_no_module_keeps_what_threads_would_share():
    """Locks and collections that change lie in values that callers hand over, such as a params' workspace."""
    shared = []
    for info in pkgutil.walk_packages(fnllm.__path__, "fnllm."):
        for name, value in vars(importlib.import_module(info.name)).items():
            kind = type(value)
            if not name.startswith("__") and (kind in (set, list) or kind.__module__ in ("threading", "_thread")):
                shared.append(f"{info.name}.{name}")
    assert not shared


EFFECTS = {"print", "open", "input", "read_text", "read_bytes", "write_text", "unlink", "_exit", "CUDAGraph"}


def test_files_with_effects_say_so():
    """Of effects those that a call shows by its name."""
    silent = []
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = {ast.unparse(node.func).split(".")[-1] for node in ast.walk(tree) if isinstance(node, ast.Call)}
        if called & EFFECTS and "(effect" not in path.read_text(encoding="utf-8").partition("\n")[0]:
            silent.append(path.relative_to(ROOT).as_posix())
    assert not silent


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    paths = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "kernels", ROOT / "weights"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_module_imports_without_triton_flash_attention_or_a_gpu():
    names = [
        ".".join(path.relative_to(PACKAGES[name].parent if name == "fnllm" else PACKAGES[name]).with_suffix("").parts)
        for name in PACKAGES
        for path in sorted(PACKAGES[name].rglob("*.py"))
    ]
    code = f"""
import importlib, sys
for blocked in ("triton", "flash_attn", "flash_attn_interface", "huggingface_hub", "transformers", "matplotlib"):
    sys.modules[blocked] = None
for name in {names!r}:
    name = name.removesuffix(".__init__")
    try:
        importlib.import_module(name)
    except ImportError as error:
        if "Needs triton" not in open(importlib.util.find_spec(name).origin).read():
            raise
        print(name)
import torch
assert not torch.cuda.is_initialized()
"""
    assert set(run(code, CUDA_VISIBLE_DEVICES="").split()) <= NEED_TRITON


# Device functions that kernels share, and kernels' bodies; imported only by files that guard the import.
NEED_TRITON = {"fnllm_kernels.attention_triton_heads", "fnllm_kernels.attention_triton_pages"}


def test_help_does_not_wait_for_torch():
    code = """
import sys
from fnllm import cli
try:
    cli.main(["--help"])
except SystemExit:
    pass
assert not {"torch", "transformers", "numpy"} & set(sys.modules), "imported"
"""
    assert "generate" in run(code)


def test_public_names_exist_and_are_documented():
    assert sorted(fnllm.__all__) == list(fnllm.__all__)
    silent = [name for name in fnllm.__all__ if len((getattr(fnllm, name).__doc__ or "").strip()) < 20]
    assert not silent


def test_public_names_are_told_to_type_checkers():
    """The lazy table and the imports that type checkers see name the same things."""
    source = (ROOT / "fnllm/__init__.py").read_text(encoding="utf-8")
    block = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(fnllm.__all__) == set(fnllm._HOME_OF)
    assert set(dir(fnllm)) >= seen
    with pytest.raises(AttributeError, match="generat"):
        fnllm.generat  # noqa: B018


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_file_is_short_and_finished(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400, "over 400 lines: give a part of it a file of its own"
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)


@pytest.mark.parametrize("path", AROUND, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_file_around_the_packages_is_short(path):
    assert path.read_text(encoding="utf-8").count("\n") <= 400, "over 400 lines: give a part of it a file of its own"


def test_public_functions_have_docstrings():
    """Of the modules that users' names come from, every public function and class."""
    silent = []
    for home in {home for home in fnllm._HOMES if home.startswith("fnllm.")}:
        path = ROOT / (home.replace(".", "/") + ".py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in fnllm.__all__:
                silent += [node.name] if ast.get_docstring(node) is None else []
    assert not silent


@pytest.mark.slow
def test_wheel_holds_the_packages_and_the_demo_model(tmp_path):
    pytest.importorskip("hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=300,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    demo = {f"fnllm/demo/{path.name}" for path in (ROOT / "fnllm/demo").iterdir()}
    assert demo >= {"fnllm/demo/config.json", "fnllm/demo/model.safetensors", "fnllm/demo/tokenizer.json"}
    assert demo <= names
    assert {"fnllm_kernels/attention.py", "fnllm_weights/config.py"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "examples"))]
