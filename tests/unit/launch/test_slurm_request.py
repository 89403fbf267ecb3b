"""One request in three dialects, and the table of options as the only place that spells them."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError, create_model

import shardmake
from shardmake.config.models import Cluster, Slurm
from shardmake.config.slurm_options import SLURM_OPTIONS, JobKind, SlurmOption
from shardmake.doctor.cluster_file import draft_cluster
from shardmake.doctor.job import job_request, make_request
from shardmake.launch.driver_script import batch_script
from shardmake.launch.slurm_jobs import SlurmJobs
from shardmake.launch.slurm_request import SlurmRequest, prepare_submission
from shardmake.launch.stage_jobs import ON_GPUS, sbatch_command
from shardmake.plan.limits import parse_partitions
from shardmake.run.attempt import AttemptDir
from shardmake.run.driver_job import DriverDir
from shardmake.run.plan import Resources
from tests.unit.doctor.recorded import SINFO
from tests.unit.plans import make_cluster, make_plan, make_run

PACKAGE = Path(shardmake.__file__).parent


def site(accelerator: str = "a100-80gb", **slurm: Any) -> Cluster:
    return make_cluster(executor="slurm", accelerator=accelerator, slurm=slurm)


def test_a_new_option_is_a_row_and_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the text of every job, and in a cluster that the doctor drafts; `slurm.extra` refuses it."""
    monkeypatch.setitem(SLURM_OPTIONS, "bb-x", SlurmOption("bb-x", key="bb_x"))  # type: ignore[arg-type]
    model = create_model("WithBbX", __base__=Slurm, bb_x=(str | None, None))
    slurm: Any = model(bb_x="course")
    cluster = site().model_copy(update={"slurm": slurm})
    texts = {
        "train": SlurmJobs(tmp_path, cluster).script(AttemptDir(tmp_path / "1"), make_plan("zero3"), []),
        "driver": batch_script(cluster, "driver-1", DriverDir(tmp_path)),
        **{stage: sbatch_command(stage, make_run(), cluster, Resources(memory_gib=3, cpus=2)) for stage in ON_GPUS},
    }
    assert [job for job, text in texts.items() if "--bb-x=course" not in text] == []
    doctor = job_request(make_request(cluster, 1, build_kernels=False), "doctor").submitit()
    assert doctor["additional_parameters"]["bb-x"] == "course"
    with pytest.raises(ValidationError, match=r"is set by the key slurm\.bb_x"):
        model(extra={"--bb_x": "course"})


OF_EVERY_JOB = re.findall(r"\w+", """
ACCTG_FREQ BATCH CORE_SPEC DELAY_BOOT DISTRIBUTION GPU_BIND GPU_FREQ GRES_FLAGS HINT IGNORE_PBS MEM_BIND NETWORK NO_KILL
POWER PROFILE REQ_SWITCH SPREAD_JOB THREAD_SPEC THREADS_PER_CORE WAIT4SWITCH WAIT_ALL_NODES
""")  # fmt: skip
COUNTING = ["ACCOUNT", "CONSTRAINT", "EXCLUSIVE", "PARTITION", "QOS", "RESERVATION", "WCKEY"]
IF_LEFT_OPEN = ["GRES", "MEM_PER_NODE"]
NEVER = re.findall(r"\w+", """
ARRAY_INX CLUSTERS CONTAINER CPUS_PER_GPU DEBUG ERROR EXPORT GET_USER_ENV GPUS GPUS_PER_NODE GPUS_PER_TASK INPUT JOB_NAME
MEM_PER_CPU MEM_PER_GPU NO_REQUEUE OPEN_MODE OUTPUT OVERCOMMIT REQUEUE SIGNAL TIMELIMIT USE_MIN_NODES WAIT
""")  # fmt: skip
OF_A_STEP = [
    "SLURM_TIMELIMIT",
    "SLURM_TRES_PER_TASK",
    "SLURM_GRES",
    "SLURM_NTASKS",
    "SLURM_STDOUTMODE",
    "SRUN_EXPORT_ENV",
]
KEPT = ["SLURM_ACCOUNT", "SLURM_CLUSTERS", "SLURM_CONF", "SLURM_CPU_BIND", "SLURM_MPI_TYPE", "SLURM_VERSION", "PATH"]


