"""The processes that a benchmark starts: where they find the sources, and where its results come from."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent


def environment(**more: str) -> dict[str, str]:
    """This process's environment with the sources of the repository in front, and `more` of it."""
    path = [ROOT, ROOT / "kernels", ROOT / "weights", HERE, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **more}


def facts() -> dict[str, Any]:
    """`provenance` by a process of its own, so that this one holds no GPU."""
    code = "import json, provenance; print(json.dumps(provenance.provenance()))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    return {**json.loads(done.stdout), "command": " ".join(["python", *sys.argv])}
