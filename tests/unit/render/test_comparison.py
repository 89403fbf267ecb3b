"""The comparison of Trainer, DeepSpeed and Accelerate finds every planted fault, nothing in the twins, and has a case for each row."""

import pytest

from shardmake.config.settings import SETTINGS, Setting
from shardmake.core.nested import leaves
from shardmake.render.comparison import LIBRARIES, Comparison, Library, Row, Settings
from shardmake.render.engine_values import VARIES
from tests.planted_settings import ACCELERATE, ARGUMENTS, AUTO, PLANTED, STOPS, Planted
from tests.settings_cases import CASES
from tests.unit.render.compared_settings import compare_settings
from tests.workflow.engine_cases import OBSERVED

CLEAN = {
    "all auto": Settings(ARGUMENTS, AUTO | {"bf16": {"enabled": "auto"}, "train_batch_size": "auto"}, world_size=2),
    "written by accelerate config": Settings(ARGUMENTS | {"bf16": True}, None, ACCELERATE | {
        "deepspeed_config": {
            "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "offload_optimizer_device": "none",
            "offload_param_device": "none", "zero3_init_flag": False, "zero_stage": 2,
        },
        "debug": False, "downcast_bf16": "no", "enable_cpu_affinity": False, "machine_rank": 0,
        "main_training_function": "main", "mixed_precision": "bf16", "num_machines": 1, "rdzv_backend": "static",
        "same_network": True, "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": False,
    }, world_size=2),
    "FSDP": Settings(
        ARGUMENTS | {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}, None,
        ACCELERATE | {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}},
        world_size=2,
    ),
    "a script": Settings(None, AUTO, ACCELERATE, ["--deepspeed_config_file", "ds.json"], 2, named_by_trainer=False),
    "a DeepSpeed file alone": Settings(None, AUTO), "training arguments alone": Settings(ARGUMENTS),
}  # fmt: skip


FACTS: dict[str, tuple[dict[str, object], str, str, str]] = {
    "curriculum": (
        {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": {}}}},
        "data_efficiency.enabled", "warning", "Trainer and Accelerate create the data loader themselves",
    ),
    "pipeline": ({"pipeline": {"stages": 2}}, "pipeline.stages", "warning", "PipelineEngine reads it"),
    "checkpointing": (
        {"activation_checkpointing": {"cpu_checkpointing": True, "profile": True}},
        "activation_checkpointing.cpu_checkpointing", "warning", "Models of transformers do not use it",
    ),
    "AutoEP": ({"expert_parallel": {"enabled": True}}, "expert_parallel.enabled", "warning", "consolidate` does not merge"),
    "quantized": (
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
        "zero_optimization.zero_quantized_weights", "note", "8 or 4 bits",
    ),
    "Apex": ({"amp": {"enabled": False}}, "amp", "error", "DeepSpeed has removed it and stops. bf16, fp16"),
    "elastic": ({"elasticity": {"enabled": True}}, "elasticity", "error", "Nothing replaced it: set the batch sizes"),
    "MiCS": (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
        "zero_optimization.mics_shard_size", "error", "FSDP's hybrid sharding replaced MiCS",
    ),
    "no schedule": ({"scheduler": {"type": "math", "params": {}}}, "scheduler.type", "error", "nor torch has it"),
    "no optimizer": ({"optimizer": {"type": "lr_scheduler"}}, "optimizer.type", "error", "nor torch has it"),
    "1-bit Adam": (
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4}}},
        "optimizer.type", "error", "DeepSpeed has removed the 1-bit optimizers",
    ),
}  # fmt: skip
"""Sections added to a sound DeepSpeed file; then the key, the level and words of the one line about it."""


