"""The states in an FSDP checkpoint: each is read by its name, and the description of all is read once."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardmake.checkpoint.formats.dcp import MODEL_FOLDER, OPTIMIZER_FOLDER
from shardmake.checkpoint.reshard.states import states_of_fsdp


def test_states_of_fsdp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {name: torch.randn(3, 2) for name in "abc"}
    moments = {name: {"step": torch.tensor(2.0), "exp_avg": -w, "exp_avg_sq": w * w} for name, w in weights.items()}
    groups = [{"lr": 0.1, "params": ["a"]}, {"lr": 0.2, "params": ["b", "c"]}]
    contents = {
        MODEL_FOLDER: {"model": {**weights, "head": weights["b"]}},
        OPTIMIZER_FOLDER: {"optimizer": {"state": moments, "param_groups": groups}},
    }
    for folder, content in contents.items():
        dcp.save(content, checkpoint_id=tmp_path / folder, no_dist=True)
    reads, read = list[Path](), dcp.FileSystemReader.read_metadata

    def counted(reader: dcp.FileSystemReader) -> dcp.Metadata:
        reads.append(Path(reader.path))
        return read(reader)

    monkeypatch.setattr(dcp.FileSystemReader, "read_metadata", counted)
    states = states_of_fsdp(tmp_path, 2)
    for name, weight in weights.items():
        expected = {"fp32": weight, **moments[name]}
        assert all(torch.equal(states.tensor(name, kind), expected[kind]) for kind in ("fp32", "exp_avg", "exp_avg_sq"))
    assert (states.groups, states.shared, float(states.adam_step)) == (groups, {"head": "b"}, 2.0)
    assert sorted(reads) == sorted(tmp_path / folder for folder in contents)
