"""Answers of Slurm to `sbatch --test-only`: refusals, and the starts that it estimates."""

import contextlib
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from shardmake.core.errors import ConfigError
from shardmake.launch.slurm_request import memory_in_place_of_the_plans
from shardmake.launch.stage_jobs import ON_GPUS
from shardmake.launch.submission_check import _check_memory, _check_step, check_submission, expected_starts, node_counts
from shardmake.run.paths import RunDir
from shardmake.run.plan import CandidateEstimate, MemoryEstimates, Resources
from tests.programs import install_programs
from tests.unit.plans import make_cluster, make_plan, make_run
from tests.unit.wording import Wording

START = "sbatch: Job 12 to start at 2026-11-24T08:00:00 using 8 processors on nodes c[1-2] in partition gpu"
SBATCH = """
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
        self.monkeypatch = monkeypatch

    def check(self, words: str = "", refused: str = "nothing", executor: str = "slurm", missing: bool = False) -> None:
        sbatch = SBATCH.format(folder=self.folder, refused=refused, start=START, words=words)
        programs = {"srun": ""} if missing else {"srun": "", "sbatch": sbatch}
        install_programs(self.folder, self.monkeypatch, programs, path=str(self.folder) if missing else "/usr/bin:/bin")
        cluster = make_cluster(executor=executor, slurm={"qos": "long"} if executor == "slurm" else {})
        resources = dict.fromkeys(("train", *ON_GPUS), Resources(memory_gib=3, cpus=2))
        plan = make_plan("zero3").model_copy(update={"resources": resources})
        check_submission(plan, make_run(), cluster, RunDir(self.folder / "docs-chat"))


Log = pytest.LogCaptureFixture


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def test_each_job_is_judged_with_its_own_parameters(site: Site, caplog: Log) -> None:
    caplog.set_level("INFO")
    site.check()
    asked = (site.folder / "asked").read_text().splitlines()
    assert asked[0] == "--test-only" and len(asked) == 1 + len(ON_GPUS)
    assert all("--test-only" in line and "--qos=long" in line for line in asked[1:])
    script = (site.folder / "scripts").read_text()
    assert "#SBATCH --nodes=2" in script and "#SBATCH --qos=long" in script and "shardmake.launch.slurm_task" in script
    assert "accept the job of train: Job 12 to start at 2026-11-24" in caplog.text, "a busy cluster refuses nothing"
    assert not (site.folder / "docs-chat").exists()


@pytest.mark.parametrize(("given", "is_refused"), [
    (64, True), ("64", True), ("2G", True), ("3gb", False), (3072, False), ("1T", False), (0, False), ("x", False),
])  # fmt: skip
def test_memory_in_extra_that_does_not_suffice_is_refused(given: Any, is_refused: bool) -> None:
    plan = make_plan("zero3").model_copy(
        update={"host_memory": 3 << 30, "resources": {"train": Resources(memory_gib=4, cpus=2)}}
    )
    words = "to sbatch, and the training needs 3.0 GiB on a node. Remove the key, or write at least 4G with its unit"
    with pytest.raises(ConfigError, match=words) if is_refused else contextlib.nullcontext():
        _check_memory(
            memory_in_place_of_the_plans(make_cluster(executor="slurm", slurm={"extra": {"mem": given}})), plan
        )


@pytest.mark.parametrize("refused", ["all", *ON_GPUS])
def test_a_refusal_has_the_words_of_slurm(site: Site, refused: str) -> None:
    stage = "train" if refused == "all" else refused
    words = "sbatch: error: lua: no project\nsbatch: error: allocation failure: Invalid qos specification"
    with pytest.raises(ConfigError, match=f"job of {stage}: lua: no project; allocation failure: Invalid qos spec"):
        site.check(words, refused)


@pytest.mark.parametrize(("words", "logged"), [
    ("sbatch: error: allocation failure: Unable to contact slurm controller (connect failure)", "did not say"),
    ("sbatch: error: allocation failure: Socket timed out on send/recv operation", "did not say"),
    *((f"sbatch: error: {limit}\nallocation failure: Job violates accounting/QOS policy", "did not say")
      for limit in ("QOSMaxSubmitJobPerUserLimit", "AssocGrpSubmitJobsLimit")),
    ("allocation failure: Required node not available (down, drained or reserved)", "wait"),
    ("allocation failure: Required partition not available (inactive or drain)", "wait"),
    ("allocation failure: Requested nodes are busy", "wait"),
    ("allocation failure: Requested reservation not usable now", "wait"),
])  # fmt: skip
def test_answers_that_only_warn(site: Site, caplog: Log, words: str, logged: str) -> None:
    site.check(words, "all")
    assert logged in caplog.text and words.removeprefix("sbatch: error: ").replace("\n", "; ") in caplog.text


@pytest.mark.parametrize(("words", "verdict"), [
    ("srun: unrecognized option '--nosuch'\nTry \"srun --help\" for more information", "unrecognized option '--nosuch'; Try"),
    ("srun: error: unrecognized --cpu-bind argument\nsrun: fatal: Failed to parse.", "argument; Failed to parse. Corr"),
    ("srun: error: mpi/pmix_v4: init: can not load PMIx library", None), ("not on login nodes, please", None),
    ("srun: error: Socket timed out on send/recv operation", None), ("srun: error: name a project", None),
    ("srun: error: lua: no account\nallocation failure: Invalid account", ""),
    ("allocation failure: Unable to contact slurm controller (connect failure)", ""),
])  # fmt: skip
def test_srun_reads_the_options_of_the_step(site: Site, caplog: Log, words: str, verdict: str | None) -> None:
    """A refusal, a warning (None), or nothing to say."""
    said = site.folder / "said"
    said.write_text(words)
    srun = f'[ "$*" = "--test-only --mpi pmix true" ] && cat {said} >&2 || grep project {said} >&2; exit 1'
    install_programs(site.folder, site.monkeypatch, {"srun": srun})
    with pytest.raises(ConfigError, match=verdict) if verdict else contextlib.nullcontext():
        _check_step(["--mpi", "pmix"])
    assert ("srun did not say" in caplog.text) == (verdict is None)


def test_without_sbatch_the_plan_continues_and_without_slurm_nothing_is_asked(site: Site, caplog: Log) -> None:
    site.check(missing=True)
    assert "did not say whether it would accept the job of evaluate" in caplog.text
    site.check("refused", "all", executor="local")
    assert not (site.folder / "asked").exists()


STARTS = """
nodes=$(sed -n 's/^#SBATCH --nodes=//p')
echo "$@ $nodes" >> "{folder}/asked"
cat "{folder}/answer-$nodes" >&2
"""
SINFO = 'case "$*" in *--partition=gpu) echo ${PARTITION_STATE:-up};; *) echo up;; esac'


def estimates(*fitting: int, too_large: int = 1) -> MemoryEstimates:
    """Return estimates in which only candidates on ``fitting`` nodes fit."""
    candidates = [
        CandidateEstimate.model_construct(choice=make_plan("zero3", nodes=nodes).choice, fits=nodes != too_large)
        for nodes in (too_large, *fitting)
    ]
    return MemoryEstimates.model_construct(candidates=candidates)


class Queue:
    """A login node whose sbatch prints the answer for the number of nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answer(self, nodes: int, text: str) -> None:
        (self.folder / f"answer-{nodes}").write_text(text)

    def start_after(self, nodes: int, **after: float) -> None:
        start = f"{datetime.now() + timedelta(**after):%Y-%m-%dT%H:%M:%S}"
        self.answer(nodes, f"sbatch: Job 7 to start at {start} using 8 processors on nodes c[1-2] in partition gpu\n")

    def ask(self, memory: MemoryEstimates, executor: str = "slurm") -> str:
        rundir, slurm = RunDir(self.folder / "docs-chat"), {"partition": "gpu"} if executor == "slurm" else {}
        return expected_starts(make_plan("zero3"), memory, make_cluster(executor=executor, slurm=slurm), rundir)

    @property
    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().splitlines()


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    (tmp_path / "asked").touch()
    install_programs(tmp_path, monkeypatch, {"srun": "", "sbatch": STARTS.format(folder=tmp_path), "sinfo": SINFO})
    return Queue(tmp_path)


