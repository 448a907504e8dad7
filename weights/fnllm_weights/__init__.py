"""The checkpoint contract of fnllm: configs, load plans, parameter trees, tokenizers."""
