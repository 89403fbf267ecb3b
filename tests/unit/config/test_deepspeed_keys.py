"""The table of DeepSpeed keys against the installed DeepSpeed, Accelerate and transformers.

Each test fails if an upgrade adds, removes or revives a key, changes a default, or starts to use an ignored key.
"""

import inspect
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import accelerate
import deepspeed
import pytest
import transformers
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime import config as installed
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel

from shardmake.config.deepspeed_keys import DEEPSPEED_KEYS, REMOVED_OPTIMIZERS, KeyRule, find_removed, find_rule
from shardmake.config.user_file_keys import judge
from shardmake.config.user_files import UserFile

MODELS: dict[str, type[BaseModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig, "zero_optimization.zenflow": ZenFlowConfig,
    "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig, "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config, "compile": CompileConfig, "tensor_parallel": TPTrainingConfig,
    "hybrid_engine": installed.HybridEngineConfig, "weight_quantization": WeightQuantConfig,
    "comms_logger": CommsLoggerConfig, "tensorboard": TensorBoardConfig, "wandb": WandbConfig, "comet": CometConfig,
    "csv_monitor": CSVConfig, "timers.throughput": DeepSpeedThroughputTimerConfig,
}  # fmt: skip
"""The sections that DeepSpeed reads with a class; it refuses other keys in them."""
SECTIONS = (
    "activation_checkpointing", "flops_profiler", "autotuning", "aio", "data_efficiency", "checkpoint", "data_types",
    "torch_autocast", "expert_parallel", "timers", "tensor_parallel", "optimizer", "scheduler",
    "checkpoint.writer", "data_efficiency.data_sampling", "data_efficiency.data_routing",
)  # fmt: skip
"""The sections whose keys DeepSpeed looks up one by one."""
ONLY_WITH_RANKS = "sequence_parallel_size"
"""The one key that is looked up only if a process group exists."""
OLD_NAMES = {"bfloat16"}
"""Old names of sections, which Shardmake refuses as unknown."""


class Recorder(dict[str, Any]):
    """A section of a DeepSpeed file that notes each key that is looked up, with its default."""

    def __init__(self, prefix: str, seen: dict[str, Any]) -> None:
        super().__init__()
        self.prefix, self.seen = prefix, seen

    def __contains__(self, key: object) -> bool:
        self.seen.setdefault(f"{self.prefix}{key}", None)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.seen.setdefault(f"{self.prefix}{key}", None)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen[f"{self.prefix}{key}"] = default
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> "Recorder":
        return self


@pytest.fixture(scope="module")
def read() -> dict[str, Any]:
    """Every dotted key that the installed DeepSpeed reads, with its default."""
    seen: dict[str, Any] = {}
    file = Recorder("", seen)
    for name in SECTIONS:
        *path, last = name.split(".")
        place = file
        for part in path:
            place = dict.__getitem__(place, part)
        dict.__setitem__(place, last, Recorder(f"{name}.", seen))
    dict.__setitem__(file, "train_micro_batch_size_per_gpu", 1)
    for name in ("optimizer", "scheduler"):
        dict.__setitem__(dict.__getitem__(file, name), "type", "any")
    installed.DeepSpeedConfig(file)
    assert ONLY_WITH_RANKS not in seen and f'"{ONLY_WITH_RANKS}" in config' in inspect.getsource(installed)
    fields = {key: default for section, model in MODELS.items() for key, default in _fields(section, model)}
    return seen | fields | {ONLY_WITH_RANKS: 1}


def _fields(section: str, model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        default = field.default_factory() if field.default_factory else field.default  # type: ignore[call-arg]
        yield f"{section}.{field.alias or name}", default


def removed() -> dict[str, KeyRule]:
    return {key.removesuffix(".*"): rule for key, rule in DEEPSPEED_KEYS.items() if rule.fate == "removed"}


def test_the_table_was_made_for_the_installed_version() -> None:
    """The page and the sentences about removed features name this version."""
    assert version("deepspeed") == "0.19.8"


def test_every_key_that_deepspeed_reads_has_a_row(read: dict[str, Any]) -> None:
    sections = {key.rpartition(".")[0] for key in [*DEEPSPEED_KEYS, *read]}
    parents = {".".join(key.split(".")[: end + 1]) for key in sections for end in range(key.count(".") + 1)}
    unknown = [key for key in read if find_rule(DEEPSPEED_KEYS, key) is None and key not in parents | OLD_NAMES]
    assert unknown == []


def test_every_row_is_of_a_key_that_deepspeed_reads_or_has_removed(read: dict[str, Any]) -> None:
    rows = {key: key.removesuffix(".*") for key, rule in DEEPSPEED_KEYS.items() if rule.fate != "removed"}
    switches = {key for key in rows if key.endswith(".enabled")}  # a section that may be switched off
    gone = [key for key, name in rows.items() if name not in read and not (key in switches and f"{key[:-8]}.*" in rows)]
    assert gone == []


def test_the_removed_keys_are_those_at_which_deepspeed_stops() -> None:
    zero = {f"zero_optimization.{key}" for key in installed._REMOVED_ZERO_CONFIG_KEYS}
    assert removed().keys() == {*installed._REMOVED_TOP_LEVEL_CONFIG_KEYS} | zero | {"compile.enabled"}
    assert "enabled" not in CompileConfig.model_fields


@pytest.mark.parametrize("key", removed())
def test_a_removed_key_stops_deepspeed_and_is_found(key: str) -> None:
    *path, last = key.split(".")
    values: dict[str, Any] = {last: False}
    for part in reversed(path):
        values = {part: values}
    with pytest.raises((installed.DeepSpeedConfigError, ValueError)):
        installed.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **values})
    ((name, value, rule),) = find_removed(values)
    assert (name, value) == (key, False) and rule.fact.startswith("DeepSpeed") and "stops" in rule.fact


