"""The comparison of Trainer, DeepSpeed and Accelerate finds every planted fault, and nothing in the twins."""

import pytest

from shardmake.render.comparison import Comparison, Row, Settings, compare_settings
from tests.planted_settings import ACCELERATE, ARGUMENTS, AUTO, PLANTED, STOPS, Planted

CLEAN = {
    "all auto": Settings(ARGUMENTS, AUTO | {"bf16": {"enabled": "auto"}, "train_batch_size": "auto"}, world_size=2),
    "written by accelerate config": Settings(
        ARGUMENTS | {"bf16": True},
        None,
        ACCELERATE
        | {
            "deepspeed_config": {
                "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "offload_optimizer_device": "none",
                "offload_param_device": "none", "zero3_init_flag": False, "zero_stage": 2,
            },
            "debug": False, "downcast_bf16": "no", "enable_cpu_affinity": False, "machine_rank": 0,
            "main_training_function": "main", "mixed_precision": "bf16", "num_machines": 1, "rdzv_backend": "static",
            "same_network": True, "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": False,
        },
        world_size=2,
    ),
    "FSDP": Settings(
        ARGUMENTS | {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}},
        None,
        ACCELERATE | {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}},
        world_size=2,
    ),
    "a script": Settings(None, AUTO, ACCELERATE, ["--deepspeed_config_file", "ds.json"], 2, named_by_trainer=False),
    "a DeepSpeed file alone": Settings(None, AUTO),
    "training arguments alone": Settings(ARGUMENTS),
}  # fmt: skip


@pytest.fixture(scope="module")
def compared() -> dict[str, Comparison]:
    """Compare all cases in one process."""
    settings = {one.name: one.fault for one in PLANTED} | {f"{one.name}, corrected": one.corrected for one in PLANTED}
    settings |= CLEAN
    return dict(zip(settings, compare_settings(list(settings.values())), strict=True))


def row(comparison: Comparison, setting: str) -> Row | None:
    return next((row for row in comparison.rows if row.setting == setting), None)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found_with_both_values(planted: Planted, compared: dict[str, Comparison]) -> None:
    comparison = compared[planted.name]
    found = row(comparison, planted.setting)
    if found is None:
        (problem,) = [problem for problem in comparison.problems if problem.key == planted.setting]
        assert problem.level == "error"
        assert planted.runs == STOPS
        return
    assert found.verdict == ("stops" if planted.runs == STOPS else "differs")
    assert found.runs == (None if planted.runs == STOPS else planted.runs)
    assert found.effect
    assert {value.written for value in found.values.values()} != {False}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_the_corrected_twin_is_clean(planted: Planted, compared: dict[str, Comparison]) -> None:
    comparison = compared[f"{planted.name}, corrected"]
    assert comparison.contradictions == []
    assert comparison.problems == []


@pytest.mark.parametrize("name", CLEAN)
def test_correct_files_are_clean(name: str, compared: dict[str, Comparison]) -> None:
    assert compared[name].contradictions == []
    assert compared[name].problems == []
