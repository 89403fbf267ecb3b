"""Checks that need GPUs, for ``make gpu-check``; docs/gpu.md asks users for their results."""