@pytest.mark.parametrize(("slurm", "counting"), [
    ({}, COUNTING), ({"gpu_request": "none", "memory": "none"}, [*COUNTING, *IF_LEFT_OPEN]),
    ({"account": "a", "constraint": "a", "partition": "a", "qos": "a", "wckey": "a",
      "extra": {"reservation": "a", "exclusive": False}}, []),
])  # fmt: skip
def test_no_variable_of_sbatch_or_srun_replaces_what_the_cluster_file_or_the_plan_decides(
    slurm: dict[str, Any], counting: list[str]
) -> None:
    """sbatch(1) and srun(1) list these variables. sbatch prefers its own to the lines of a script."""
    of_lists = ["SQUEUE_STATES", "SCANCEL_INTERACTIVE", "SLURM_TIME_FORMAT"]
    of_sbatch = [f"SBATCH_{name}" for name in (*OF_EVERY_JOB, *COUNTING, *IF_LEFT_OPEN, *NEVER)]
    environment = dict.fromkeys([*of_sbatch, *OF_A_STEP, *of_lists, *KEPT], "x")
    prepare_submission(site(**slurm), environment)
    left = [*KEPT, *(f"SBATCH_{name}" for name in OF_EVERY_JOB), *(f"SHARDMAKE_SBATCH_{name}" for name in counting)]
    assert environment == dict.fromkeys(left, "x")
    prepare_submission(site(**slurm), environment)
    assert environment.keys() == {*left}, "a process that another one started"
    environment = {"SBATCH_NETWORK": "x"}
    prepare_submission(site(extra={"network": "y"}), environment)
    assert environment == {}


def test_a_variable_of_sbatch_gives_an_option_to_the_jobs_that_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constraint of the trainings' nodes would let Slurm refuse jobs in another partition."""
    given = {"SBATCH_EXCLUSIVE": "", **dict.fromkeys(("SBATCH_CONSTRAINT", "SBATCH_RESERVATION", "SBATCH_QOS"), "x")}
    monkeypatch.setattr(os, "environ", os.environ.copy() | given)
    cluster = site(cpu_partition="cpu")
    texts = {
        "train": SlurmJobs(tmp_path, cluster).script(AttemptDir(tmp_path / "1"), make_plan("zero3"), []),
        "driver": batch_script(cluster, "driver-1", DriverDir(tmp_path)),
        **{stage: sbatch_command(stage, make_run(), cluster, Resources(memory_gib=3, cpus=2)) for stage in ON_GPUS},
    }
    options = {
        "constraint": r"(--constraint=|-C )x",
        "exclusive": r"--exclusive(\s|$)",
        "reservation": "--reservation=x",
    }
    found = {job: {name for name, form in options.items() if re.search(form, text)} for job, text in texts.items()}
    assert {job for job in found if found[job] == options.keys()} == {"train", "evaluate"}
    assert {job for job in found if not found[job]} == {"driver", "data", "consolidate"}
    assert [job for job, text in texts.items() if "--qos=x" not in text] == []


def test_every_job_has_the_account_of_the_environment_if_the_file_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snakemake's executor would guess one, and give it to sbatch in place of the variable."""
    monkeypatch.setattr(os, "environ", os.environ.copy() | {"SBATCH_ACCOUNT": "lab"})
    script = SlurmJobs(tmp_path, site()).script(AttemptDir(tmp_path / "1"), make_plan("zero3"), [])
    assert "#SBATCH --account=lab" in script
    for stage in ON_GPUS:
        assert " -A lab " in sbatch_command(stage, make_run(), site(), Resources(memory_gib=3, cpus=2))
    assert SlurmRequest(site(account="own"), JobKind.TRAINING, 1).submitit()["account"] == "own"


def test_a_job_that_is_submitted_in_a_job_does_not_inherit_its_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun refuses SLURM_MEM_PER_CPU of the outer job beside SLURM_MEM_PER_NODE of its own."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "4096")
    SlurmJobs(tmp_path, site()).script(AttemptDir(tmp_path / "1"), make_plan("zero3"), [])
    assert "SLURM_MEM_PER_CPU" not in os.environ and "SLURM_JOB_ID" not in os.environ


def test_the_doctor_drafts_a_cluster_with_every_key_that_it_is_given() -> None:
    options = Slurm(partition="gpu", account="lab", wckey="key", exclude="c[7-9]")
    drafted = draft_cluster(options, parse_partitions(SINFO)).slurm
    assert drafted.model_copy(update={"time_limit": options.time_limit, "gpu_type": None}) == options


def test_each_option_of_a_job_is_needed_or_can_be_left_out(tmp_path: Path) -> None:
    """The table in docs/reference/sites.md says which."""

    def flags(**slurm: Any) -> set[str]:
        script = SlurmJobs(tmp_path, site(**slurm)).script(AttemptDir(tmp_path / "1"), make_plan("zero3"), [])
        driver = batch_script(site(**slurm), "driver-1", DriverDir(tmp_path))
        return set(re.findall(r"^#SBATCH '?--([a-z-]+)", script + driver, re.MULTILINE))

    page = (PACKAGE.parents[1] / "docs/reference/sites.md").read_text().partition("## Options that each job has")[2]
    rows = re.findall(r"^\| (`--.*?) \| (.*) \|$", page.partition("##")[0], re.MULTILINE)
    needed = {flag: how.startswith("needed") for names, how in rows for flag in re.findall(r"--([a-z-]+)", names)}
    assert flags() <= needed.keys()
    assert flags(memory="none", gpu_request="none") == flags() - {"mem", "gres"}
    for flag in flags() - {"mem", "gres"}:
        with contextlib.suppress(ValidationError):
            assert (flag in flags(extra={flag: False})) == needed[flag], flag


