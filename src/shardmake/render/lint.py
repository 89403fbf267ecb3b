"""`shardmake check FILE...`: find contradictions in and between existing configuration files.

The files are an Accelerate file, a DeepSpeed file and training arguments (YAML or JSON), or some of them. The
libraries' own parsers read them. Settings that stand in several files are compared, and the message names the file
that would win at run time.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from shardmake.core.errors import ConfigError
from shardmake.render import parsers
from shardmake.render.check import answer_check, ask_libraries, problems_of

Kind = Literal["accelerate", "deepspeed", "training"]
TITLES: Final[dict[Kind, str]] = {
    "accelerate": "Accelerate file",
    "deepspeed": "DeepSpeed file",
    "training": "training arguments",
}
SIGNS: Final[dict[Kind, tuple[str, ...]]] = {
    "accelerate": ("distributed_type", "compute_environment"),
    "deepspeed": ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"),
    "training": ("arguments", "learning_rate", "per_device_train_batch_size", "num_train_epochs", "max_steps"),
}
"""Keys that identify each kind of file."""

SHARED: Final = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
}
"""DeepSpeed's keys that transformers compares with a training argument."""

TRAINING_DEFAULTS: Final[dict[str, Any]] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "bf16": False,
    "fp16": False,
    "learning_rate": 5e-5,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
}

REFUSED_BESIDE_DEEPSPEED_FILE: Final = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)
"""Keys of accelerate's ``deepspeed_config`` section that it refuses beside a DeepSpeed file."""


@dataclass(frozen=True)
class ConfigFile:
    """One configuration file."""

    kind: Kind
    name: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """A problem: an error stops a training or trains something else; a warning is silently dropped."""

    level: Literal["error", "warning"]
    text: str


def check_files(paths: Sequence[Path], scratch: str = "/tmp") -> list[Finding]:
    """Return all problems in and between the files.

    Raises `ConfigError` for a file that cannot be read or whose kind is unknown.
    """
    sources = read_sources(paths)
    request = {"sources": [asdict(source) for source in sources.values()]}
    answers = ask_libraries("shardmake.render.lint", request, _world_size(sources), "deepspeed" in sources, scratch)
    libraries = [Finding("warning" if " ignores " in line else "error", line) for line in answers]
    return [*compare(sources), *libraries]


def read_sources(paths: Sequence[Path]) -> dict[Kind, ConfigFile]:
    """Return the files by kind, with the DeepSpeed file that another one refers to."""
    found: dict[Kind, ConfigFile] = {}
    for path in paths:
        source = read_source(path)
        if other := found.get(source.kind):
            raise ConfigError(f"{other.name} and {source.name} are both {TITLES[source.kind]}; give one of a kind.")
        found[source.kind] = source
    if "deepspeed" not in found and (referred := _referred(found)):
        found["deepspeed"] = read_source(referred)
    return found


def read_source(path: Path) -> ConfigFile:
    """Read one file and determine its kind from its keys."""
    try:
        # YAML reads 5e8 as text, JSON as a number; each file is read as the libraries will.
        values = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist. Name an existing file (now in {Path.cwd()}).") from None
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    kinds = [
        kind for kind, signs in SIGNS.items() if isinstance(values, dict) and any(sign in values for sign in signs)
    ]
    if not kinds:
        wanted = "; ".join(f"{TITLES[kind]}: {', '.join(signs)}" for kind, signs in SIGNS.items())
        raise ConfigError(f"Cannot check {path}: it is not a known configuration file. Each kind has one of: {wanted}.")
    kind = kinds[0]
    return ConfigFile(kind, str(path), values.get("arguments", values) if kind == "training" else values)


def _referred(sources: Mapping[Kind, ConfigFile]) -> Path | None:
    """Return the DeepSpeed file that training arguments or an Accelerate file name, if it exists."""
    named: list[tuple[ConfigFile, Any]] = []
    if "training" in sources:
        named.append((sources["training"], sources["training"].values.get("deepspeed")))
    if "accelerate" in sources:
        section = sources["accelerate"].values.get("deepspeed_config") or {}
        named.append((sources["accelerate"], section.get("deepspeed_config_file")))
    for source, name in named:
        for folder in (Path(), Path(source.name).parent):
            if isinstance(name, str) and (folder / name).is_file():
                return folder / name
    return None


