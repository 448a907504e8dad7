"""Custom GPU operations of fnllm, each with a plain-torch reference."""
