"""Sharded checkpoints: the store, the formats on disk, and resharding."""
