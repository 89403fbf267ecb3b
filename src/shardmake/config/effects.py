"""Which stages read each setting, and whose results the setting can change: one table for every key.

A finished stage runs again only if a setting changed that can change its result. A plan of a training that has not
finished is also made again after any other change that it reads, so that the change takes effect.
"""

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from shardmake.config.inputs import is_local
from shardmake.config.models import OBJECTIVE_SECTIONS, Cluster, Run, Section
from shardmake.config.script_file import script_file
from shardmake.config.settings import run_keys
from shardmake.config.user_file_keys import is_tuning, judge
from shardmake.config.user_files import KINDS, Kind, read_user_file
from shardmake.core.atomic import sha256
from shardmake.core.errors import ConfigError
from shardmake.core.secrets import mask

SCRIPT: Final = "script.content"
TEMPLATE: Final = "data.chat_template.content"
RESULT_KEYS: Final = (SCRIPT, TEMPLATE, *(f"{kind}_config.content" for kind in KINDS))
"""Settings that can change what is trained."""
TUNING_KEYS: Final = tuple(f"{kind}_config.tuning" for kind in KINDS)
"""Settings of the user's own files that change memory, speed or logs alone, such as bucket sizes."""
CONTENT_KEYS: Final = (*RESULT_KEYS, *TUNING_KEYS)
_UNREADABLE: Final = "cannot be read"


def file_contents(run: Run) -> dict[str, str]:
    """Return the value of each of `CONTENT_KEYS`.

    These are the digests of a script and of a chat template, and the values of the user's own files as JSON.

    It does not raise: the stage that reads a broken file reports it.
    """
    contents = {SCRIPT: _digest(run.script, script_file), TEMPLATE: _digest(run.data.chat_template)}
    for kind in KINDS:
        result, tuning = _values(kind, run)
        contents |= {f"{kind}_config.content": result, f"{kind}_config.tuning": tuning}
    return contents


def _digest(name: str | None, find: Callable[[str], Path] = Path) -> str:
    try:
        return "null" if name is None else sha256(find(name))[:16]
    except (OSError, ConfigError):
        return _UNREADABLE


def _values(kind: Kind, run: Run) -> tuple[str, str]:
    """Return the values that can change the result and the others, without comments and those without effect."""
    try:
        file = read_user_file(kind, run)
    except ConfigError:
        return _UNREADABLE, _UNREADABLE
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for one in judge(file, run.script is not None) if file else ():
        if not one.is_idle:
            parts[is_tuning(one)][one.key] = one.value
    result, tuning = (json.dumps(dict(sorted(part.items()))) for part in parts)
    return result, tuning


STAGES: Final = ("fetch", "plan", "render", "data", "train", "consolidate", "evaluate", "push", "report")
CLUSTER: Final = "cluster."
"""Start of the keys of the cluster file."""


@dataclass(frozen=True)
class Effect:
    """One row of the table: keys, and what a change of them affects."""

    changes: tuple[str, ...]
    """Stages whose result can change. The stages after them follow through their input files."""
    reads: tuple[str, ...]
    """Further stages that read the keys, to check them or to choose how to run."""
    keys: tuple[str, ...]
    """Keys of a run, and of the cluster with `CLUSTER` before them. A key that ends with a dot is a whole section."""


_TRAINING: Final = ("plan", "render", "train")
_AFTER: Final = ("consolidate", "evaluate")


def _effect(changes: tuple[str, ...], reads: tuple[str, ...], words: str, *keys: str) -> Effect:
    return Effect(changes, reads, (*keys, *words.split()))


EFFECTS: Final = (
    _effect(
        ("fetch", "data", *_TRAINING), _AFTER,
        "model revision resume_from lora.adapter data.train data.eval data.subset data.revision",
    ),
    _effect(("data", *_TRAINING), _AFTER, "data. objective sequence_length packing seed trust_remote_code"),
    _effect(
        _TRAINING, (),
        "checkpoints.early_stopping method lora. freeze learning_rates script script_args service.command "
        "expert_parallel",  # the optimizer's states are in other groups
        *run_keys(is_result=True), *(f"{name}." for name in OBJECTIVE_SECTIONS),
        *(key for key in RESULT_KEYS if key != TEMPLATE),
    ),
    # How the training is spread over the hardware, watched and saved.
    _effect(
        (), _TRAINING,
        "strategy sequence_parallel service_nodes service. gradient_checkpointing activation_offload attention loss "
        "non_finite checkpoints. eval_every_steps report_to profile. memory_snapshot deepspeed_config "
        "accelerate_config cluster.executor cluster.max_nodes cluster.cpus_per_node cluster.memory_gib_per_node "
        "cluster.nvme_gib_per_node cluster.intra_node_gbps cluster.inter_node_gbps cluster.network_interface "
        "cluster.network_check_seconds cluster.hang_seconds cluster.node_mtbf_hours cluster.slurm.restart_in_place",
        *run_keys(is_result=False), *TUNING_KEYS,
    ),
    _effect(
        (), (*_TRAINING, "data", *_AFTER),
        "cluster.accelerator cluster.gpu_memory_gib cluster.processes_per_node cluster.nvme_path "
        "cluster.internet_on_compute_nodes cluster.scratch cluster.slurm. cluster.env cluster.environment "
        "data.chat_template",  # its content counts, with the other keys of the data
    ),
    _effect((), STAGES, "cluster.shared cluster.cache"),
    _effect((), ("train",), "cluster.trainings_per_user cluster.purge_days"),
    _effect(("consolidate",), ("plan",), "dtype max_shard_size final_checkpoint"),
    _effect((), ("plan", "evaluate"), "evaluation.batch_tokens evaluation.backend evaluation.processes"),
    _effect(("evaluate",), ("plan",), "evaluation."),
    _effect(("push",), ("plan",), "push."),
    # No stage works differently with these.
    _effect(
        (), (),
        "notify. cluster.login_memory_gib cluster.slurm.driver cluster.slurm.driver_time_limit "
        "cluster.slurm.driver_memory_gib",
    ),
)  # fmt: skip
"""Every key in one row. A key that is named stands before the section that has it."""


