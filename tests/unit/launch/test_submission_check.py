"""Answers of Slurm to `sbatch --test-only`, and their effect on the plan."""

from pathlib import Path

import pytest

from shardmake.core.errors import ConfigError
from shardmake.launch.stage_jobs import ON_GPUS
from shardmake.launch.submission_check import check_submission
from shardmake.run.paths import RunDir
from shardmake.run.plan import Resources
from tests.unit.plans import make_cluster, make_plan, make_run

START = "sbatch: Job 12 to start at 2026-11-24T08:00:00 using 8 processors on nodes c[1-2] in partition gpu"
SBATCH = """#!/bin/sh
echo "$@" >> "{folder}/asked"
case "$*" in *--wrap*) ;; *) cat >> "{folder}/scripts";; esac
[ "{refused}" = all ] || case "$*" in *"--comment {refused}"*) ;; *) echo "{start}" >&2; exit 0;; esac
printf '%s\\n' "{words}" >&2
exit 1
"""


class Site:
    """A login node with a stand-in of sbatch that refuses the job of one stage, or all."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = tmp_path
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        (tmp_path / "srun").write_text("#!/bin/sh\n")
        (tmp_path / "srun").chmod(0o755)

    def check(self, words: str = "", refused: str = "nothing", executor: str = "slurm") -> None:
        (self.folder / "sbatch").write_text(
            SBATCH.format(folder=self.folder, refused=refused, start=START, words=words)
        )
        (self.folder / "sbatch").chmod(0o755)
        cluster = make_cluster(executor=executor, slurm={"qos": "long"} if executor == "slurm" else {})
        resources = dict.fromkeys(("train", *ON_GPUS), Resources(memory_gib=3, cpus=2))
        plan = make_plan("zero3").model_copy(update={"resources": resources})
        check_submission(plan, make_run(), cluster, RunDir(self.folder / "docs-chat"))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def test_each_job_is_judged_with_its_own_parameters(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    site.check()
    asked = (site.folder / "asked").read_text().splitlines()
    assert asked[0] == "--test-only" and len(asked) == 1 + len(ON_GPUS)
    assert all("--test-only" in line and "--qos=long" in line for line in asked[1:])
    script = (site.folder / "scripts").read_text()
    assert "#SBATCH --nodes=2" in script and "#SBATCH --qos=long" in script and "shardmake.launch.slurm_task" in script
    assert "accept the job of train: Job 12 to start at 2026-11-24" in caplog.text, "a busy cluster refuses nothing"
    assert not (site.folder / "docs-chat").exists()


@pytest.mark.parametrize("refused", ["all", *ON_GPUS])
def test_a_refusal_has_the_words_of_slurm(site: Site, refused: str) -> None:
    stage = "train" if refused == "all" else refused
    words = "sbatch: error: lua: no project\nsbatch: error: allocation failure: Invalid qos specification"
    with pytest.raises(ConfigError, match=f"job of {stage}: lua: no project; allocation failure: Invalid qos spec"):
        site.check(words, refused)


@pytest.mark.parametrize(
    ("words", "logged"),
    [
        ("sbatch: error: allocation failure: Unable to contact slurm controller (connect failure)", "did not say"),
        ("sbatch: error: allocation failure: Socket timed out on send/recv operation", "did not say"),
        ("allocation failure: Required node not available (down, drained or reserved)", "wait"),
        ("allocation failure: Required partition not available (inactive or drain)", "wait"),
        ("allocation failure: Requested nodes are busy", "wait"),
        ("allocation failure: Requested reservation not usable now", "wait"),
    ],
)
def test_no_answer_and_a_closed_partition_are_warnings(
    site: Site, caplog: pytest.LogCaptureFixture, words: str, logged: str
) -> None:
    site.check(words, "all")
    assert logged in caplog.text and words.removeprefix("sbatch: error: ") in caplog.text


def test_without_sbatch_the_plan_continues_and_says_so(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site.check()
    (site.folder / "sbatch").chmod(0o644)
    monkeypatch.setenv("PATH", str(site.folder))
    cluster, plan = make_cluster(executor="slurm"), make_plan("zero3")
    plan = plan.model_copy(update={"resources": dict.fromkeys(("train", *ON_GPUS), Resources(memory_gib=3, cpus=2))})
    check_submission(plan, make_run(), cluster, RunDir(site.folder / "docs-chat"))
    assert "did not say whether it would accept the job of evaluate" in caplog.text


def test_without_slurm_nothing_is_asked(site: Site) -> None:
    site.check("refused", "all", executor="local")
    assert not (site.folder / "asked").exists()
