"""A checkpoint is a program from somewhere: nothing in it may run."""

import collections
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmake.checkpoint.formats import unpickle
from shardmake.core.errors import ShardmakeError


class Hostile:
    """Pickles as a call of ``function`` with ``args``."""

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
def test_a_hostile_pickle_is_refused_by_name(tmp_path: Path, function: Any, arguments: Any, name: str) -> None:
    proof = tmp_path / "proof"
    filled = [part.format(proof) if isinstance(part, str) else part for part in arguments]
    torch.save({"module": {"w": torch.ones(2)}, "evil": Hostile(function, *filled)}, tmp_path / "evil.pt")
    with pytest.raises(ShardmakeError, match=rf"evil\.pt is refused: its pickle asks for {name}"):
        unpickle.load(tmp_path / "evil.pt")
    assert not proof.exists()


def test_an_allowed_name_cannot_reach_further(tmp_path: Path) -> None:
    """Protocol 4 allows dotted names; only whole names of the list are looked up."""
    for module, name in (
        ("collections", "OrderedDict.fromkeys"),
        ("builtins", "set.__class__"),
        ("torch", "os.system"),
    ):
        content = b"\x80\x04" + b"".join(b"\x8c" + struct.pack("B", len(t)) + t.encode() for t in (module, name))
        (tmp_path / "plain").write_bytes(content + b"\x93.")
        with pytest.raises(ShardmakeError, match="is refused"):
            unpickle.load_plain(tmp_path / "plain")


def test_a_plain_pickle_is_refused_where_torch_files_belong(tmp_path: Path) -> None:
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Hostile(os.system, f"touch {tmp_path / 'proof'}")))
    with pytest.raises(ShardmakeError, match=r"no zip archive as torch\.save writes them"):
        unpickle.load(tmp_path / "evil.pt")
    assert not (tmp_path / "proof").exists()


def test_a_persistent_id_cannot_leave_the_archive(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"\x80\x02X\x0b\x00\x00\x00/etc/passwdQ.")
    with pytest.raises(ShardmakeError, match="refers to something that is no storage"):
        unpickle.load_plain(tmp_path / "plain")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16])
def test_tensors_come_out_as_places(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.arange(24).reshape(4, 6).to(dtype)
    torch.save({"a": whole, "b": whole[1:3], "c": torch.nn.Parameter(torch.ones(3)), "d": whole.T}, tmp_path / "f.pt")
    read = unpickle.load(tmp_path / "f.pt")
    content = (tmp_path / "f.pt").read_bytes()
    for name, tensor in (("a", whole), ("b", whole[1:3]), ("c", torch.ones(3))):
        ref = read[name]
        start = ref.record.offset + ref.offset
        assert content[start : start + ref.nbytes] == bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        assert ref.shape == tuple(tensor.shape) and ref.is_contiguous
    assert not read["d"].is_contiguous


def test_damage_is_named(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1000)}, tmp_path / "f.pt")
    content = (tmp_path / "f.pt").read_bytes()
    for cut in (0, 1, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "cut.pt").write_bytes(content[:cut])
        with pytest.raises(ShardmakeError, match=r"cut\.pt is (damaged|no zip archive)"):
            unpickle.load(tmp_path / "cut.pt")
