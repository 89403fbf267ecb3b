"""Damage that checksums cannot detect: a shard with other content and valid checksums."""

from pathlib import Path

import torch


def rewrite_step(path: Path, step: float) -> None:
    """Save the optimizer file again with another ``step``."""
    state = torch.load(path, weights_only=False)
    for values in state["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
        values["step"].fill_(step)
    torch.save(state, path)