def test_the_planned_number_of_nodes_comes_first(queue: Queue, wording: Wording) -> None:
    for nodes, after in ((2, {"minutes": 40.1}), (4, {"hours": 20.1}), (8, {"days": 3.1})):
        queue.start_after(nodes, **after)
    wording(queue.ask(estimates(2, 4, 8)))
    assert queue.asked == [f"--test-only {nodes}" for nodes in (2, 4, 8)]
    assert not (queue.folder / "docs-chat").exists()


@pytest.mark.parametrize("words", [
    "", "sbatch: Job 7 to start at N/A using 8 processors\n",
    "sbatch: error: Unable to contact slurm controller (connect failure)\n",
])  # fmt: skip
def test_without_an_estimate_the_plan_says_so_and_asks_once(queue: Queue, words: str) -> None:
    queue.answer(2, words)
    assert queue.ask(estimates(2, 4)).endswith("2 nodes: Slurm does not know when it would start")
    assert len(queue.asked) == 1


def test_a_start_that_only_another_number_lacks_and_one_in_the_past(queue: Queue) -> None:
    queue.start_after(2, minutes=5.1)
    queue.answer(4, "allocation failure: Requested nodes are busy\n")
    assert queue.ask(estimates(2, 4)).endswith("in about 5 min; 4 nodes: Slurm does not know when it would start")
    queue.start_after(2, seconds=-5)
    assert queue.ask(estimates(2)).endswith("2 nodes: would start at once")


def test_a_closed_partition_and_no_slurm_have_no_estimate(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    assert queue.ask(estimates(2), executor="local") == ""
    monkeypatch.setenv("PARTITION_STATE", "down")
    assert queue.ask(estimates(2)) == "Slurm starts no jobs at present: partition gpu is down"
    assert queue.asked == []


@pytest.mark.parametrize(("fitting", "expected"), [
    ((4,), [4]), ((2, 4), [4, 2]), ((4, 5, 6, 8), [4, 5, 8]), ((2, 3, 4, 6, 8, 16), [4, 2, 6, 16]),
])  # fmt: skip
def test_other_numbers_are_few_and_fit(fitting: tuple[int, ...], expected: list[int]) -> None:
    assert list(node_counts(4, estimates(*fitting))) == expected
