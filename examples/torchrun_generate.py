"""Generate on several GPUs, each with a part of every layer: the same few lines as on one GPU.

    torchrun --nproc-per-node 2 examples/torchrun_generate.py [CHECKPOINT]

Every rank runs this script. `load` loads the rank's shard of the weights, and `generate` returns the same completions
on all ranks; calls that differ between ranks are refused. Without GPUs the ranks are processes connected by gloo.
"""

import sys

import fnllm

params = fnllm.load(sys.argv[1] if len(sys.argv) > 1 else None)
prompts = ["In the beginning", "And it came to pass"]
completions = fnllm.generate(params, prompts, fnllm.Sampling(temperature=0, max_tokens=16))
if params.shard.rank == 0:  # all have them; one tells
    for prompt, completion in zip(prompts, completions, strict=True):
        print(f"{prompt}|{completion.text}")
