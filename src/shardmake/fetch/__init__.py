"""Fetch model and data of a run from the hub, pinned to a commit and verified."""
