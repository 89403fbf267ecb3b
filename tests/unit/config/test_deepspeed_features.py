"""The page about DeepSpeed's features is that of the table of keys; its flags, modules and defects are the installed ones."""

import importlib.util
import re
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_args

import pytest
import torch
import yaml
from deepspeed.checkpoint.constants import (
    AUTOEP_LAYERS_KEY,
    AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY,
    AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT,
)
from deepspeed.launcher import runner
from deepspeed.module_inject.auto_ep_presets import base
from deepspeed.module_inject.auto_ep_presets.registry import PRESET_MODELS
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import zero_to_fp32
from packaging.version import Version
from pydantic import TypeAdapter
from transformers.utils import output_capturing

from shardmake.config.deepspeed_keys import DEEPSPEED_KEYS
from shardmake.config.effects import KEYS
from shardmake.config.models import Cluster, Run, Section
from tools.deepspeed_page import FEATURES, PAGE, page

TEXT = PAGE.read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TEXT.splitlines() if line.startswith("|")]
FLAGS = {row[0]: row[1] for row in ROWS if len(row) == 2 and "--" in row[0] and row[0].startswith("`")}


LITTLE = {"eigenvalue", "dataloader_drop_last", "disable_allgather"}
"""Keys that are not a feature of a tutorial."""


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_page_is_current() -> None:
    assert page() == TEXT, "run: make docs"


def test_every_removed_and_ignored_section_is_a_feature() -> None:
    sections = {key.partition(".")[0] for key, _ in FEATURES.values()}
    for key, rule in DEEPSPEED_KEYS.items():
        if rule.fate in ("removed", "ignored") and not key.startswith(("zero_optimization", "compile.")):
            assert key.partition(".")[0] in sections | LITTLE, key


def settings() -> Iterator[tuple[str, Any]]:
    """Yield the keys of ours that notes and flags name, with the value if they have one."""
    for cell in [note for _, note in FEATURES.values()] + list(FLAGS.values()):
        for span in spans(cell):
            if not span.startswith("shardmake "):
                key, _, value = span.partition(": ")
                yield key, yaml.safe_load(value) if value else None


@pytest.mark.parametrize(("key", "value"), list(settings()))
def test_every_key_of_ours_exists_and_takes_the_value(key: str, value: Any) -> None:
    assert key in KEYS, key
    place: type[Section] = Cluster if key.startswith("cluster.") else Run
    *path, last = key.removeprefix("cluster.").split(".")
    for part in path:
        kinds = get_args(place.model_fields[part].annotation) or (place.model_fields[part].annotation,)
        place = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section))
    if value is not None:
        field = place.model_fields[last]
        TypeAdapter(Annotated[field.annotation, field]).validate_python(value)


def test_every_flag_of_their_launcher_exists() -> None:
    source = Path(runner.__file__).read_text()
    flags = {flag for cell in FLAGS for flag in spans(cell)}
    assert all(f'"{flag}"' in source for flag in flags) and "--num_gpus" in flags


@pytest.mark.parametrize(("module", "exists"), [
    ("deepspeed.runtime.fp16.onebit", False), ("deepspeed.ops.sparse_attention", False),
    ("deepspeed.elasticity", False), ("deepspeed.compression.compress", False), ("deepspeed.nebula", False),
    ("mii", False), ("deepspeed.autotuning.autotuner", True), ("deepspeed.inference.engine", True),
    ("deepspeed.moe.layer", True), ("deepspeed.pipe", True), ("deepspeed.profiling.flops_profiler", True),
    ("deepspeed.runtime.sequence_parallel.ulysses_sp", True),
])  # fmt: skip
def test_the_modules_behind_the_features_are_there_or_gone(module: str, exists: bool) -> None:
    try:
        assert (importlib.util.find_spec(module) is not None) == exists
    except ModuleNotFoundError:
        assert not exists


def test_autoep_stops_as_the_page_says() -> None:
    """If one of these passes after an upgrade, try AutoEP again: the refusal of ``expert_parallel`` gives them."""
    error = pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given")
    with error if Version(version("transformers")) >= Version("5.23") else nullcontext():  # 5.17 takes three
        base._install_instance_transformers_output_recorders(
            torch.nn.Linear(1, 1), {"a class": {}}, output_capturing, lambda _: 0
        )
    zero: Any = SimpleNamespace(
        partition_gradients=True, contiguous_gradients=True, reduce_scatter=True, is_moe_group=lambda group: "moe" in group,
        optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="None of the param groups are marked as MoE"):
        DeepSpeedZeroOptimizer._configure_moe_settings(zero)
    experts = {
        AUTOEP_LAYERS_KEY: [{AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY: AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT}]
    }
    with pytest.raises(NotImplementedError, match="does not support AutoEP"):
        zero_to_fp32._raise_if_autoep_zero3_partitioned_state(experts)
    families = {name for preset in PRESET_MODELS.values() for name in preset.hf_model_types}
    assert not families & {"olmoe", "gpt_oss"}


def test_the_page_names_the_pinned_versions() -> None:
    pins = dict(line.partition("==")[::2] for line in Path("constraints.txt").read_text().splitlines() if "==" in line)
    for package, name in (("deepspeed", "DeepSpeed"), ("accelerate", "Accelerate"), ("transformers", "transformers")):
        found = re.search(rf"{name} (\d+\.\d+(?:\.\d+)?)", TEXT)
        assert found and pins[package].startswith(found[1]), package
