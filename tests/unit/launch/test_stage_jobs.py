"""The sbatch lines of the jobs that Snakemake's executor submits, as the executor itself builds them."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from snakemake.utils import format as format_as_snakemake

from shardmake.config.models import Cluster
from shardmake.core.errors import ConfigError
from shardmake.launch.stage_jobs import ON_GPUS, job_resources, job_shell_prefix, sbatch_command
from shardmake.run.plan import Resources
from tests.unit.plans import make_cluster, make_run

SITE: dict[str, Any] = {
    "partition": "gpu", "account": "lab", "qos": "long", "constraint": "ib&a100", "exclude": "c[7-9]", "wckey": "key",
    "time_limit": "3-00:00:00", "extra": {"reservation": "course", "mail_type": "END", "mem": 0, "exclusive": True},
}  # fmt: skip
EVERYWHERE = {"-A lab", "'--exclude=c[7-9]'", "--wckey=key", "--mail-type=END", "--nodes=1", "--mem 3072"}


def site(accelerator: str = "a100-80gb", **changes: Any) -> Cluster:
    return make_cluster(executor="slurm", accelerator=accelerator, slurm=SITE | changes)


def line(stage: str, cluster: Cluster, **run: Any) -> str:
    return sbatch_command(stage, make_run(**run), cluster, Resources(memory_gib=3, cpus=2))


def missing(words: set[str], text: str) -> set[str]:
    return {word for word in words if f" {word} " not in f"{text} "}


@pytest.mark.parametrize("stage", ON_GPUS)
def test_every_job_gets_what_the_site_requires(stage: str) -> None:
    text = line(stage, site())
    required = {"-p gpu", "--qos=long", "-C 'ib&a100'", "--reservation=course", "-t 4320"}
    assert not missing(EVERYWHERE | required | {"--cpus-per-task=2"}, text), text
    assert "--mem=0" not in text
    assert ("--gres=gpu:2" in text, "--exclusive" in text) == (ON_GPUS[stage],) * 2


@pytest.mark.parametrize("stage", ON_GPUS)
def test_jobs_without_gpus_go_to_the_cpu_partition(stage: str) -> None:
    changes = {"cpu_partition": "cpu", "cpu_account": "staff", "cpu_qos": "short", "stage_time_limit": "12:00:30"}
    text = line(stage, site(**changes))
    assert "-t 721 " in text
    if ON_GPUS[stage]:
        assert not missing({"-p gpu", "-A lab", "--qos=long", "-C 'ib&a100'", "--reservation=course"}, text)
        return
    assert not missing({"-p cpu", "-A staff", "--qos=short"}, text)
    assert not any(word in text for word in ("-C ", "reservation", "gres", "gpus"))
    assert "-C cpu" in line(stage, site(cpu_constraint="cpu", **changes))
    assert not missing({"-p gpu", "-C cpu", "--qos=short"}, line(stage, site(cpu_constraint="cpu", cpu_qos="short")))


@pytest.mark.parametrize(("request_", "gpu_type", "words"), [
    ("gres", None, "--gres=gpu:2"), ("gres", "a100", "--gres=gpu:a100:2"), ("gres", "1g.10gb", "--gres=gpu:1g.10gb:2"),
    ("gres", "nvidia_a100-sxm4-80gb", "--gpus-per-node=nvidia_a100-sxm4-80gb:2"),
    ("gres", "1g.10gb+me", "--gpus-per-node=1g.10gb+me:2"), ("gpus-per-node", None, "--gpus-per-node=2"),
    ("gpus-per-node", "h100-sxm", "--gpus-per-node=h100-sxm:2"), ("gpus", None, "--gpus=2"),
    ("gpus", "a100", "--gpus=a100:2"), ("gpus", "a100-sxm", "--gpus-per-node=a100-sxm:2"), ("none", "a100", ""),
])  # fmt: skip
def test_evaluate_requests_gpus_as_the_site_does(request_: str, gpu_type: str | None, words: str) -> None:
    text = line("evaluate", site(gpu_request=request_, gpu_type=gpu_type))
    assert [word for word in text.split() if word.startswith(("--gres", "--gpus"))] == words.split()


def test_gpus_of_each_process_none_on_cpus_and_a_value_that_the_executor_misreads() -> None:
    assert "--gres=gpu:1" in line("evaluate", site(), evaluation={"processes": 1})
    assert "gres" not in line("evaluate", site("cpu"))
    assert job_resources("evaluate", make_run(), make_cluster()) == {}
    with pytest.raises(ConfigError, match=r"refuses '--exclude=rack-J7.*takes '-J' for an option"):
        job_resources("data", make_run(), site(exclude="rack-J7"))


@pytest.mark.parametrize(("setup", "script", "variables", "printed"), [
    (["export A=${HOME:-x}", 'export B="{$A}"'], "$A $B", {"HOME": "/home/ada"}, "/home/ada {/home/ada}"),
    (["module load cuda/12.8"], "$LOADED", {"MODULESHOME": "FOLDER"}, "cuda/12.8"),
])  # fmt: skip
def test_set_up_is_run(tmp_path: Path, setup: list[str], script: str, variables: dict[str, str], printed: str) -> None:
    """They may have braces, and they may load modules where sh drops functions."""
    (tmp_path / "init").mkdir()
    (tmp_path / "init/bash").write_text('module() { export LOADED="$2"; }\n')
    prefix = format_as_snakemake(job_shell_prefix(site(setup=setup)))
    environment = {name: value.replace("FOLDER", str(tmp_path)) for name, value in variables.items()}
    command = ["bash", "-c", f'{prefix}set -euo pipefail; echo "{script}"']
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{printed}\n"
    assert job_shell_prefix(site()) == ""
