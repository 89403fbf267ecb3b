"""Repositories of the hub in `tests.hub`: commits, references and files."""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".parquet")
LFS_SIZE = 1_000_000


@dataclass(frozen=True)
class Blob:
    size: int
    sha256: str
    oid: str
    lfs: bool

    def as_tree_entry(self, path: str) -> dict[str, Any]:
        entry = {"type": "file", "path": path, "size": self.size, "oid": self.oid}
        return entry | ({"lfs": {"oid": self.sha256, "size": self.size, "pointerSize": 134}} if self.lfs else {})


@dataclass
class Repository:
    """Commits and the references that point to them."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """Titles of the pull requests, the first being number 1."""
    authors: list[str] = field(default_factory=list)
    """Names of the users who opened them."""

    def commit(self, ref: str, files: Mapping[str, Blob]) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {sorted(files)} {time.time()}".encode()).hexdigest()
        self.commits[oid] = dict(files)
        self.refs[ref] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        return self.refs.get(revision, revision if revision in self.commits else None)


def is_lfs(path: str, size: int) -> bool:
    return path.endswith(LFS_SUFFIXES) or size > LFS_SIZE


def lfs_blob(sha256: str, size: int) -> Blob:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    return Blob(size, sha256, git_oid(pointer), lfs=True)


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
