"""``python -m tests.cluster up|down|status|shell|run COMMAND...``: the test cluster by hand."""

import argparse
import os
import sys

from tests.cluster.harness import Cluster, ClusterError, available, environment

HOW_TO = """\
The cluster is up: nodes c1, c2, c3, partitions open (default), urgent, and gpu and cpu, which
require the parameters of config/clusters/three-node-test.yaml. It stays up until you take it down.

  python -m tests.cluster shell                  a shell on the login node: sinfo, srun, snakemake --profile slurm
  python -m tests.cluster run snakemake ...      one command there
  SHARDMAKE_CLUSTER=reuse pytest tests/cluster   tests on this cluster, which they leave up
  python -m tests.cluster down
"""
PROMPT = r"[cluster \h] \w\$ "


def main() -> int:
    """Entry point; exit code 1 says that the cluster is not up or that a request was refused."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--accounting", action="store_true", help="with slurmdbd, for `up`")
    parser.add_argument("action", choices=["up", "down", "status", "shell", "run"])
    parser.add_argument("command", nargs=argparse.REMAINDER, help="for `run`")
    arguments = parser.parse_args()
    if reason := available():
        parser.exit(1, f"A cluster needs {reason}.\n")
    try:
        return act(Cluster(accounting=arguments.accounting), arguments.action, arguments.command)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1


def act(cluster: Cluster, action: str, command: list[str]) -> int:
    """Do ``action``; returns the exit code."""
    if action == "up":
        cluster.up()
        cluster.leave_up()
        print(HOW_TO)
    elif action == "down":
        cluster.down()
    elif not cluster.is_up():
        raise ClusterError("The cluster is not up. Start it: python -m tests.cluster up")
    elif action == "status":
        print(cluster.run("sinfo; squeue").stdout, end="")
    else:
        words = cluster.command(command if action == "run" else ["bash", "--norc", "-i"])
        os.execvpe(words[0], words, environment({"PS1": PROMPT}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
