"""torch's consolidation of a Hugging Face checkpoint writes a 0-dim tensor as 0.0 and fails for integers."""

import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter


def consolidated(tensor: torch.Tensor) -> object:
    """Return what the consolidated file holds for ``tensor``, or the error."""
    folder = Path(tempfile.mkdtemp())
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
    try:
        dcp.save({"value": tensor}, storage_writer=writer, no_dist=True)
        return next(iter(load_file(path)["value"] for path in folder.glob("*.safetensors")))
    except BaseException as error:  # torch raises one that is not an Exception
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"


print("0-dim 3.5 becomes", consolidated(torch.tensor(3.5)))
print("1-dim 3.5 becomes", consolidated(torch.tensor([3.5])))
print("integers 7, 8 become", consolidated(torch.tensor([7, 8])))