def _world_size(sources: Mapping[Kind, ConfigFile]) -> int:
    return int(sources["accelerate"].values.get("num_processes", 1)) if "accelerate" in sources else 1


# --- comparing, pure --------------------------------------------------------------------------------------------------


def compare(sources: Mapping[Kind, ConfigFile]) -> list[Finding]:
    """Return the contradictions between the files, with both values and the file that would win."""
    accelerate, deepspeed, training = (sources.get(kind) for kind in ("accelerate", "deepspeed", "training"))
    found: list[Finding] = []
    if deepspeed and training:
        found += _deepspeed_against_training(deepspeed, training)
    if accelerate and deepspeed:
        found += _accelerate_against_deepspeed(accelerate, deepspeed)
    if accelerate and training and not deepspeed:
        found += _accelerate_against_training(accelerate, training)
    if accelerate:
        found += _accelerate_alone(accelerate)
    return found


def _deepspeed_against_training(deepspeed: ConfigFile, training: ConfigFile) -> Iterator[Finding]:
    written = dict(parsers.leaves(deepspeed.values))
    for key, argument in SHARED.items():
        ours = training.values.get(argument, TRAINING_DEFAULTS[argument])
        given = written.get(key, "auto")
        if given != "auto" and given != ours:
            default = "" if argument in training.values else ", its default,"
            yield Finding(
                "error",
                f"{key} is {given!r} in {deepspeed.name}, but {argument} is {ours!r}{default} in {training.name}. "
                'Neither wins: transformers stops once the model is loaded on every rank. Write "auto", or make them '
                f"equal{_type_hint(given, ours)}.",
            )
    if "optimizer" in deepspeed.values:
        yield Finding(
            "warning",
            f"{deepspeed.name} names an optimizer, which wins over optim in {training.name}; it decays norms and "
            "biases too, which Trainer's own leaves out.",
        )
    if training.values.get("fsdp"):
        yield Finding(
            "error", f"{training.name} asks for FSDP and {deepspeed.name} for DeepSpeed; Trainer refuses both."
        )


def _type_hint(given: object, ours: object) -> str:
    return f" (types count: {type(given).__name__} is not {type(ours).__name__})" if str(given) == str(ours) else ""


def _accelerate_against_deepspeed(accelerate: ConfigFile, deepspeed: ConfigFile) -> Iterator[Finding]:
    section = accelerate.values.get("deepspeed_config") or {}
    refused = [f"deepspeed_config.{key}" for key in REFUSED_BESIDE_DEEPSPEED_FILE if key in section]
    if accelerate.values.get("mixed_precision") and accelerate.values["distributed_type"] == "DEEPSPEED":
        refused.append("mixed_precision")
    written = dict(parsers.leaves(deepspeed.values))
    for key in refused:
        theirs = written.get(_DEEPSPEED_NAMES.get(key, key.removeprefix("deepspeed_config.")), "not set")
        value = section.get(key.removeprefix("deepspeed_config."), accelerate.values.get(key))
        yield Finding(
            "error",
            f"{key} is {value!r} in {accelerate.name} and {theirs!r} in {deepspeed.name}. Neither wins: accelerate "
            f"stops on this key beside a DeepSpeed file. Remove it from {accelerate.name}.",
        )
    if accelerate.values.get("distributed_type") != "DEEPSPEED":
        yield Finding(
            "warning",
            f"distributed_type is {accelerate.values.get('distributed_type')!r} in {accelerate.name}, so a plain "
            f"Accelerate script ignores {deepspeed.name}; Trainer uses it where its arguments name it.",
        )
    yield from _batch(accelerate, deepspeed)


_DEEPSPEED_NAMES: Final = {
    "mixed_precision": "bf16.enabled",
    "deepspeed_config.zero_stage": "zero_optimization.stage",
    "deepspeed_config.offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "deepspeed_config.offload_param_device": "zero_optimization.offload_param.device",
}


