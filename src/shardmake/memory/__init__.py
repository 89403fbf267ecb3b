"""Estimate the memory of a training step: GPU, host RAM, NVMe and disk, term by term."""
