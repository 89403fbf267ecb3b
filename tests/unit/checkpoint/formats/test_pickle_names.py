"""A checkpoint is loaded only if its pickles name what a training writes."""

import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardmake.checkpoint.formats.pickle_names import METADATA, find_foreign_names, refuse_foreign_names
from shardmake.checkpoint.formats.unpickle import names_in
from shardmake.core.errors import CheckpointError
from tests.unit.checkpoint.formats.test_unpickle import Hostile


@pytest.mark.parametrize("file", ["model_states.pt", "rng_state_0.pth", "optimizer.bin", "random_states.pkl"])
@pytest.mark.parametrize(("function", "name"), [(os.system, "posix.system"), (eval, "__builtin__.eval")])
def test_a_call_in_a_torch_file_is_found_and_not_made(tmp_path: Path, file: str, function: Any, name: str) -> None:
    proof = tmp_path / "proof"
    torch.save({"module": torch.ones(2), "evil": Hostile(function, f"open('{proof}', 'w')")}, tmp_path / file)
    assert find_foreign_names(tmp_path, [file]) == {file: [name]}
    with pytest.raises(CheckpointError, match=f"{file} was not loaded. Its pickle would import {name}, which"):
        refuse_foreign_names(tmp_path, [file])
    assert not proof.exists()


def test_an_attribute_of_an_expected_name_is_not_expected(tmp_path: Path) -> None:
    """Protocol 4 reads ``a.b`` from a module, and torch's modules have imported ``os``."""
    program = b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93."
    assert pickle.loads(program) is os.system and names_in(program, tmp_path) == {"torch.serialization.os.system"}
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", program)
    assert find_foreign_names(tmp_path, ["a.pt"]) == {"a.pt": ["torch.serialization.os.system"]}


def test_a_plain_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scheduler.pt").write_bytes(pickle.dumps(Hostile(os.system, "true")))
    with pytest.raises(CheckpointError, match=r"is not a zip archive of torch\.save"):
        find_foreign_names(tmp_path, ["scheduler.pt"])


def test_an_object_in_the_files_of_dcp_is_found(tmp_path: Path) -> None:
    """torch loads the objects beside the tensors with the standard unpickler."""
    dcp.save({"w": torch.ones(3), "lr": 0.1, "evil": Hostile(os.system, "true")}, checkpoint_id=tmp_path)
    assert find_foreign_names(tmp_path, [path.name for path in tmp_path.iterdir()]) == {METADATA: ["posix.system"]}


def test_a_program_of_torchscript_is_refused(tmp_path: Path) -> None:
    """``torch.load`` runs an archive with this entry; torch's own ones are compressed, which is refused before."""
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), str(tmp_path / "compressed.pt"))
    with zipfile.ZipFile(tmp_path / "compressed.pt") as source, zipfile.ZipFile(tmp_path / "stored.pt", "w") as target:
        for name in source.namelist():
            target.writestr(name.replace("compressed/", "stored/"), source.read(name))
    for name, words in (("compressed.pt", "is not one that torch writes"), ("stored.pt", "program of TorchScript")):
        with pytest.raises(CheckpointError, match=words):
            find_foreign_names(tmp_path, [name])


def test_what_a_training_writes_is_expected(tmp_path: Path) -> None:
    """Every type and container that the loops write; the workflow tests do the same with real checkpoints."""
    states = {
        "python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(),
        "types": [torch.ones(2, dtype=kind) for kind in (torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn)],
        "parameter": torch.nn.Parameter(torch.ones(1)), "dtype": torch.bfloat16, "names": {"a"},
        "sparse": torch.Size([1]), "scalar": np.float64(1),
    }  # fmt: skip
    torch.save(states, tmp_path / "rng_state_0.pth")
    dcp.save({"w": torch.ones(3), "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}, checkpoint_id=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert find_foreign_names(tmp_path, [path.name for path in tmp_path.iterdir()]) == {}
