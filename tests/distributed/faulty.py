"""A short script under torchrun in which rank 1 fails: python faulty.py KIND STEP."""

import os
import signal
import sys
import time
from pathlib import Path

import fnllm

KIND, STEP = sys.argv[1], int(sys.argv[2])
calls = 0


def mlp(p, x, ctx):
    """The usual function, until the fault's turn in rank 1's last layer."""
    global calls
    calls += ctx.layer == 2
    if ctx.tp.rank == 1 and calls == STEP:
        if KIND == "raise":
            raise ArithmeticError("broken on purpose")
        if KIND == "hang":
            time.sleep(3600)
        if KIND == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return fnllm.layers.mlp(p, x, ctx)


params = fnllm.load(Path(__file__).parents[1] / "oracle" / "qwen3-odd")
sampling = fnllm.Sampling(temperature=0, max_tokens=12, ignore_eos=True)
layers = fnllm.Layers()._replace(mlp=mlp)
fnllm.generate(params, [[97, 128, 112, 12, 31]], sampling, layers=layers, num_blocks=8)
print("this came to its end")
