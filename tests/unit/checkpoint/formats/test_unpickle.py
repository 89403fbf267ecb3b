"""Reading a pickle without executing its code."""

import argparse
import collections
import datetime
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardmake.checkpoint.formats import unpickle
from shardmake.checkpoint.formats.pickle_machine import Inert
from shardmake.core.errors import CheckpointError


class Hostile:
    """An object that pickles as a call of ``function`` with ``args``."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.args


@pytest.mark.parametrize(("function", "arguments"), [
    (os.system, ("touch {}",)), (eval, ("open('{}', 'w')",)), (exec, ("open('{}', 'w')",)),
    (getattr, (collections.OrderedDict, "clear")), (os.makedirs, ("{}",)), (torch.load, ("{}",)),
    (bytearray, (1 << 40,)), (__import__, ("os",)),
])  # fmt: skip
def test_names_in_a_pickle_are_never_called(tmp_path: Path, function: Any, arguments: Any) -> None:
    proof = tmp_path / "proof"
    filled = [part.format(proof) if isinstance(part, str) else part for part in arguments]
    torch.save({"module": {"w": torch.ones(2)}, "evil": Hostile(function, *filled)}, tmp_path / "evil.pt")
    read = unpickle.load(tmp_path / "evil.pt")
    assert isinstance(read["evil"], Inert) and read["evil"].kind.name == function.__name__
    assert isinstance(read["module"]["w"], unpickle.TensorRef) and not proof.exists()


def test_persistent_id_outside_the_archive_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"\x80\x02X\x0b\x00\x00\x00/etc/passwdQ.")
    with pytest.raises(CheckpointError, match="refers to an object that is not a torch storage"):
        unpickle.load_plain(tmp_path / "plain")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16])
def test_tensors_become_byte_ranges(tmp_path: Path, dtype: torch.dtype) -> None:
    full = torch.arange(24).reshape(4, 6).to(dtype)
    torch.save({"a": full, "b": full[1:3], "c": torch.nn.Parameter(torch.ones(3)), "d": full.T}, tmp_path / "f.pt")
    read = unpickle.load(tmp_path / "f.pt")
    content = (tmp_path / "f.pt").read_bytes()
    for name, tensor in (("a", full), ("b", full[1:3]), ("c", torch.ones(3))):
        ref = read[name]
        start = ref.record.offset + ref.offset
        assert content[start : start + ref.nbytes] == bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        assert ref.shape == tuple(tensor.shape) and ref.is_contiguous
    assert not read["d"].is_contiguous


def test_truncated_and_damaged_files_are_reported(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1000)}, tmp_path / "f.pt")
    content = (tmp_path / "f.pt").read_bytes()
    for cut in (0, 1, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "cut.pt").write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=r"cut\.pt is (damaged|not a zip archive)"):
            unpickle.load(tmp_path / "cut.pt")
    content = bytearray(content)
    content[content.index(b"storage") + 1] ^= 64
    (tmp_path / "f.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="do not match the CRC-32 in the file"):
        unpickle.load(tmp_path / "f.pt")


def test_pipes_and_folders_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "folder.pt").mkdir()
    for name in ("pipe.pt", "folder.pt"):
        for read in (unpickle.load, unpickle.load_plain):
            with pytest.raises(CheckpointError, match=rf"Cannot read .*{name}\. It is not a regular file"):
                read(tmp_path / name)


@pytest.mark.parametrize("field", ["size", "offset", "entries"])
def test_forged_sizes_in_a_zip_directory(tmp_path: Path, field: str) -> None:
    """The last 22 bytes hold the number of entries, and size and offset of the directory."""
    torch.save({"a": torch.ones(4)}, tmp_path / "f.pt")
    content = bytearray((tmp_path / "f.pt").read_bytes())
    start, length = {"size": (-10, 4), "offset": (-6, 4), "entries": (-14, 4)}[field]
    content[start : start + length] = b"\xf0" * length
    (tmp_path / "f.pt").write_bytes(content)
    try:
        assert unpickle.load(tmp_path / "f.pt").keys() == {"a"}
    except CheckpointError as error:
        assert "f.pt is damaged" in str(error)


def test_objects_of_a_client_state_are_placeholders_and_so_are_other_types(tmp_path: Path) -> None:
    client = {
        "args": argparse.Namespace(rate=0.1), "array": np.ones(3), "number": np.float64(1.5),
        "when": datetime.datetime(2026, 1, 2), "counts": collections.Counter("aab"), "path": Path("/a"),
        "names": {"a", "b"},
    }  # fmt: skip
    torch.save({"w": torch.ones(2), "z": torch.ones(2, dtype=torch.complex128), "client": client}, tmp_path / "f.pt")
    read = unpickle.load(tmp_path / "f.pt")
    assert isinstance(read["w"], unpickle.TensorRef) and read["client"]["args"].rate == 0.1
    assert sorted(read["client"]["names"]) == ["a", "b"]
    with pytest.raises(CheckpointError, match=r"argparse\.Namespace in it has no field 'ratio'"):
        read["client"]["args"].ratio  # noqa: B018
    assert isinstance(read["z"], Inert), "no safetensors file has this type"
