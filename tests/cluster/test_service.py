"""A run's service on a node of its own, on the real three-node Slurm: two training nodes, then the service's."""

import time
from typing import Any

import pytest
import yaml

from shardmake.launch.service import ServiceAddress
from shardmake.run.attempt import AttemptDir
from tests.cluster.fault_run import ClusterCheckout
from tests.workflow.service_run import COMMAND, answers, assert_asked_in_every_step, ends, service_settings

pytestmark = [pytest.mark.cluster, pytest.mark.training]


class Training:
    """A training of two nodes and a service node, one rank per node."""

    def __init__(self, checkout: ClusterCheckout, command: str, seconds: float, **service: Any) -> None:
        self.checkout, self.cluster = checkout, checkout.cluster
        checkout.configure_cluster(**service_settings(checkout, command, seconds, **service) | {"nodes": 2})
        file = checkout.root / "config/cluster.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"processes_per_node": 1}))
        for stage in ("plan", "render", "data"):
            self.output = checkout.on_login_node("shardmake", stage, "demo")
            if stage == "plan":
                assert "the job takes 3 nodes" in self.output
        self.log = checkout.root / "driver.log"
        self.driver = self.cluster.popen(
            checkout.command("shardmake", "train", "demo"), cwd=checkout.root, stdout=self.log.open("a")
        )

    def wait_for_answers(self, count: int) -> None:
        """Wait until the service has answered ``count`` times in all."""
        self.cluster.wait_until(lambda: len(answers(self.checkout)) >= count, f"{count} answers", timeout=300)

    def wait(self) -> tuple[int, str]:
        return self.driver.wait(400), self.log.read_text()

    def finish(self, *expected: str) -> None:
        """Wait for the end, whose attempts must have these ends, after a service was asked in every step."""
        status, output = self.wait()
        assert status == 0, output
        assert ends(self.checkout) == [*expected]
        assert_asked_in_every_step(self.checkout)

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.checkout.run / f"train/attempts/{number:03d}")

    def history(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.checkout.read("train/attempts/index.json")
        return found

    def kill(self, pid: object, node: str) -> None:
        self.cluster.run(["kill", "-KILL", str(pid)], node=node)

    def is_running(self, pid: int) -> bool:
        """Return whether the service's node still has the process."""
        return self.cluster.run(["test", "-d", f"/proc/{pid}"], node="c3", check=False).returncode == 0


def test_a_killed_service_on_its_own_node_is_replaced_in_the_next_attempt(checkout: ClusterCheckout) -> None:
    training = Training(checkout, COMMAND, seconds=0.5)
    training.wait_for_answers(3)
    (job,) = checkout.training_jobs()
    assert job.nodes == "3" or job.nodes == "c[1-3]"
    training.kill(answers(checkout)[0]["server"], "c3")
    training.finish("the service ended", "finished")
    first = training.history()[0]
    assert "The service on c3 was ended by SIGKILL before the training." in first["message"] and first["host"] == "c3"
    assert_only_training_nodes_have_ranks(training)
    assert not training.is_running(answers(checkout)[-1]["server"])


def assert_only_training_nodes_have_ranks(training: Training) -> None:
    """Check world size and MASTER_ADDR of the second attempt, and that the service has an address of its own."""
    folder = training.attempt(2)
    reports = [training.checkout.read(f"train/attempts/002/ranks/rank-{rank}.json") for rank in (0, 1)]
    assert [report["host"] for report in reports] == ["c1", "c2"] and len(list(folder.ranks.iterdir())) == 2
    assert {report["world_size"] for report in reports} == {2}
    service = ServiceAddress.read(folder.services / "start-0-node-2.json")
    assert service.host == "c3" and reports[0]["master_addr"] not in (service.address, "127.0.0.1")
    assert {node.node_rank: (node.phase, node.returncode) for node in folder.exits()} == {
        0: ("training", 0),
        1: ("training", 0),
        2: ("service", 0),
    }


@pytest.mark.objectives
def test_a_service_that_never_answers_stops_the_run_before_a_rank_starts(checkout: ClusterCheckout) -> None:
    training = Training(checkout, "echo waiting for a licence; sleep 1000", 0.0, start_seconds=5)
    status, output = training.wait()
    assert status == 2 and "did not answer at /health within 5 s" in output
    assert "Its last output: waiting for a licence" in output and "Correct service.command" in output
    assert ends(checkout) == ["the service did not start"] and not training.attempt(1).ranks.exists()


@pytest.mark.objectives
def test_a_killed_rank_ends_the_service_and_the_next_attempt_starts_both(checkout: ClusterCheckout) -> None:
    training = Training(checkout, COMMAND, seconds=0.5)
    training.wait_for_answers(3)
    beat = training.attempt(1).beat(1)
    assert beat
    training.kill(beat.pid, beat.host)
    training.finish("a process was killed", "finished")
    assert training.attempt(1).exits()[2].returncode == 0, "the service is not blamed"
    assert answers(checkout)[0]["server"] != answers(checkout)[-1]["server"]


@pytest.mark.objectives
def test_a_training_resumes_after_the_worker_of_its_service_was_killed(checkout: ClusterCheckout) -> None:
    """Slurm ends the step, and may kill the other workers before they write their records; srun names the first."""
    training = Training(checkout, COMMAND, seconds=0.5)
    training.wait_for_answers(3)
    server = answers(checkout)[0]["server"]
    worker = training.cluster.run(["ps", "-o", "ppid=", "-p", str(server)], node="c3").stdout.strip()
    shell = training.cluster.run(["ps", "-o", "args=", "-p", worker], node="c3").stdout
    if "/bin/sh" in shell:
        worker = training.cluster.run(["ps", "-o", "ppid=", "-p", worker], node="c3").stdout.strip()
    training.kill(worker, "c3")
    training.finish("a process was killed", "finished")
    killed = "The worker of the service on c3 was killed: Slurm's step reports 'Killed'."
    assert training.history()[0]["message"] == killed


@pytest.mark.objectives
def test_a_requeued_job_starts_a_new_service(checkout: ClusterCheckout) -> None:
    training = Training(checkout, COMMAND, seconds=0.5)
    training.wait_for_answers(3)
    (job,) = checkout.training_jobs()
    training.cluster.run(["scontrol", "update", f"jobid={job.id}", "requeue=1"])
    training.cluster.run(["scontrol", "requeue", job.id])
    training.finish("finished")
    found = sorted(path.name for path in training.attempt(1).services.iterdir())
    assert found == ["start-0-node-2.json", "start-1-node-2.json"]


@pytest.mark.objectives
def test_a_cancelled_job_leaves_no_service(checkout: ClusterCheckout) -> None:
    training = Training(checkout, COMMAND, seconds=0.5)
    training.wait_for_answers(1)
    checkout.on_login_node("shardmake", "cancel", "demo", check=False)
    status, _ = training.wait()
    assert status != 0 and ends(checkout) == ["cancelled by a person"]
    deadline = time.monotonic() + 60
    while training.is_running(answers(checkout)[0]["server"]) and time.monotonic() < deadline:
        time.sleep(1)
    assert not training.is_running(answers(checkout)[0]["server"])
