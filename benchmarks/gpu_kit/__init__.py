"""Measure a GPU in minutes: every case is prepared elsewhere, starts early, and waits for its turn (docs/gpu.md)."""
