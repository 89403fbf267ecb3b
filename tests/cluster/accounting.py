"""Slurm's accounting for a test cluster: a MariaDB of its own on the head's loopback, and slurmdbd."""

import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

PROGRAMS = ("slurmdbd", "sacctmgr", "sacct", "mariadbd", "mariadb", "mariadb-install-db", "mariadb-admin")

_SQL = "CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm'; GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';"


def start(state: Path, run: Callable[..., CompletedProcess[str]]) -> None:
    """Start MariaDB and slurmdbd on the host that ``run`` runs commands on."""
    data, socket = state / "mariadb", state / "mariadb.sock"
    no_defaults = "--no-defaults --user=root"
    run(f"mariadb-install-db {no_defaults} --datadir={data} --auth-root-authentication-method=normal --skip-test-db")
    server = f"mariadbd {no_defaults} --datadir={data} --socket={socket} --bind-address=127.0.0.1"
    run(f"setsid --fork {server} --pid-file={state}/mariadb.pid >{state}/log/mariadb.log 2>&1")
    client = f"--no-defaults --user=root --socket={socket}"
    _repeat(run, f"mariadb-admin {client} ping")
    run(f'mariadb {client} --execute="{_SQL}"')
    run("slurmdbd")
    _repeat(run, "sacctmgr --immediate add cluster test")


def _repeat(run: Callable[..., CompletedProcess[str]], command: str, *, timeout: float = 30) -> None:
    """Run ``command`` until its server answers; raise the last failure."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if run(command, check=False).returncode == 0:
            return
        time.sleep(0.2)
    run(command)
