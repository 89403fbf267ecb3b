"""Reading a pickle without executing its code."""

import collections
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmake.checkpoint.formats import unpickle
from shardmake.core.errors import CheckpointError


class Hostile:
    """An object that pickles as a call of ``function`` with ``args``."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.args


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("touch {}",), r"posix\.system"),
        (eval, ("open('{}', 'w')",), r"(builtins|__builtin__)\.eval"),
        (exec, ("open('{}', 'w')",), r"(builtins|__builtin__)\.exec"),
        (getattr, (collections.OrderedDict, "clear"), r"(builtins|__builtin__)\.getattr"),
        (os.makedirs, ("{}",), r"os\.makedirs"),
        (torch.load, ("{}",), r"torch\.serialization\.load"),
        (bytearray, (1 << 40,), r"(builtins|__builtin__)\.bytearray"),
        (__import__, ("os",), r"(builtins|__builtin__)\.__import__"),
    ],
)
def test_hostile_pickle_is_rejected(tmp_path: Path, function: Any, arguments: Any, name: str) -> None:
    proof = tmp_path / "proof"
    filled = [part.format(proof) if isinstance(part, str) else part for part in arguments]
    torch.save({"module": {"w": torch.ones(2)}, "evil": Hostile(function, *filled)}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=rf"Rejected .*evil\.pt: its pickle uses {name}"):
        unpickle.load(tmp_path / "evil.pt")
    assert not proof.exists()


def test_dotted_name_is_rejected(tmp_path: Path) -> None:
    """Protocol 4 allows dotted names; only complete names of the allowlist are accepted."""
    for module, name in (
        ("collections", "OrderedDict.fromkeys"),
        ("builtins", "set.__class__"),
        ("torch", "os.system"),
    ):
        content = b"\x80\x04" + b"".join(b"\x8c" + struct.pack("B", len(t)) + t.encode() for t in (module, name))
        (tmp_path / "plain").write_bytes(content + b"\x93.")
        with pytest.raises(CheckpointError, match="Rejected"):
            unpickle.load_plain(tmp_path / "plain")


def test_plain_pickle_is_not_a_torch_file(tmp_path: Path) -> None:
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Hostile(os.system, f"touch {tmp_path / 'proof'}")))
    with pytest.raises(CheckpointError, match=r"is not a zip archive of torch\.save"):
        unpickle.load(tmp_path / "evil.pt")
    assert not (tmp_path / "proof").exists()


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


def test_truncated_file_is_reported(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1000)}, tmp_path / "f.pt")
    content = (tmp_path / "f.pt").read_bytes()
    for cut in (0, 1, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "cut.pt").write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=r"cut\.pt is (damaged|not a zip archive)"):
            unpickle.load(tmp_path / "cut.pt")
