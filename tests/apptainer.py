"""Stand-in for ``apptainer exec`` where Apptainer is not installed: ``python tests/apptainer.py exec ... IMAGE COMMAND``.

It takes exactly the options that Shardmake writes, and runs the command in a root folder that has only the image (the
folder of a sandbox), the kernel's file systems and what is bound: a forgotten bind or a wrong quote fails. As Apptainer
does, it mounts the image read-only, passes the environment on but for PATH and LD_LIBRARY_PATH, and ends with status 255
if it cannot start. It mounts neither home nor /tmp, which a site may disable in Apptainer.

For a user other than root it does what Apptainer without setuid does with a `.sif` file: it enters a user namespace, and
a process serves the image. A signal to all processes of the job ends that process unless it ignores the signal by
default, and the image is gone. Here, the command is then killed.
"""

import ctypes
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
PR_SET_PDEATHSIG = 1
LOCKED = {os.ST_NOSUID: 2, os.ST_NODEV: 4, os.ST_NOEXEC: 8, os.ST_NOATIME: 1024, os.ST_RELATIME: 1 << 21}
"""Flags of a mount that a user namespace must keep, as statvfs(3) reports them and as mount(2) takes them."""
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
    if LIBC.mount(source.encode(), target.encode(), kind.encode() if kind else None, flags, None):
        fail(f"while mounting {source} at {target}: {os.strerror(ctypes.get_errno())}")


def bind(source: Path, target: Path, *, read_only: bool = False) -> None:
    """Bind a file or folder, whose mount point is created."""
    if not source.exists():
        fail(f"mount source {source} doesn't exist")
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount(str(source.resolve()), str(target), None, MS_BIND | MS_REC)
    if read_only:
        protect(target)


def protect(target: Path) -> None:
    kept = sum(flag for found, flag in LOCKED.items() if os.statvfs(target).f_flag & found)
    mount("none", str(target), None, MS_BIND | MS_REMOUNT | MS_RDONLY | kept)


def unshare() -> None:
    """Enter a mount namespace, as a user other than root in a user namespace in which the user stays who it is."""
    user, group = os.geteuid(), os.getegid()
    if LIBC.unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)):
        fail(f"unshare: {os.strerror(ctypes.get_errno())}")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def serve_image() -> None:
    """Continue as the command in a child of a process that the next signal ends, and the command with it."""
    server = os.getpid()
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) % 256)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(255)


def enter(image: Path, binds: list[str], workdir: str) -> None:
    """Make the root folder of the container that of this process."""
    if not image.is_dir():
        fail(f"could not open image {image}: not a sandbox")
    unshare()
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    root = Path(tempfile.mkdtemp(prefix="stand-in-"))
    mount("none", str(root), "tmpfs", 0)
    of_image = []
    for entry in image.iterdir():
        if entry.is_symlink():
            (root / entry.name).symlink_to(entry.readlink())
        elif entry.is_dir() and not any(entry.iterdir()):
            (root / entry.name).mkdir()
        else:
            bind(entry, root / entry.name)
            of_image.append(root / entry.name)
    for spec in [*KERNEL, *binds]:
        source, target, *options = [*spec.split(":"), *([spec] if ":" not in spec else [])]
        bind(Path(source), root / target.lstrip("/"), read_only=options == ["ro"])
    for folder in of_image:
        protect(folder)
    os.chroot(root)
    try:
        os.chdir(workdir)
    except OSError as error:
        fail(f"while changing to {workdir}: {error.strerror}")


def main() -> None:
    binds, workdir, image, command = parse(sys.argv[1:])
    enter(image, binds, workdir)
    inherited = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment = inherited | {"PATH": PATH, "APPTAINER_CONTAINER": str(image)}
    os.environ["PATH"] = PATH
    if os.geteuid():
        serve_image()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        fail(f"{command[0]!r}: {error.strerror}")


if __name__ == "__main__":
    main()
