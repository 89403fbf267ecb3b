"""Damage that only torch itself can do: a shard with another content and valid checksums."""

from pathlib import Path

import torch


def rewrite_step(path: Path, step: float) -> None:
    """Save the optimizer file again as if it had been written at ``step``."""
    state = torch.load(path, weights_only=False)
    for values in state["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
        values["step"].fill_(step)
    torch.save(state, path)