@functools.cache
def effect_of(key: str) -> Effect:
    """Return the row of ``key``; raise `KeyError` if the table has none."""
    named = next((row for row in EFFECTS if key in row.keys), None)
    found = named or next(
        (row for row in EFFECTS for part in row.keys if part[-1] == "." and key.startswith(part)), None
    )
    if found is None:
        raise KeyError(f"{key} is in no row of shardmake.config.effects.EFFECTS. Add it to the row of its stages.")
    return found


def _leaves(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted keys of a section's values with their fields, those of nested sections included."""
    for name, field in section.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        nested = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        yield from _leaves(nested, f"{prefix}{name}.") if nested else [(f"{prefix}{name}", field)]


_FIELDS: Final = dict((*_leaves(Run), *_leaves(Cluster, CLUSTER)))
_RUN_KEYS: Final = tuple(key for key in _FIELDS if not key.startswith(CLUSTER))
_CLUSTER_KEYS: Final = tuple(key for key in _FIELDS if key.startswith(CLUSTER))
KEYS: Final = (*_RUN_KEYS, *CONTENT_KEYS, *_CLUSTER_KEYS)
"""Every key of a run and of a cluster file, and the content of the small files that a run names."""


@functools.cache
def result_keys(stage: str) -> tuple[str, ...]:
    """Return the keys that can change the result of ``stage``."""
    return tuple(key for key in KEYS if stage in effect_of(key).changes)


@functools.cache
def read_keys(stage: str) -> tuple[str, ...]:
    """Return the keys that ``stage`` reads."""
    return tuple(key for key in KEYS if stage in (*effect_of(key).changes, *effect_of(key).reads))


@functools.cache
def default_of(key: str) -> str:
    """Return the text of a key that a configuration does not have: its default, or null."""
    if key in CONTENT_KEYS:
        return "null" if key in (SCRIPT, TEMPLATE) else "{}"
    field = _FIELDS[key]
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return as_text(TypeAdapter(Any).dump_python(default, mode="json"))


def is_allowed(key: str, value: Any) -> bool:
    """Return whether a configuration may have ``value`` for ``key``, as far as its type decides."""
    field = _FIELDS[key]
    kind: Any = Annotated[field.annotation, field]
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def values_of(run: Run, cluster: Cluster) -> dict[str, str]:
    """Return every setting as text, without secrets; those of a section that is not set are its defaults."""
    return run_values(run) | cluster_values(cluster)


def run_values(run: Run) -> dict[str, str]:
    """Return the part of `values_of` that a run has."""
    values, contents = run.model_dump(mode="json"), file_contents(run)
    own = {key: _text(values, key) for key in _RUN_KEYS}
    return own | {key: as_text(contents[key]) for key in CONTENT_KEYS}


def cluster_values(cluster: Cluster) -> dict[str, str]:
    """Return the part of `values_of` that a cluster file has."""
    values = {"cluster": cluster.model_dump(mode="json")}
    return {key: _text(values, key) for key in _CLUSTER_KEYS}


def _text(values: Any, key: str) -> str:
    for part in key.split("."):
        if values is None:
            return default_of(key)
        values = values[part]
    return as_text(values)


def own_values(values: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of ``values`` that differ from their defaults."""
    return {key: value for key, value in values.items() if value != default_of(key)}


def as_text(value: Any) -> str:
    """Return a setting as text. A secret is replaced, with a digest that shows whether it changed."""
    return _masked(value if isinstance(value, str) else json.dumps(value))


_masked = functools.lru_cache(maxsize=4096)(mask)


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return ``key: old -> new`` for each key of ``old`` and ``new`` that differs, if not only in a path's spelling."""
    keys = [*new, *(key for key in old if key not in new)]
    return [
        f"{key}: {old.get(key, 'not set')} -> {new.get(key, 'not set')}"
        for key in keys
        if old.get(key) != new.get(key)
        and not (key in old and key in new and _is_path(key) and _normalized(old[key]) == _normalized(new[key]))
    ]


@functools.cache
def _is_path(key: str) -> bool:
    """Return whether the value of ``key`` may be a path, in which the home folder is expanded."""
    try:
        read: object = TypeAdapter(_FIELDS[key].rebuild_annotation()).validate_python("~/x")
        return read != "~/x"
    except (KeyError, ValidationError):
        return False


def _normalized(text: str) -> str:
    """Return the text of a path, or of a list of sources, with the normal spelling of each local path."""
    if text.startswith("[{"):
        return json.dumps([{**one, "source": _normalized(one["source"])} for one in json.loads(text)])
    path = os.path.normpath(text)
    is_same = os.path.realpath(path) == os.path.realpath(text)  # not if .. leaves the target of a link
    return path if is_same and is_local(text) and is_local(path) else text
