"""Starts programs under Triton's interpreter: it is chosen when kernels are defined, so in a process of their own."""

import os
import subprocess
import sys

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def interpreted(*arguments: str) -> str:
    """What `python ARGUMENTS` prints; it must end well. Skips where triton is not installed."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]
    return run.stdout


def interpreted_tests(file: str) -> None:
    """Run the tests that a file has under the interpreter; its kernels cannot be imported twice."""
    interpreted("-m", "pytest", file, "-q", "-x", "-p", "no:cacheprovider")
