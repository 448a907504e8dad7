"""fnllm: an LLM inference engine made of pure functions."""
