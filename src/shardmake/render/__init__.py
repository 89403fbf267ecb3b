"""Render and check the Accelerate, DeepSpeed and training files of a plan."""
