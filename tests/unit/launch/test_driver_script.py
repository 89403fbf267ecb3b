"""The batch script of a driver job, and what it must not inherit or do on a login node."""

import sys
from pathlib import Path

import pytest

from shardmake.core.errors import ConfigError
from shardmake.launch.driver_script import batch_script, lead_seconds, leave_job, refuse_login_node
from shardmake.run.driver_job import DriverDir
from tests.unit.launch.test_stage_jobs import site
from tests.unit.wording import Wording


def test_the_script_has_what_the_site_requires_of_a_job_without_a_gpu(tmp_path: Path, wording: Wording) -> None:
    folder = DriverDir(tmp_path / "my runs/.driver/001")
    cluster = site(cpu_partition="cpu", cpu_qos="short", setup=["module load python"], driver_memory_gib=2.5)
    wording(batch_script(cluster, "driver-0a1b", folder).replace(sys.executable, "PYTHON"))


def test_a_short_limit_leaves_three_quarters_of_it() -> None:
    assert lead_seconds(site(driver_time_limit="00:02:00").slurm) == 30
    assert lead_seconds(site(driver_time_limit="08:00:00").slurm) == 600


def test_a_job_from_a_job_inherits_nothing_of_it() -> None:
    """These variables change the defaults of sbatch and srun, and make Snakemake's executor pause."""
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "lab", "HOME": "/home/ada", "PATH": "/bin"}
    of_job = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_MEM_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_EXPORT_ENV")
    environment = kept | dict.fromkeys((*of_job, "SLURMD_NODENAME", "SBATCH_MEM_BIND", "CUDA_VISIBLE_DEVICES"), "1")
    leave_job(environment)
    assert environment == kept


def test_a_login_node_of_such_a_site_waits_for_no_job() -> None:
    """Short stages are allowed, and everything where the site allows it."""
    refuse_login_node(site(driver="job"), {"fetch_run", "plan_run", "render_run", "push_run", "report_run"})
    refuse_login_node(site(), {"train_run"})
    with pytest.raises(ConfigError, match=r"jobs of data, train\. .*Run `shardmake submit` with the same arguments"):
        refuse_login_node(site(driver="job"), {"plan_run", "train_run", "data_run"})
