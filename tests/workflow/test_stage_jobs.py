"""The jobs that `snakemake --profile slurm` submits for the stages beside the training, from the real rules and executor.

Slurm's programs are stand-ins: sbatch notes its arguments, runs the job of the data stage as a node would, and then
fails, so that nothing waits for a job.
"""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

from shardmake.launch.stage_jobs import ON_GPUS
from shardmake.run.plan import Resources
from tests.programs import install_programs
from tests.unit.plans import make_plan
from tests.workflow.checkout import Checkout

SLURM = {
    "partition": "gpu", "account": "lab", "qos": "long", "constraint": "a100", "exclude": "c[7-9]", "wckey": "key",
    "gpu_type": "nvidia_a100-sxm4-80gb", "cpu_partition": "cpu", "cpu_qos": "short", "time_limit": "3-00:00:00",
    "setup": ['echo "${SITE:-set up}" >> set_up.txt'], "extra": {"reservation": "course"},
}  # fmt: skip
GPUS = {"accelerator": "a100-80gb", "processes_per_node": 4, "cpus_per_node": 32, "memory_gib_per_node": 256}
PROGRAMS = {
    "sbatch": """#!/usr/bin/env python3
import json, subprocess, sys
with open("submitted.jsonl", "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
if any("rule_data_run" in word for word in sys.argv):
    subprocess.run(["/bin/sh", "-c", sys.argv[-1].removeprefix("--wrap=")])
sys.exit("refused by the test")
""",
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"',
    "sacctmgr": "echo lab",
    **dict.fromkeys(("sacct", "scontrol", "sinfo", "squeue"), "exit 1"),
}


@pytest.fixture
def planned(checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """Return a checkout in which every earlier stage seems done."""
    checkout.configure(GPUS | {"executor": "slurm", "slurm": SLURM})
    resources = dict.fromkeys(("train", *ON_GPUS), Resources(memory_gib=3, cpus=2))
    make_plan("zero3").model_copy(update={"resources": resources}).write(checkout.run / "plan/plan.json")
    for path in ("sources.json", "train/receipt.json", "model/receipt.json", "data/receipt.json"):
        (checkout.run / path).parent.mkdir(exist_ok=True)
        (checkout.run / path).write_text('{"format": 1}')
    install_programs(tmp_path / "programs", monkeypatch, PROGRAMS, os.environ["PATH"])
    return checkout


RESULTS = {"data": "data/receipt.json", "consolidate": "model/receipt.json", "evaluate": "evaluation.json"}


def test_every_submitted_job_gets_what_the_site_requires(planned: Checkout) -> None:
    """Of the rules of some stages only, although their results exist."""
    for stages in (["evaluate"], ["consolidate", "data"]):
        files, rules = [f"runs/demo/{RESULTS[stage]}" for stage in stages], [f"{stage}_run" for stage in stages]
        options = ("--profile", "slurm", "--forceall", "--keep-going")
        planned("snakemake", *options, *files, "--allowed-rules", *rules, check=False)
    lines = (planned.root / "submitted.jsonl").read_text().splitlines()
    jobs = {line[line.index("--comment") + 1].split("_")[1]: line for line in map(json.loads, lines)}
    assert set(jobs) == set(ON_GPUS)
    common = {"--exclude=c[7-9]", "--wckey=key", "--nodes=1", "--cpus-per-task=2"}
    gpu = {"--qos=long", "--reservation=course", "--gpus-per-node=nvidia_a100-sxm4-80gb:4"}
    for stage, line in jobs.items():
        options = dict(pairwise(line))
        expected = ("lab", "gpu" if ON_GPUS[stage] else "cpu", "4320", "3072", "a100" if ON_GPUS[stage] else None)
        assert tuple(options.get(option) for option in ("-A", "-p", "-t", "--mem", "-C")) == expected, line
        assert common | (gpu if ON_GPUS[stage] else {"--qos=short"}) <= set(line), line
        assert ON_GPUS[stage] or not gpu & set(line)
    assert (planned.root / "set_up.txt").read_text() == "set up\n", "once, in the job, and not on the login node"