def _batch(accelerate: ConfigFile, deepspeed: ConfigFile) -> Iterator[Finding]:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, accumulation = (deepspeed.values.get(name) for name in names)
    ranks = accelerate.values.get("num_processes")
    groups = int((deepspeed.values.get("tensor_parallel") or {}).get("autotp_size") or 1)
    ranks = ranks // groups if isinstance(ranks, int) and groups > 1 else ranks
    sizes = (total, micro, accumulation, ranks)
    if all(isinstance(size, int) for size in sizes) and total != micro * accumulation * ranks:  # type: ignore[operator]
        yield Finding(
            "error",
            f"train_batch_size is {total} in {deepspeed.name}, but {micro} x {accumulation} steps x {ranks} processes "
            f"({accelerate.name}) make {micro * accumulation * ranks}. DeepSpeed stops on it.",  # type: ignore[operator]
        )


def _accelerate_against_training(accelerate: ConfigFile, training: ConfigFile) -> Iterator[Finding]:
    launched = accelerate.values.get("mixed_precision") or "no"
    asked = next((name for name in ("bf16", "fp16") if training.values.get(name)), "no")
    if launched != asked:
        winner = training.name if asked != "no" else accelerate.name
        yield Finding(
            "warning",
            f"mixed_precision is {launched!r} in {accelerate.name}, but {training.name} asks for {asked!r}. "
            f"{winner} wins: Trainer takes the launcher's only where neither bf16 nor fp16 is set.",
        )
    if training.values.get("fsdp"):
        yield from _fsdp(accelerate, training)


def _fsdp(accelerate: ConfigFile, training: ConfigFile) -> Iterator[Finding]:
    """Compare FSDP's settings: Trainer's win, and the launcher's count only for keys that Trainer leaves out."""
    launched = {key.removeprefix("fsdp_"): value for key, value in (accelerate.values.get("fsdp_config") or {}).items()}
    asked = {key.removeprefix("fsdp_"): value for key, value in (training.values.get("fsdp_config") or {}).items()}
    for key in sorted(launched.keys() & asked.keys()):
        if str(launched[key]).lower() != str(asked[key]).lower():
            fsdp1 = key == "reshard_after_forward" and str(asked.get("version", 2)) == "1"
            winner = f"{accelerate.name} wins (by its sharding_strategy)" if fsdp1 else f"{training.name} wins"
            yield Finding(
                "warning",
                f"fsdp_config.{key} is {launched[key]!r} in {accelerate.name} and {asked[key]!r} in {training.name}. "
                f"{winner}.",
            )


def _accelerate_alone(accelerate: ConfigFile) -> Iterator[Finding]:
    kind = accelerate.values.get("distributed_type")
    if accelerate.values.get("use_cpu") and kind not in ("NO", "MULTI_CPU"):
        yield Finding(
            "error",
            f"use_cpu is true and distributed_type {kind!r} in {accelerate.name}. use_cpu wins: the launcher starts "
            "one plain process, silently. Set use_cpu: false here, and use_cpu in the training arguments.",
        )


# --- in the child process ---------------------------------------------------------------------------------------------


def _ask(request: dict[str, Any], folder: Path) -> list[str]:
    sources: dict[str, ConfigFile] = {source["kind"]: ConfigFile(**source) for source in request["sources"]}
    parsers.pretend_world(_world_size(sources))  # type: ignore[arg-type]
    checks = {"accelerate": _read_accelerate, "deepspeed": _read_deepspeed, "training": _read_training}
    return [
        f"{source.name}: {line}"
        for kind, source in sources.items()
        for line in problems_of(lambda kind=kind, source=source: checks[kind](source, folder))  # type: ignore[misc]
    ]


def _read_accelerate(source: ConfigFile, folder: Path) -> list[str]:
    _, ignored = parsers.launch_arguments(source.values, [], folder)
    return [f"accelerate ignores {key}; give it on the command line" for key in ignored]


def _read_deepspeed(source: ConfigFile, folder: Path) -> list[str]:
    filled = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    without_total = {key: value for key, value in source.values.items() if key != "train_batch_size"}
    _, ignored = parsers.deepspeed_settings(without_total, filled)
    return [f"DeepSpeed ignores {key}" for key in ignored]


def _read_training(source: ConfigFile, folder: Path) -> list[str]:
    from transformers import TrainingArguments

    known = TrainingArguments.__dataclass_fields__
    values = {key: value for key, value in source.values.items() if key in known and key != "deepspeed"}
    _, ignored = parsers.training_arguments(values, {}, folder)
    unknown = [key for key in source.values if key not in known]
    return [f"transformers ignores {key}" for key in [*ignored, *unknown]]


if __name__ == "__main__":
    answer_check(_ask)
