"""The libraries' own parsers: what they accept, what they refuse, what they drop without a word."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardmake.config import Cluster, Data, Run, Strategy
from shardmake.errors import UserError
from shardmake.plan.check import Files, check_rendered
from shardmake.plan.plan import Choice, Plan, Resources, Workload
from shardmake.plan.render import (
    IGNORED_IN_ACCELERATE_FILE,
    accelerate_config,
    deepspeed_config,
    launch_flags,
    training_config,
)

CLUSTER = Cluster(executor="local", processes_per_node=2, cpus_per_node=4, memory_gib_per_node=8.0)
RUN = Run(
    model="base",
    data=Data(train="train.jsonl"),
    sequence_length=32,
    global_batch_size=16,
    max_steps=10,
    learning_rate=1e-3,
)


def make_plan(strategy: Strategy) -> Plan:
    choice = Choice(
        strategy=strategy,
        gradient_checkpointing=False,
        micro_batch_size=2,
        gradient_accumulation_steps=2,
        nodes=2,
        processes_per_node=2,
        precision="bf16",
    )
    workload = Workload(
        model="base",
        sequence_length=32,
        packing=True,
        method="full",
        optimizer="adamw",
        attention="sdpa",
        loss="plain",
    )
    resources = {"train": Resources(memory_gib=8, cpus=4)}
    return Plan(run="r", choice=choice, workload=workload, reason="test", rejected={}, ladder=[], resources=resources)


def render_files(strategy: Strategy) -> Files:
    plan = make_plan(strategy)
    return Files(
        accelerate=accelerate_config(plan, CLUSTER, Path("deepspeed.json")),
        deepspeed=deepspeed_config(plan, RUN, CLUSTER),
        training=training_config(plan, RUN, CLUSTER),
    )


def check(strategy: Strategy, files: Files) -> None:
    plan = make_plan(strategy)
    check_rendered(files, plan.choice, launch_flags(plan, machine_rank=1, address="localhost", port=1), "/tmp")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_rendered_files_are_understood(strategy: Strategy) -> None:
    check(strategy, render_files(strategy))


def test_every_parser_complains_about_its_own_file() -> None:
    files = render_files("zero2")
    broken = replace(
        files,
        accelerate=files.accelerate | {"num_processes": 3, "same_network": False},
        deepspeed=files.deepspeed | {"gradient_accumulation_steps": 3},
        training={**files.training, "arguments": files.training["arguments"] | {"bf16": False}},
    )
    with pytest.raises(UserError) as refusal:
        check("zero2", broken)
    message = str(refusal.value)
    assert "accelerate.yaml: processes per node is understood as 1; planned is 2" in message
    assert "accelerate.yaml: same_network is understood as True; planned is False" in message
    assert "deepspeed.json: train_batch_size is understood as 24; planned is 16" in message
    assert "ds gradient_accumulation_steps=3 vs hf gradient_accumulation_steps=2" in message
    assert "ds bf16.enabled=True vs hf bf16|bf16_full_eval=False" in message


def test_misspelt_keys_are_refused() -> None:
    files = render_files("zero3")
    zero = files.deepspeed["zero_optimization"] | {"stage3_prefetch_bucket": 1}
    broken = replace(
        files,
        accelerate=files.accelerate | {"num_machine": 2},
        deepspeed=files.deepspeed | {"zero_optimization": zero},
        training={**files.training, "arguments": files.training["arguments"] | {"learnig_rate": 1.0}},
    )
    with pytest.raises(UserError, match=r"(?s)num_machine.*stage3_prefetch_bucket.*learnig_rate"):
        check("zero3", broken)


def test_ignored_keys_are_those_of_the_installed_accelerate(tmp_path: Path) -> None:
    """Written into the file with another value than their default, they do not reach the launch arguments."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    values = {"rdzv_backend": "c10d", "same_network": True, "enable_cpu_affinity": True, "downcast_bf16": True}
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(render_files("ddp").accelerate | values))
    launched, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(path), "x.py"]))
    assert {key for key, value in values.items() if getattr(launched, key) != value} == set(IGNORED_IN_ACCELERATE_FILE)
