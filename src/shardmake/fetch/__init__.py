"""Bring what a run starts from to this cluster, pinned and checked, where there is internet."""
