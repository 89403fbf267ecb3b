"""The linter for configuration files that somebody has already."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardmake.core.errors import ShardmakeError
from shardmake.render.lint import (
    REFUSED_BESIDE_DEEPSPEED_FILE,
    SHARED,
    TRAINING_DEFAULTS,
    ConfigFile,
    Finding,
    check_files,
    compare,
    read_sources,
)

ACCELERATE = {"distributed_type": "DEEPSPEED", "num_processes": 4, "num_machines": 1, "use_cpu": False}
DEEPSPEED = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}}
TRAINING = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 1e-4}


def texts(accelerate: Any = None, deepspeed: Any = None, training: Any = None) -> list[str]:
    given = {"accelerate": accelerate, "deepspeed": deepspeed, "training": training}
    sources = {kind: ConfigFile(kind, f"{kind}.file", values) for kind, values in given.items() if values is not None}
    return [finding.text for finding in compare(sources)]  # type: ignore[arg-type]


def test_files_that_agree_have_no_findings() -> None:
    assert texts(ACCELERATE, DEEPSPEED, TRAINING) == []
    assert texts(ACCELERATE, dict.fromkeys(SHARED, "auto") | {"zero_optimization": {"stage": 2}}, TRAINING) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"gradient_accumulation_steps": 8},
            "gradient_accumulation_steps is 8 in deepspeed.file, but gradient_accumulation_steps is 4 in training.file",
        ),
        (
            {"gradient_accumulation_steps": "4"},
            "(types count: str is not int)",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
            "optimizer.params.lr is 0.001 in deepspeed.file, but learning_rate is 0.0001 in training.file",
        ),
        ({"gradient_clipping": 0.5}, "max_grad_norm is 1.0, its default, in training.file"),
        ({"optimizer": {"type": "AdamW"}}, "names an optimizer, which wins over optim in training.file"),
    ],
)
def test_deepspeed_against_training(changes: dict[str, Any], expected: str) -> None:
    assert any(expected in text for text in texts(None, DEEPSPEED | changes, TRAINING))


def test_keys_that_accelerate_refuses_beside_a_deepspeed_file() -> None:
    section = {"gradient_accumulation_steps": 8, "zero_stage": 3, "deepspeed_multinode_launcher": "standard"}
    found = texts(ACCELERATE | {"deepspeed_config": section, "mixed_precision": "bf16"}, DEEPSPEED)
    assert len(found) == 3
    assert "deepspeed_config.zero_stage is 3 in accelerate.file and 2 in deepspeed.file" in found[1]
    assert all("accelerate stops on this key" in text for text in found)


def test_the_refused_keys_are_those_of_the_installed_accelerate() -> None:
    """Each of them, named by the launcher as read from its file, makes the plugin raise beside a DeepSpeed file."""
    from accelerate.utils import DeepSpeedPlugin

    environment = pytest.MonkeyPatch()
    for key in (*REFUSED_BESIDE_DEEPSPEED_FILE, "mixed_precision"):
        environment.setenv("ACCELERATE_CONFIG_DS_FIELDS", f"deepspeed_config_file,{key}")
        with pytest.raises(ValueError, match="will be ignored"):
            DeepSpeedPlugin(hf_ds_config=dict(DEEPSPEED))
    environment.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file,zero3_init_flag")
    DeepSpeedPlugin(hf_ds_config=dict(DEEPSPEED))
    environment.undo()


def test_the_defaults_are_those_of_the_installed_transformers() -> None:
    from transformers import TrainingArguments

    fields = TrainingArguments.__dataclass_fields__
    assert {name: fields[name].default for name in SHARED.values()} == TRAINING_DEFAULTS


def test_use_cpu_drops_the_engine() -> None:
    (text,) = texts(ACCELERATE | {"use_cpu": True})
    assert "starts one plain process" in text


def test_batch_arithmetic_at_the_launched_size() -> None:
    (text,) = texts(ACCELERATE, DEEPSPEED | {"train_batch_size": 16})
    assert "2 x 4 steps x 4 processes (accelerate.file) make 32" in text
    grouped = DEEPSPEED | {"tensor_parallel": {"autotp_size": 2}}
    assert texts(ACCELERATE, grouped | {"train_batch_size": 16}) == []


def test_precision_and_fsdp_name_the_winner() -> None:
    launched = {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {"fsdp_state_dict_type": "FULL"}}
    asked = TRAINING | {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED"}}
    precision, state = texts(launched, None, asked)
    assert "accelerate.file wins: Trainer takes the launcher's only where neither bf16 nor fp16 is set" in precision
    assert "fsdp_config.state_dict_type is 'FULL' in accelerate.file and 'SHARDED' in training.file" in state
    assert "training.file wins" in state
    assert texts(launched | {"fsdp_config": {}}, None, asked | {"bf16": True}) == []


def test_reading(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(TRAINING | {"deepspeed": "ds.json"}))
    sources = read_sources([tmp_path / "args.yaml"])
    assert set(sources) == {"training", "deepspeed"}
    (tmp_path / "odd.yaml").write_text("a: 1")
    with pytest.raises(ShardmakeError, match="not a known configuration file"):
        read_sources([tmp_path / "odd.yaml"])
    with pytest.raises(ShardmakeError, match="are both DeepSpeed file"):
        read_sources([tmp_path / "ds.json", tmp_path / "ds.json"])
    with pytest.raises(ShardmakeError, match="does not exist"):
        read_sources([tmp_path / "none.yaml"])
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ShardmakeError, match="cannot be read"):
        read_sources([tmp_path / "broken.json"])


def test_numbers_are_read_as_the_libraries_read_them(tmp_path: Path) -> None:
    """YAML 1.1 takes 5e8 for text, which DeepSpeed's JSON does not."""
    for name in ("ds.json", "ds.yaml"):
        (tmp_path / name).write_text('{"train_batch_size": 8, "zero_optimization": {"reduce_bucket_size": 5e8}}')
    values = [read_sources([tmp_path / name])["deepspeed"].values for name in ("ds.json", "ds.yaml")]
    assert [value["zero_optimization"]["reduce_bucket_size"] for value in values] == [5e8, "5e8"]


def test_findings_of_the_libraries_are_reported(tmp_path: Path) -> None:
    files = {
        "accelerate.yaml": ACCELERATE
        | {"rdzv_backend": "c10d", "deepspeed_config": {"deepspeed_config_fil": "x", "zero3_init_flag": False}},
        "ds.json": DEEPSPEED | {"zero_optimization": {"stage": 2, "bucket": 1}, "zero_optimisation": {"stage": 3}},
        "args.yaml": TRAINING | {"lr_scheduler_type": "cosinus", "model_name_or_path": "x"},
    }
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    found = check_files([tmp_path / name for name in files])
    text = "\n".join(f"{finding.level}: {finding.text}" for finding in found)
    assert "accelerate ignores rdzv_backend; give it on the command line" in text
    assert "accelerate ignores deepspeed_config.deepspeed_config_fil" in text
    assert "bucket" in text
    assert "cosinus is not a valid SchedulerType" in text
    assert {finding.level for finding in found if " ignores " in finding.text} == {"warning"}
    assert Finding("error", "") not in found
