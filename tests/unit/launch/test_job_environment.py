"""The environment of the jobs, if it is not the login node's."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from shardmake.core.errors import ConfigError
from shardmake.launch.container import check_container, check_job_environment, job_container
from shardmake.run.findings import Verdict
from tests.programs import write_program
from tests.unit.plans import make_cluster

THIS = f"PYTHONPATH=$PYTHONPATH:{os.environ.get('PYTHONPATH', '')}"  # `make test-versions` puts libraries there


@pytest.mark.parametrize(("script", "verdict", "words"), [
    (f'#!/bin/sh\n{THIS} exec {sys.executable} "$@"\n', Verdict.OK, "with the versions of this one"),
    ('#!/bin/sh\necho \'{"torch": "1"}\'\n', Verdict.STOPS, "torch is 1 in "),
    ("#!/bin/sh\necho No module named shardmake >&2; exit 1\n", Verdict.STOPS, "No module named shardmake"),
    ("\x7fELF" + "x" * 20, Verdict.NOT_CHECKED, "is built for another architecture"),
    ("", Verdict.NOT_CHECKED, "is not on this node"),
])  # fmt: skip
def test_the_environment_is_compared_before_a_job(tmp_path: Path, script: str, verdict: Verdict, words: str) -> None:
    if script:
        write_program(tmp_path / "bin/python", script)
    cluster = make_cluster(executor="slurm", environment=str(tmp_path))
    found = [one for one in check_job_environment(cluster) if words in one.found]
    assert [one.verdict for one in found] == [verdict]
    with pytest.raises(ConfigError, match="environment: ") if verdict is Verdict.STOPS else nullcontext():
        check_container(cluster)
    job = job_container(cluster)
    assert job is not None and job.python[-1] == f"{tmp_path}/bin/python" and str(tmp_path) in job.shell_function