def test_the_values_without_effect_are_deepspeeds_defaults(read: dict[str, Any]) -> None:
    """`checkpoint.tag_validation` is written in any case; a missing section has no default of its own."""
    unlike = {
        key: (rule.idle, read[key])
        for key, rule in DEEPSPEED_KEYS.items()
        if rule.idle and key in read and rule.fate != "removed" and not key.startswith("checkpoint.")
        if read[key] not in (*rule.idle, None)
    }
    assert unlike == {}


def test_the_one_bit_optimizers_are_gone() -> None:
    assert not {name.lower() for name in REMOVED_OPTIMIZERS} & {*installed.DEEPSPEED_OPTIMIZERS}


def test_autotuning_ends_the_process_and_no_quantized_kernel_is_for_the_cpu() -> None:
    from deepspeed.ops.op_builder import cpu, npu

    assert "exit()" in inspect.getsource(deepspeed.DeepSpeedEngine._autotuning_exit)
    assert "self._autotuning_exit()" in inspect.getsource(deepspeed.DeepSpeedEngine.step)
    assert not hasattr(cpu, "QuantizerBuilder") and hasattr(npu, "QuantizerBuilder")


def files_with(package: Any, text: str) -> set[str]:
    root = Path(package.__file__).parent
    return {str(path.relative_to(root)) for path in root.rglob("*.py") if text in path.read_text()}


@pytest.mark.parametrize(("text", "files"), [
    ("._config.pipeline", {"runtime/pipe/engine.py"}), (".disable_allgather", {"runtime/config.py"}),
    ("dataloader_drop_last()", {"runtime/engine.py"}),
    ("self._config.use_data_before_expert_parallel_", {"runtime/engine.py"}),
    ("convert_to_random_ltd(", {"runtime/data_pipeline/data_routing/helper.py"}),
])  # fmt: skip
def test_ignored_keys_are_read_only_where_trainer_does_not_get(text: str, files: set[str]) -> None:
    assert files_with(deepspeed, text) == files


def test_accelerate_and_trainer_give_deepspeed_no_data() -> None:
    """So DeepSpeed's data loader, its curriculum and random-LTD are not used: the engine reads them in it only."""
    engine = Path(deepspeed.__file__).parent / "runtime/engine.py"
    io = inspect.getsource(deepspeed.DeepSpeedEngine.deepspeed_io)
    assert engine.read_text().count("dataloader_drop_last()") == 1 == io.count("dataloader_drop_last()")
    assert "curriculum_learning_enabled()" in io
    for text in ("training_data=", "deepspeed_io", "random_ltd", "PipelineModule"):
        assert files_with(accelerate, text) == set()
    folder = Path(transformers.__file__).parent
    for path in (folder / "trainer.py", folder / "integrations/deepspeed.py", folder / "modeling_utils.py"):
        for text in ("training_data=", "random_ltd", "PipelineModule", "deepspeed.checkpointing"):
            assert text not in path.read_text(), (path, text)


def test_every_row_of_the_deepspeed_table_says_what_to_know() -> None:
    for key, rule in DEEPSPEED_KEYS.items():
        assert not rule.fact or rule.fact.endswith("."), key
        assert rule.fate not in ("ignored", "removed") or (rule.fact and rule.use == "refused"), key
        assert rule.use not in ("estimated", "result") or rule.fate in ("memory", "numbers"), key


def test_a_section_that_is_off_is_left_out_and_others_are_refused() -> None:
    def uses(**values: Any) -> list[bool]:
        return [one.is_idle for one in judge(UserFile("deepspeed", "ds.json", values), is_script=False)]

    assert uses(elasticity={"enabled": False, "max_train_batch_size": 8}) == [True, True]
    assert uses(data_efficiency={"enabled": True, "data_sampling": {"enabled": True}}) == [False, False]
