"""Runs every check of some files on groups of ranks: python ranks.py FOLDER SIZE:CHECKS_FILE,CHECKS_FILE...

One process imports everything; its forked copies are first the one rank that computes what to expect, then the ranks of
one group after another, joined over gloo as under torchrun. Each rank writes what became of its checks into a file of
its own.
"""

import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "weights")]

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # its pool of processes would not know what to do after a fork

import einops._torch_specific  # noqa: E402, F401  these two take seconds, once for all ranks
import torch  # noqa: E402
import torch._dynamo  # noqa: E402


def main(folder: Path, groups: dict[int, list[str]]) -> int:
    modules = {file: load_module(Path(__file__).with_name(file)) for files in groups.values() for file in files}
    # In a process of its own: once torch has run threads, copies of the process cannot.
    if os.fork() == 0:
        torch.set_num_threads(1)
        for file, module in modules.items():
            torch.save(module.on_one_rank(), folder / f"{file}.pt")
        os._exit(0)
    if os.wait()[1]:
        return 1
    return max([run_group(size, folder, {file: modules[file] for file in files}) for size, files in groups.items()])


def run_group(size: int, folder: Path, modules: dict) -> int:
    reader, writer = os.pipe()
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            become(rank, size, int(os.read(reader, 5)))
            expected = [torch.load(folder / f"{file}.pt", weights_only=False) for file in modules]
            run_checks([*modules.values()], expected, folder / f"{size}-{rank}.json")
        children.append(child)
    # As torchrun does, the parent keeps the store through which the ranks find each other, on a port that is free.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writer, b"%05d" % store.port * size)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return 1 if any(statuses) else 0


def load_module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def become(rank: int, size: int, port: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ.setdefault("FNLLM_TIMEOUT_S", "60")


def run_checks(modules: list, expected: list, results_file: Path) -> None:
    """Run every check_* function in order and end; after a failure the ranks may be out of step, so it is the last."""
    torch.set_num_threads(1)
    results = {}
    checks = [(name, module, e) for module, e in zip(modules, expected, strict=True) for name in names(module)]
    for name, module, known in checks:
        began = time.perf_counter()
        try:
            getattr(module, name)(known)
            results[name] = {"ok": True, "seconds": time.perf_counter() - began}
        except BaseException:
            results[name] = {"ok": False, "error": traceback.format_exc()}
        results_file.write_text(json.dumps(results))
        if not results[name]["ok"]:
            os._exit(1)
    torch.distributed.destroy_process_group()
    os._exit(0)


def names(module) -> list[str]:
    return [name for name in vars(module) if name.startswith("check_")]


if __name__ == "__main__":
    asked = (group.split(":") for group in sys.argv[2:])
    sys.exit(main(Path(sys.argv[1]), {int(size): files.split(",") for size, files in asked}))
