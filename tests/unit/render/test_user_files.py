"""A user's own DeepSpeed or Accelerate file under a plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardmake.config.models import Strategy
from shardmake.core.errors import ShardmakeError
from shardmake.render.check import Files, Rendering, check_rendered
from shardmake.render.stage import launch_flags, render_files
from shardmake.render.user_files import merge_own_files
from tests.unit.plans import make_cluster, make_model, make_plan, make_run

ZERO2 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000_000, "round_robin_gradients": True},
    "communication_data_type": "fp32",
}
QUESTIONNAIRE = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "FSDP",
    "downcast_bf16": "no",
    "fsdp_config": {"fsdp_version": 2, "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_min_num_params": 7},
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 2,
    "num_processes": 4,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}


def merge(strategy: Strategy, **settings: str) -> tuple[Files, list[str]]:
    plan, run = make_plan(strategy), make_run(**settings)
    files = render_files(plan, run, make_cluster(), make_model(), Path("plan"))
    return merge_own_files(files, run, plan.choice)


def written(tmp_path: Path, name: str, values: Any) -> str:
    path = tmp_path / name
    path.write_text(json.dumps(values) if name.endswith("json") else yaml.safe_dump(values))
    return str(path)


def test_what_the_plan_leaves_open_is_taken_over_and_reported(tmp_path: Path) -> None:
    own = written(tmp_path, "ds.json", ZERO2)
    files, changes = merge("zero2", deepspeed_config=own)
    zero = files.deepspeed["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["round_robin_gradients"]) == (500_000_000, True)
    assert files.deepspeed["communication_data_type"] == "fp32"
    assert files.deepspeed["train_micro_batch_size_per_gpu"] == 2
    assert "train_batch_size" not in files.deepspeed
    assert changes == [
        f"{own}: zero_optimization.reduce_bucket_size is 500000000 instead of 4096",
        f"{own}: zero_optimization.round_robin_gradients is True",
        f"{own}: communication_data_type is 'fp32'",
    ]


def test_every_contradiction_is_listed_with_both_values_and_the_winner(tmp_path: Path) -> None:
    values = ZERO2 | {
        "train_batch_size": 99,
        "gradient_accumulation_steps": "2",
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "betas": "auto"}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    own = written(tmp_path, "ds.json", values)
    with pytest.raises(ShardmakeError) as refusal:
        merge("zero2", deepspeed_config=own)
    lines = str(refusal.value).splitlines()
    assert lines[1:-1] == [
        f"  train_batch_size: 99 in {own}, 16 in the plan. DeepSpeed would have stopped on the product of the others.",
        f"  gradient_accumulation_steps: '2' in {own}, 2 in the plan. Transformers would have stopped, once the model "
        "is loaded on every rank.",
        f"  zero_optimization.stage: 3 in {own}, 2 in the plan. Your file would have won, and another training than "
        "the planned one would have run.",
        f"  zero_optimization.offload_optimizer.device: 'cpu' in {own}, 'none' in the plan. Your file would have won, "
        "and another training than the planned one would have run.",
        f"  optimizer.params.lr: 0.5 in {own}, 0.001 in the plan. Transformers would have stopped, once the model is "
        "loaded on every rank.",
    ]


def test_an_optimizer_of_its_own_keeps_the_learning_rate_of_the_run(tmp_path: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "torch_adam": True}}
    own = written(tmp_path, "ds.json", ZERO2 | {"optimizer": optimizer})
    files, _ = merge("zero2", deepspeed_config=own)
    assert files.deepspeed["optimizer"]["params"] == {"lr": 1e-3, "betas": "auto", "torch_adam": True}


def test_the_questionnaires_accelerate_file_fits(tmp_path: Path) -> None:
    own = written(tmp_path, "accelerate.yaml", QUESTIONNAIRE)
    files, changes = merge("fsdp", accelerate_config=own)
    assert files.accelerate["fsdp_config"]["fsdp_min_num_params"] == 7
    assert files.training.arguments["fsdp_config"]["min_num_params"] == 7
    assert not set(files.accelerate) & {"machine_rank", "rdzv_backend", "same_network"}
    assert f"{own}: machine_rank is left out; it stands on the command line" in changes


def test_contradictions_of_an_accelerate_file(tmp_path: Path) -> None:
    fsdp = {"fsdp_version": 1, "fsdp_offload_params": True}
    own = written(tmp_path, "a.yaml", QUESTIONNAIRE | {"num_processes": 8, "use_cpu": True, "fsdp_config": fsdp})
    with pytest.raises(ShardmakeError) as refusal:
        merge("fsdp", accelerate_config=own)
    assert [line.split(":")[0].strip() for line in str(refusal.value).splitlines()[1:-1]] == [
        "fsdp_config.fsdp_offload_params",
        "fsdp_config.fsdp_version",
        "num_processes",
        "use_cpu",
    ]


def test_keys_that_accelerate_refuses_beside_a_deepspeed_file(tmp_path: Path) -> None:
    section = {"gradient_accumulation_steps": 2, "zero3_init_flag": False, "deepspeed_config_file": "mine.json"}
    values = QUESTIONNAIRE | {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    del values["fsdp_config"]
    own = written(tmp_path, "a.yaml", values)
    with pytest.raises(ShardmakeError) as refusal:
        merge("zero2", accelerate_config=own)
    message = str(refusal.value)
    assert "deepspeed_config.gradient_accumulation_steps: 2" in message
    assert "mixed_precision: 'bf16' in" in message
    assert "To use that file, name it in the run" in message


def test_a_file_of_the_wrong_kind_or_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardmakeError, match="does not use DeepSpeed"):
        merge("ddp", deepspeed_config=written(tmp_path, "ds.json", ZERO2))
    with pytest.raises(ShardmakeError, match="looks like Accelerate file"):
        merge("zero2", deepspeed_config=written(tmp_path, "a.yaml", QUESTIONNAIRE))


def test_merged_files_are_understood(tmp_path: Path) -> None:
    plan = make_plan("zero2")
    files, _ = merge("zero2", deepspeed_config=written(tmp_path, "ds.json", ZERO2))
    flags = launch_flags(plan, Path("plan"), machine_rank=0, address="localhost", port=1)
    check_rendered([Rendering(files, plan.choice, flags)], make_model().hidden_size, "/tmp")
