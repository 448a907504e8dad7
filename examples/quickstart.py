"""Complete two prompts: python examples/quickstart.py [folder or hub id], or under torchrun to split the model."""

import sys

import fnllm

params = fnllm.load(*sys.argv[1:2])  # without an argument: the small model that comes with fnllm
prompts = ["It is a truth universally acknowledged", "And it came to pass"]
sampling = fnllm.Sampling(temperature=0.7, max_tokens=32, seed=1)

completions = fnllm.generate(params, prompts, sampling)
if params.shard.rank == 0:  # every rank has the same completions
    for prompt, completion in zip(prompts, completions, strict=True):
        print(f"{prompt}{completion.text} [{completion.finish_reason}]\n")
