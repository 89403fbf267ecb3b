"""Measure a GPU in minutes: every case is prepared elsewhere, starts at once, and waits for its turn (docs/gpu.md)."""