@pytest.mark.parametrize(("kind", "left_out"), [
    (JobKind.TRAINING, set()), (JobKind.EVALUATE, {"mem", "nodelist"}),
    (JobKind.CPU_STAGE, {"mem", "nodelist", "exclusive", "reservation"}),
    (JobKind.DRIVER, {"mem", "nodelist", "exclusive", "reservation", "no-requeue", "begin"}),
])  # fmt: skip
def test_options_of_extra_hold_for_some_jobs(kind: JobKind, left_out: set[str]) -> None:
    names = ("mem", "nodelist", "exclusive", "reservation", "no-requeue", "begin", "mail-type")
    cluster = site(cpu_partition="cpu", extra=dict.fromkeys(names, "x"))
    lines = SlurmRequest(cluster, kind, 60).sbatch()
    assert {name for name in names if f"#SBATCH --{name}=x" not in lines} == left_out


@pytest.mark.parametrize(("form", "training", "stage", "driver"), [
    ("per_node", "--mem=9GB", "--mem 3072", "--mem=4096M"),
    ("per_cpu", "--mem-per-cpu=2304M", "--mem-per-cpu 1536", "--mem-per-cpu=4096M"), ("none", None, None, None),
])  # fmt: skip
def test_memory_request(tmp_path: Path, form: str, training: str | None, stage: str | None, driver: str | None) -> None:
    cluster, resources = site(memory=form), Resources(memory_gib=3, cpus=2)
    given = SlurmRequest(cluster, JobKind.TRAINING, 60, cpus=4, memory_mib=9216).submitit()
    options = {name: given[name] for name in ("mem", "mem_per_cpu") if name in given}
    assert [f"--{name.replace('_', '-')}={value}" for name, value in options.items()] == [training] * bool(training)
    submitted = sbatch_command("data", make_run(), cluster, resources)
    script = batch_script(cluster, "driver-1", DriverDir(tmp_path))
    for words, text in ((stage, submitted), (driver, script)):
        assert words in text if words else "--mem" not in text


def test_slurm_keeps_a_training_with_spare_nodes_when_a_node_fails() -> None:
    cluster = site(spare_nodes=1, restart_in_place=True)
    given = SlurmRequest(cluster, JobKind.TRAINING, 60).submitit()
    assert given["additional_parameters"]["no-kill"] is True and "--no-kill" in given["srun_args"]
    assert "no-kill" not in str(SlurmRequest(cluster, JobKind.EVALUATE, 60).submitit())


NO_REQUEUE = {"requeue": False, "exclusive": False, "mail_type": "END"}


@pytest.mark.parametrize(("cluster", "options"), [
    (site(gpu_type="a100"), {"gres": "gpu:a100:4"}), (site(gpu_request="gpus-per-node"), {"gpus-per-node": "4"}),
    (site(gpu_request="gpus", gpu_type="a-b"), {"gpus": "a-b:8", "gpus-per-node": "a-b:4"}), (site("cpu"), {}),
    (site(extra=NO_REQUEUE), {"gres": "gpu:4", "mail-type": "END"}),
    (site(extra={"gres": "localtmp:1024"}), {"gres": "gpu:4,localtmp:1024"}),
])  # fmt: skip
def test_the_training_requests_as_many_gpus_on_each_node(cluster: Cluster, options: dict[str, str]) -> None:
    """Options of ``slurm.extra`` stand beside those of the plan."""
    request = SlurmRequest(cluster, JobKind.TRAINING, 60, nodes=2, gpus=4)
    assert request.submitit()["additional_parameters"] == {"no-requeue": True} | options


ELSEWHERE = {
    ("config/models.py", "gpus-per-node"), ("config/models.py", "gres"), ("doctor/cluster_file.py", "gres"),  # gpu_request
    ("core/environment.py", "exclude"),  # an option of git
    ("launch/stage_jobs.py", "account"), ("doctor/login.py", "account"),  # of the executor's command, and of a shell
}  # fmt: skip
COMMON_WORDS = {"comment", "gpus", "nodes", "partition", "qos", "time"}


def test_only_the_table_and_the_request_spell_the_options() -> None:
    rows = [row for row in SLURM_OPTIONS.values() if row.key or row.submitit or row.snakemake]
    names = {name for row in rows for name in (row.flag, row.submitit, row.snakemake) if name} - COMMON_WORDS
    files = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    for place in ("config/slurm_options.py", "launch/slurm_request.py", "demo/requests.py"):  # the last is a data set
        del files[place]
    found = {(file, word) for file, text in files.items() for word in re.findall(r'"(?:--)?([a-z_-]+)[="]', text)}
    assert {(file, word) for file, word in found if word in names} == ELSEWHERE