FOUND_BY_THE_ENGINE = {
    "optimizer: Trainer, adafactor": ("betas", "equal", None),
    "schedule: DeepSpeed LRRangeTest": ("warm-up steps", "equal", None),
    "schedule: DeepSpeed OneCycle": ("betas", "differs", VARIES),
    "schedule: DeepSpeed equal": ("warm-up steps", "equal", 2),
    "warm-up steps: Trainer, a ratio": ("warm-up steps", "equal", 3),
    "warm-up steps: Trainer, constant": ("warm-up steps", "differs", 0),
    "learning rate: script, auto": ("weight decay", "equal", None),
    "accumulation steps: script, auto": ("accumulation steps", "equal", None),
    "engine: Accelerate's type for CPUs": ("total batch", "equal", 4),
    "engine: a script without a GPU": ("total batch", "equal", 4),
    "engine: Trainer without a GPU": ("total batch", "equal", 4),
    "engine: Trainer without a GPU, use_cpu": ("total batch", "equal", 8),
    "engine: a script without a GPU, auto": ("total batch", "stops", None),
    "engine: FSDP without a GPU": ("engine", "stops", None),
    "engine: FSDP without a GPU, use_cpu": ("engine", "differs", "DDP"),
}
"""Rows that were once predicted otherwise: setting, verdict and what runs."""
ONE_RANK = {
    "engine: Accelerate's type for CPUs": "distributed_type", "engine: a script without a GPU": "use_cpu",
    "engine: DDP without a GPU": "use_cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def compared() -> dict[str, Comparison]:
    """Compare all cases in one process."""
    settings = {one.name: one.fault for one in PLANTED} | {f"{one.name}, corrected": one.corrected for one in PLANTED}
    settings |= CLEAN | {name: Settings(None, AUTO | added) for name, (added, *_) in FACTS.items()}
    settings |= {name: CASES[name] for name in {**FOUND_BY_THE_ENGINE, **ONE_RANK}}
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


@pytest.mark.parametrize("name", [*CLEAN, *(f"{one.name}, corrected" for one in PLANTED)])
def test_correct_files_are_clean(name: str, compared: dict[str, Comparison]) -> None:
    assert compared[name].contradictions == []
    assert compared[name].problems == []


@pytest.mark.parametrize("name", FACTS)
def test_the_fate_of_a_deepspeed_key_is_reported(name: str, compared: dict[str, Comparison]) -> None:
    _, key, level, words = FACTS[name]
    (found,) = [problem for problem in compared[name].problems if problem.key == key]
    assert found.level == level
    assert words in found.effect
    assert len(compared[name].problems) == 1


@pytest.mark.parametrize("name", FOUND_BY_THE_ENGINE)
def test_what_the_engine_showed_is_predicted(name: str, compared: dict[str, Comparison]) -> None:
    setting, verdict, runs = FOUND_BY_THE_ENGINE[name]
    found = row(compared[name], setting)
    assert found is not None
    assert (found.verdict, found.runs) == (verdict, runs)


@pytest.mark.parametrize("name", ONE_RANK)
def test_ranks_that_train_alone_are_an_error(name: str, compared: dict[str, Comparison]) -> None:
    assert [(one.key, one.level) for one in compared[name].problems] == [(ONE_RANK[name], "error")]


SHARED = [setting for setting in SETTINGS.values() if setting.is_shared]


def keys(setting: Setting, library: Library) -> tuple[str, ...]:
    """Return the names that ``library`` has for ``setting``."""
    return setting.deepspeed_keys if library == "DeepSpeed" else getattr(setting, library.lower())


PAIRS: list[tuple[Setting, Library]] = [
    (setting, library) for setting in SHARED for library in LIBRARIES if keys(setting, library)
]


def writes(settings: Settings, setting: Setting, library: Library) -> bool:
    """Return whether the settings have the key of ``library`` for ``setting``."""
    written = {key for key, _ in leaves(getattr(settings, library.lower()) or {})}
    if library == "Accelerate":
        return setting.option in {key.rpartition(".")[2] for key in written}
    return bool(written.intersection(keys(setting, library)))


@pytest.mark.parametrize(("setting", "library"), PAIRS, ids=lambda value: getattr(value, "name", value))
def test_each_key_has_a_case(setting: Setting, library: Library) -> None:
    cases = [one for name, one in CASES.items() if name.startswith(f"{setting.name}:")]
    assert any(writes(one, setting, library) for one in cases), "Add a case to tests/settings_cases.py."


def test_each_row_is_read_from_the_engine() -> None:
    names = {"engine", *(setting.name for setting in SHARED)}
    assert OBSERVED.keys() == names == {name.partition(":")[0] for name in CASES}
