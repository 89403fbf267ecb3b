"""``snakemake --profile slurm``, literally, on the three-node cluster."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.cluster.fault_run import ClusterCheckout
from tests.cluster.harness import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.training]
SLURM = ("--profile", "slurm")


def test_two_nodes_from_config_to_pushed_model_with_the_head_killed(checkout: ClusterCheckout) -> None:
    checkout.configure_cluster(max_steps=30, checkpoints={"every_steps": 10})
    assert "2 nodes: would start at once" in checkout.on_login_node("snakemake", *SLURM, "plan")
    assert not (checkout.run / "train").exists(), "the plan submits no job"

    head = checkout.cluster.popen(checkout.command("snakemake", *SLURM), cwd=checkout.root)
    checkout.cluster.wait_until(lambda: len(checkout.metrics()) >= 2, "training", timeout=300)
    kill_with_descendants(checkout.cluster, head.pid)
    head.wait()
    assert [job.state for job in checkout.training_jobs()] == ["RUNNING"], "the training job keeps running"

    checkout.on_login_node("snakemake", *SLURM, "--unlock")
    output = checkout.on_login_node("snakemake", *SLURM)
    assert "Adopting job" in output and "demo: evaluation loss " in output
    assert {"cpu", "gpu"} <= {job.partition for job in checkout.cluster.jobs()}, "consolidate and evaluate"
    assert [job.state for job in checkout.training_jobs()] == ["COMPLETED"]
    assert sorted(checkout.losses()) == list(range(1, 31))
    assert_ranks_met(checkout, nodes=2)
    assert_pushed_equals_deepspeeds_own(checkout)
    assert_three_nodes_merge_the_same(checkout)


def kill_with_descendants(cluster: Cluster, pid: int) -> None:
    """SIGKILL the head and its descendants on the login node, as in a crash of that node."""
    import psutil

    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        process.kill()


def assert_ranks_met(checkout: ClusterCheckout, nodes: int) -> None:
    """Check that every rank reports the first node's address, the world size and the planned engine."""
    reports = [json.loads(path.read_text()) for path in (checkout.run / "train/attempts/001/ranks").iterdir()]
    assert sorted(report["rank"] for report in reports) == [str(rank) for rank in range(2 * nodes)]
    first = json.loads((checkout.run / "train/attempts/001/rendezvous/start-0.json").read_text())
    assert {report["master_addr"] for report in reports} == {first["address"]} != {"127.0.0.1"}
    assert first["host"] == "c1" and first["interface"] == "eth0"
    assert {report["master_port"] for report in reports} == {str(first["port"])}
    assert {report["host"] for report in reports} == {f"c{node + 1}" for node in range(nodes)}
    assert {(one["engine"], one["zero_stage"], one["world_size"]) for one in reports} == {("deepspeed", 3, 2 * nodes)}


def assert_pushed_equals_deepspeeds_own(checkout: ClusterCheckout) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    checkpoint = checkout.run / checkout.read("train/receipt.json")["checkpoint"]
    reference = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    pushed = load_file(checkout.root / "published/demo/model.safetensors")
    assert set(pushed) == set(reference) - {"lm_head.weight"}
    assert all(torch.equal(tensor, reference[name]) for name, tensor in pushed.items())


def assert_three_nodes_merge_the_same(checkout: ClusterCheckout) -> None:
    """Merge with one task per node: each writes its part of the files, and the last one validates the model."""
    checkpoint, merged = str(checkout.run / checkout.read("train/receipt.json")["checkpoint"]), checkout.root / "merged"
    options = ("--base", "resources/demo/base", "--max-shard-size", "1MB", "--tasks", "3")
    srun = ("srun", "--nodes", "3", "--ntasks-per-node", "1", "--label")
    merge = checkout.command("shardmake", "consolidate", checkpoint, str(merged), *options)
    done = checkout.cluster.run([*srun, *merge], cwd=checkout.root)
    output = f"{done.stdout}{done.stderr}"
    assert len(list(merged.glob("model-*.safetensors"))) > 3 and (merged / "receipt.json").exists(), output
    pushed = load_file(checkout.root / "published/demo/model.safetensors")
    together = {name: tensor for path in merged.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert set(together) == set(pushed)
    assert all(torch.equal(tensor, pushed[name]) for name, tensor in together.items())


@pytest.mark.parametrize(("change", "words"), [
    ({"slurm": {"partition": "gpus"}}, "there is no partition 'gpus'. Did you mean 'gpu'?"),
    ({"slurm": {"qos": None}}, "Slurm refuses the job of train:"),
    ({"slurm": {"constraint": None}}, "Slurm refuses the job of train:"),
    ({"slurm": {"cpu_qos": None}}, "Slurm refuses the job of data:"), ({"nodes": 4}, "nodes"),
    ({"global_batch_size": 6, "micro_batch_size": "auto"}, "global_batch_size"),
    ({"strategy": "zerro3"}, "'zerro3' is not allowed. Did you mean 'zero3'?"),
    ({"learning_rat": 1e-3}, "there is no such key. Did you mean 'learning_rate'?"),
    ({"model": "resources/demo"}, "It has no config.json"),
    ({"data": {"train": "resources/demo/broken.jsonl"}}, "broken.jsonl, line 3 is not valid JSON"),
])  # fmt: skip
def test_bad_input_is_rejected_without_a_job(checkout: ClusterCheckout, change: dict[str, object], words: str) -> None:
    lines = (checkout.root / "resources/demo/train.jsonl").read_text().splitlines()
    (checkout.root / "resources/demo/broken.jsonl").write_text("\n".join([*lines[:2], lines[2][:-9], *lines[3:9]]))
    checkout.configure_cluster(**change)
    before = {job.id for job in checkout.cluster.jobs()}
    output = checkout.on_login_node("snakemake", *SLURM, check=False)
    assert words in output
    assert "Traceback" not in output
    assert {job.id for job in checkout.cluster.jobs()} <= before and not (checkout.run / "train").exists()


def test_status_and_logs_show_why_a_stage_failed_on_its_node(checkout: ClusterCheckout) -> None:
    rows = (checkout.root / "resources/demo/train.jsonl").read_text().splitlines()
    row = json.loads(rows[200])
    row["messages"][1]["reasoning_content"] = "because"
    (checkout.root / "resources/demo/late.jsonl").write_text("\n".join([*rows[:200], json.dumps(row), *rows[201:]]))
    checkout.configure_cluster(data={"train": "resources/demo/late.jsonl"})
    cause = "late.jsonl, line 201: the chat template does not render the reasoning of message 2"
    assert cause in checkout.on_login_node("snakemake", *SLURM, check=False).strip().splitlines()[-1]
    status = checkout.on_login_node("shardmake", "status", "demo")
    assert any(line.startswith("  failed    data: ") and cause in line for line in status.splitlines())
    logs = checkout.on_login_node("shardmake", "logs", "demo")
    assert "==> .snakemake/slurm_logs/rule_data_run/demo/" in logs
    assert "==> logs/demo/data.log" in logs and cause in logs
