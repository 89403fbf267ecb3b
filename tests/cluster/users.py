"""Two users of one group on the test cluster: accounts, and hosts that let them reach this Python.

The machine's own accounts and folders stay unchanged: every host has its own /etc/passwd and /etc/group. If this Python
lies in a folder that is closed to others (/root), the hosts have an open folder with only this Python in its place.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.cluster.harness import Cluster
from tests.cluster.slurm_conf import ADDRESSES
from tests.workflow.checkout import REPOSITORY


class User(NamedTuple):
    name: str
    id: int
    home: Path


GROUP_NAME, GROUP_ID = "lab", 42100


@contextmanager
def accounts(cluster: Cluster, names: list[str]) -> Iterator[list[User]]:
    """Create the users ``names``, whose common group is `GROUP_NAME`, on all hosts of ``cluster``."""
    folder = cluster.shared / "accounts"
    folder.mkdir()
    users = [User(name, 42001 + number, folder / name) for number, name in enumerate(names)]
    for user in users:
        user.home.mkdir()
        os.chown(user.home, user.id, user.id)
    _write_databases(folder, users)
    script = _mounts(folder)
    try:
        for host in ADDRESSES:
            cluster.run(script, node=host)
        yield users
    finally:
        for host in ADDRESSES:
            cluster.run("; ".join(f"umount -l {d}" for d in ("/etc/passwd /etc/group", *_closed())), node=host)
        shutil.rmtree(folder)


def _write_databases(folder: Path, users: list[User]) -> None:
    passwd = "".join(f"{user.name}:x:{user.id}:{user.id}::{user.home}:/bin/bash\n" for user in users)
    group = "".join(f"{user.name}:x:{user.id}:\n" for user in users)
    group += f"{GROUP_NAME}:x:{GROUP_ID}:{','.join(user.name for user in users)}\n"
    (folder / "passwd").write_text(Path("/etc/passwd").read_text() + passwd)
    (folder / "group").write_text(Path("/etc/group").read_text() + group)


def _needed() -> list[Path]:
    """Return the folders that commands read: interpreter, environment, repository."""
    paths = [sys.base_prefix, sys.prefix, REPOSITORY, *os.environ.get("PYTHONPATH", "").split(":")]
    return [Path(path).resolve() for path in paths if path]


def _closed() -> list[Path]:
    """Return the topmost parents of the needed folders that other users may not enter."""
    ways = [[*reversed(path.parents)] for path in _needed()]
    closed = [next((folder for folder in way if not folder.stat().st_mode & 0o001), None) for way in ways]
    return sorted({folder for folder in closed if folder is not None})


def _mounts(folder: Path) -> str:
    """Return a script that mounts the databases, and opens the closed folders."""
    lines = ["set -e", *(f"mount --bind {folder / name} /etc/{name}" for name in ("passwd", "group"))]
    for closed in _closed():
        entries = sorted({path.relative_to(closed).parts[0] for path in _needed() if path.is_relative_to(closed)})
        lines += ["aside=$(mktemp -d)", f"mount --rbind {closed} $aside", f"mount -t tmpfs -o mode=755 tmpfs {closed}"]
        lines += [f"mkdir {closed / entry} && mount --rbind $aside/{entry} {closed / entry}" for entry in entries]
        lines += ["umount -l $aside"]
    return "\n".join(lines)


def command_as(user: User, words: list[str], variables: Mapping[str, str]) -> list[str]:
    """Return the words that run a command as ``user``, with the strictest umask."""
    settings = {"HOME": str(user.home), "USER": user.name, "LOGNAME": user.name, **variables}
    return [
        "runuser", f"--user={user.name}", "--", "env", *(f"{name}={value}" for name, value in settings.items()), "sh",
        "-c", 'umask 077; exec "$@"', "sh", *words,
    ]  # fmt: skip
