"""A real Slurm with three nodes on one machine, for tests and for trying things out (`python -m tests.cluster up`)."""
