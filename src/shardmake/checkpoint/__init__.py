"""Sharded checkpoints: commit, recovery and retention, formats on disk, resharding."""
