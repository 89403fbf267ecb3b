"""Stand-in for ``apptainer exec`` where Apptainer is not installed: ``python tests/apptainer.py exec ... IMAGE COMMAND``.

It takes exactly the options that Shardmake writes, and runs the command in a root folder that has only the image (the
folder of a sandbox), the kernel's file systems and what is bound: a forgotten bind or a wrong quote fails. It needs
root. As Apptainer does, it passes the environment on but for PATH and LD_LIBRARY_PATH, and it ends with status 255 if it
cannot start. It mounts neither home nor /tmp, which a site may disable in Apptainer.
"""

import ctypes
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
CLONE_NEWNS = 0x20000
KERNEL = ("/proc", "/sys", "/dev", "/etc/hosts")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LIBC = ctypes.CDLL(None, use_errno=True)


def fail(message: str) -> NoReturn:
    """End as Apptainer does if it cannot start the container."""
    print(f"FATAL:   {message}", file=sys.stderr)
    sys.exit(255)


def parse(words: list[str]) -> tuple[list[str], str, Path, list[str]]:
    """Return binds, working folder, image and command."""
    if words[:1] != ["exec"]:
        fail(f"unknown command {words[:1]}")
    binds, workdir, rest = list[str](), "", words[1:]
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "--nv":
            continue
        if option not in ("--bind", "--pwd") or not rest:
            fail(f"unknown flag: {option}")
        value = rest.pop(0)
        if option == "--bind":
            binds.append(value)
        else:
            workdir = value
    if len(rest) < 2 or not workdir:
        fail("usage: exec [--nv] --bind SPEC... --pwd FOLDER IMAGE COMMAND...")
    return binds, workdir, Path(rest[0]), rest[1:]


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    """Call mount(2)."""
    if LIBC.mount(source.encode(), target.encode(), kind.encode() if kind else None, flags, None):
        fail(f"while mounting {source} at {target}: {os.strerror(ctypes.get_errno())}")


def bind(source: Path, target: Path, *, read_only: bool = False) -> None:
    """Bind a file or folder, whose mount point is created."""
    if not source.exists():
        fail(f"mount source {source} doesn't exist")
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount(str(source.resolve()), str(target), None, MS_BIND | MS_REC)
    if read_only:
        mount("none", str(target), None, MS_BIND | MS_REMOUNT | MS_RDONLY)


def enter(image: Path, binds: list[str], workdir: str) -> None:
    """Make the root folder of the container that of this process."""
    if not image.is_dir():
        fail(f"could not open image {image}: not a sandbox")
    if LIBC.unshare(CLONE_NEWNS):
        fail(f"unshare: {os.strerror(ctypes.get_errno())}")
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    root = Path(tempfile.mkdtemp(prefix="stand-in-"))
    mount("none", str(root), "tmpfs", 0)
    for entry in image.iterdir():
        if entry.is_symlink():
            (root / entry.name).symlink_to(entry.readlink())
        elif entry.is_dir() and not any(entry.iterdir()):
            (root / entry.name).mkdir()
        else:
            bind(entry, root / entry.name)
    for spec in [*KERNEL, *binds]:
        source, target, *options = [*spec.split(":"), *([spec] if ":" not in spec else [])]
        bind(Path(source), root / target.lstrip("/"), read_only=options == ["ro"])
    os.chroot(root)
    try:
        os.chdir(workdir)
    except OSError as error:
        fail(f"while changing to {workdir}: {error.strerror}")


def main() -> None:
    """Run the command in the container."""
    binds, workdir, image, command = parse(sys.argv[1:])
    enter(image, binds, workdir)
    inherited = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment = inherited | {"PATH": PATH, "APPTAINER_CONTAINER": str(image)}
    os.environ["PATH"] = PATH
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        fail(f"{command[0]!r}: {error.strerror}")


if __name__ == "__main__":
    main()
