"""Estimated starts of a training, from answers of `sbatch --test-only`."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from shardmake.launch.submission_check import expected_starts, node_counts
from shardmake.run.paths import RunDir
from shardmake.run.plan import CandidateEstimate, MemoryEstimates
from tests.unit.plans import make_cluster, make_plan

SBATCH = """#!/bin/sh
nodes=$(sed -n 's/^#SBATCH --nodes=//p')
echo "$@ $nodes $SLURM_TIME_FORMAT" >> "{folder}/asked"
cat "{folder}/answer-$nodes" >&2
"""
SINFO = """#!/bin/sh
case "$*" in *--partition=gpu) echo ${PARTITION_STATE:-up};; *) echo up;; esac
"""


def estimates(*fitting: int, too_large: int = 1) -> MemoryEstimates:
    """Return estimates in which only candidates on ``fitting`` nodes fit."""
    candidates = [
        CandidateEstimate.model_construct(choice=make_plan("zero3", nodes=nodes).choice, fits=nodes != too_large)
        for nodes in (too_large, *fitting)
    ]
    return MemoryEstimates.model_construct(candidates=candidates)


class Site:
    """A login node whose sbatch prints the answer for the number of nodes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
        for name, text in (("srun", "#!/bin/sh\n"), ("sbatch", SBATCH.format(folder=folder)), ("sinfo", SINFO)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

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
        file = self.folder / "asked"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def test_the_planned_number_of_nodes_comes_first(site: Site) -> None:
    site.start_after(2, minutes=40.1)
    site.start_after(4, hours=20.1)
    site.start_after(8, days=3.1)
    assert site.ask(estimates(2, 4, 8)) == (
        "if submitted now, by Slurm's estimate without the jobs that already wait: "
        "2 nodes: would start in about 40 min; 4 nodes: would start in about 20 h; 8 nodes: would start in about 3 days"
    )
    assert site.asked == [f"--test-only {nodes} standard" for nodes in (2, 4, 8)]
    assert not (site.folder / "docs-chat").exists()


def test_a_start_in_the_past_is_at_once(site: Site) -> None:
    site.start_after(2, seconds=-5)
    assert site.ask(estimates(2)).endswith("2 nodes: would start at once")


@pytest.mark.parametrize(
    "words",
    [
        "",
        "sbatch: Job 7 to start at N/A using 8 processors\n",
        "sbatch: error: Unable to contact slurm controller (connect failure)\n",
    ],
)
def test_without_an_estimate_the_plan_says_so_and_asks_once(site: Site, words: str) -> None:
    site.answer(2, words)
    assert site.ask(estimates(2, 4)).endswith("2 nodes: Slurm does not know when it would start")
    assert len(site.asked) == 1


def test_a_start_that_only_another_number_lacks(site: Site) -> None:
    site.start_after(2, minutes=5.1)
    site.answer(4, "allocation failure: Requested nodes are busy\n")
    assert site.ask(estimates(2, 4)).endswith("in about 5 min; 4 nodes: Slurm does not know when it would start")


def test_a_closed_partition_has_no_estimate(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITION_STATE", "down")
    assert site.ask(estimates(2)) == "Slurm starts no jobs at present: partition gpu is down"
    assert site.asked == []


def test_without_slurm_nothing_is_asked(site: Site) -> None:
    assert site.ask(estimates(2), executor="local") == ""
    assert site.asked == []


@pytest.mark.parametrize(
    ("fitting", "expected"),
    [((4,), [4]), ((2, 4), [4, 2]), ((4, 5, 6, 8), [4, 5, 8]), ((2, 3, 4, 6, 8, 16), [4, 2, 6, 16])],
)
def test_other_numbers_are_few_and_fit(fitting: tuple[int, ...], expected: list[int]) -> None:
    assert list(node_counts(4, estimates(*fitting))) == expected
