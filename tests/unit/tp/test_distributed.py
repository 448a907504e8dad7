"""What a rank knows before it has joined the others, and the time limit on its waits."""

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import device

from fnllm import distributed
from fnllm.distributed import FAILED, launched, local_device, timeout, world
from fnllm.tensor_parallel import SINGLE
from fnllm.watch import Watch, watch
from fnllm_weights import Params, Shard


def test_place_outside_and_under_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launched() == Shard(0, 1) and world(launched()) is SINGLE
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert launched() == Shard(2, 3)


def test_the_limit_is_seconds_from_the_environment(monkeypatch):
    monkeypatch.setenv("FNLLM_TIMEOUT_S", "2.5")
    assert timeout() == timedelta(seconds=2.5)
    for wrong in ("soon", "0", "-1", "inf", ""):
        monkeypatch.setenv("FNLLM_TIMEOUT_S", wrong)
        with pytest.raises(ValueError, match="FNLLM_TIMEOUT_S must be a positive number of seconds, found"):
            timeout()


def test_each_rank_has_a_gpu_of_its_own_or_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert local_device(None) == local_device("cuda") == device("cuda", 1)
    assert local_device("cuda:0") == device("cuda", 0) and local_device("cpu") == device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="LOCAL_RANK=2 has no GPU: this machine shows 2; start --nproc-per-node 2 or"):
        local_device(None)


def test_one_rank_agrees_with_itself_and_counts_alone():
    alone = Params(None, None, {}, Shard(0, 1))
    assert distributed.agree(alone, 7, prompts=["x"]) == 7
    assert distributed.agree(alone, None) != distributed.agree(alone, None)
    assert distributed.least(SINGLE, device("cpu"), lambda: 5) == 5


def test_leaving_lets_the_group_go():
    """Else its threads may outlive the interpreter, and short runs that drew tokens may end with status 134."""
    script = """
import weakref, torch
from fnllm import distributed
distributed.join(torch.device("cpu"))
group = weakref.ref(torch.distributed.group.WORLD)
import torch._dynamo  # as the first draw of a token does
distributed.leave()
assert group() is None
"""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    environment = {**os.environ, **place, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def in_a_copy_of_this_process(work) -> int:
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_wait_beyond_the_limit_ends_the_process_and_shorter_ones_do_not():
    def waits(*seconds: float):
        limit = Watch(1.0, rank=0)
        for wait in seconds:
            with limit:
                time.sleep(wait)

    assert in_a_copy_of_this_process(lambda: waits(30)) == FAILED
    assert in_a_copy_of_this_process(lambda: waits(0.4, 0.4, 0.4, 0.4)) == 0


def test_each_thread_has_a_limit_of_its_own():
    """Waits of another thread neither end nor renew one's own, and many short ones are no long one."""

    def beside_short_waits(seconds: float):
        limit = Watch(1.0, rank=0)

        def wait_briefly():
            for _ in range(40):
                with limit:
                    time.sleep(0.05)

        other = threading.Thread(target=wait_briefly, daemon=True)
        other.start()
        with limit:
            time.sleep(seconds)
        other.join()

    assert in_a_copy_of_this_process(lambda: beside_short_waits(1.8)) == FAILED
    assert in_a_copy_of_this_process(lambda: beside_short_waits(0.4)) == 0


def test_only_waits_for_others_on_a_device_are_limited():
    assert not isinstance(watch(SINGLE, device("cuda", 0)), Watch)
