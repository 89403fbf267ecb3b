"""The libraries' own parsers: what they accept, what they refuse, what they drop without a word."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from shardmake.config import STRATEGIES, Strategy
from shardmake.errors import UserError
from shardmake.plan.accelerate_file import IGNORED_IN_FILE
from shardmake.plan.check import Files, check_rendered
from shardmake.plan.render import launch_flags, render_files
from tests.unit.plans import make_cluster, make_model, make_plan, make_run


def render(strategy: Strategy, **settings: Any) -> Files:
    return render_files(make_plan(strategy), make_run(**settings), make_cluster(), make_model(), Path("plan"))


def check(strategy: Strategy, files: Files) -> None:
    plan = make_plan(strategy)
    flags = launch_flags(plan, machine_rank=1, address="localhost", port=1)
    check_rendered(files, plan.choice, make_model().hidden_size, flags, "/tmp")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rendered_files_are_understood(strategy: Strategy) -> None:
    check(strategy, render(strategy))


@pytest.mark.parametrize(
    ("strategy", "setting", "value"), [("zero3-nvme", "deepspeed_values", "auto"), ("fsdp-hybrid", "fsdp_version", 1)]
)
def test_other_ways_of_saying_it_are_understood(strategy: Strategy, setting: str, value: Literal[1, "auto"]) -> None:
    check(strategy, render(strategy, **{setting: value}))


def test_every_parser_complains_about_its_own_file() -> None:
    files = render("zero2")
    broken = replace(
        files,
        accelerate=files.accelerate | {"num_processes": 3, "same_network": True},
        deepspeed=files.deepspeed
        | {"gradient_accumulation_steps": 3, "gradient_clipping": "auto", "zero_optimisation": {}},
        training={**files.training, "arguments": files.training["arguments"] | {"bf16": False}},
    )
    with pytest.raises(UserError) as refusal:
        check("zero2", broken)
    message = str(refusal.value)
    assert "accelerate.yaml: processes per node is understood as 1; planned is 2" in message
    assert "accelerate.yaml: accelerate ignores same_network" in message
    assert "deepspeed.json: train_batch_size is understood as 24; planned is 16" in message
    assert "ds gradient_accumulation_steps=3 vs hf gradient_accumulation_steps=2" in message
    assert "ds bf16.enabled=True vs hf bf16|bf16_full_eval=False" in message
    assert "deepspeed.json: DeepSpeed ignores zero_optimisation" in message
    assert "gradient_clipping" not in message


def test_misspelt_keys_are_refused() -> None:
    files = render("zero3")
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
    """Every flat key of the file, written with another value than its default; some do not reach the arguments."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    plain = render("ddp").accelerate
    fields = [name for name in ClusterConfig.__dataclass_fields__ if not name.endswith("_config")]
    others = {name: _another_value(name) for name in fields if name not in plain and name != "debug"}
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(plain | others))
    launched, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(path), "x.py"]))
    lost = {name for name, value in others.items() if getattr(launched, name) != value}
    assert {name for name in lost if not name.startswith("tpu_")} == set(IGNORED_IN_FILE)


def _another_value(name: str) -> object:
    from accelerate.commands.config.config_args import ClusterConfig

    default = ClusterConfig.__dataclass_fields__[name].default
    return not default if isinstance(default, bool) else 7 if name.endswith(("port", "rank")) else "other"


def test_auto_and_explicit_give_the_same_engine(tmp_path: Path) -> None:
    """What Trainer makes of the file with "auto" is, key by key, the explicit file."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    explicit, auto = render("zero3"), render("zero3", deepspeed_values="auto")
    assert auto.deepspeed["zero_optimization"]["reduce_bucket_size"] == "auto"
    read = HfTrainerDeepSpeedConfig(auto.deepspeed)
    read.trainer_config_process(_Arguments(explicit.training["arguments"]))
    read.trainer_config_finalize(_Arguments(explicit.training["arguments"]), _Sized(), 10)
    assert read.config == explicit.deepspeed


class _Arguments:
    """As much of TrainingArguments as the DeepSpeed integration reads, without its device."""

    fp16_full_eval = bf16_full_eval = save_on_each_node = False
    world_size = 4

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    def get_warmup_steps(self, steps: int) -> int:
        return int(self.__dict__["warmup_steps"])


class _Sized:
    class config:  # noqa: N801
        hidden_size = make_model().hidden_size
