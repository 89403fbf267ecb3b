"""The exact messages about invalid configuration files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from shardmake.config import models
from shardmake.config.accelerators import ACCELERATORS
from shardmake.config.load import load_cluster, load_config, parse_config
from shardmake.config.models import STRATEGIES, Checkpoints, Cluster, Config, Run, Schedule
from shardmake.config.schema import Schema
from shardmake.config.script_file import SCRIPT_VARIABLES, SERVICE_VARIABLES
from shardmake.core.errors import ShardmakeError
from tests.unit.config.samples import CLUSTER, RUN, make_run, merged, write

FIELDS = ", ".join(Run.model_fields)
RUN_KEYS = f"{FIELDS}, base, sweep"
DATA_KEYS = (
    "train, eval, eval_fraction, format, columns, loss_on, order, chat_template, template_arguments, turns, on_bad_row, "
    "subset, revision"
)
KNOWN = f"Known: {', '.join(ACCELERATORS)}. For another GPU, name the most similar one and set gpu_memory_gib."
TEXT_OR_NUMBER = "YAML reads this as a number, also a time such as 12:00:00. Put it in quotes."
TEXT_OR_TRUTH = "YAML reads on, off, yes and no as true or false. Put the word in quotes."


def errors_of_config(tmp_path: Path, values: Any) -> list[str]:
    path = write(tmp_path / "config.yaml", values)
    with pytest.raises(ShardmakeError) as error:
        load_config(path)
    first, *lines = str(error.value).splitlines()
    assert first == f"{path} cannot be used:"
    return lines


def errors_of_cluster(tmp_path: Path, changes: dict[str, Any]) -> list[str]:
    with pytest.raises(ShardmakeError) as error:
        load_cluster(write(tmp_path / "cluster.yaml", merged(CLUSTER, changes)))
    return str(error.value).splitlines()[1:]


WHOLE_RUN = (
    "set exactly",
    "data.order '",
    "service_nodes need",
    "service needs",
    "service is",
    "service_nodes cannot",
    "service.command: $",
    "script_args: $",
)
"""Beginnings of messages about keys that contradict each other, which follow the run's name after a colon."""
INVALID_RUNS: list[tuple[dict[str, Any], list[str]]] = [
    ({"data": {"train": "a", "order": "length"}, "packing": True}, [
        "data.order 'length' has no effect with packing, which fills each sequence with examples that fit. "
        "Set packing: false."]),
    ({"data": {"train": "a", "order": "given"}, "script": "train.py"}, [
        "data.order 'given' has no effect with script, which reads its own data. Remove data.order."]),
    ({"script": "t.py", "service_nodes": 1}, [
        "service_nodes need a service with a command. Add the section service, or remove service_nodes."]),
    ({"script": "t.py", "nodes": 2, "service": {"command": "serve"}}, [
        "service needs nodes of its own. Set service_nodes: 1, or remove the section."]),
    ({"nodes": 2, "service_nodes": 1, "service": {"command": "serve"}}, [
        "service is for a script, which sends it requests. Set script, or remove the section."]),
    ({"script": "t.py", "service_nodes": 1, "service": {"command": "serve"}}, [
        "service_nodes cannot be combined with a number of nodes that the plan chooses, because the service is made for "
        "a number of ranks. Set nodes."]),
    ({"script": "t.py", "nodes": 2, "service_nodes": 0, "service": {"command": "serve"}}, [
        "service_nodes: 0 is not allowed. Allowed: a whole number from 1 to 100,000."]),
    ({"script": "t.py", "nodes": 2, "service_nodes": 1, "service": {"command": "serve", "health": "health"}}, [
        "service.health: 'health' is not a path. Begin it with '/', as in /health."]),
    ({"script": "t.py", "nodes": 2, "service_nodes": 1, "service": {"command": "serve $SHARDMAKE_SERVICE_HOSTS"}}, [
        "service.command: $SHARDMAKE_SERVICE_HOSTS is not set for this program. Did you mean 'SHARDMAKE_SERVICE_HOST'? "
        f"Use one of {', '.join((*SCRIPT_VARIABLES, *SERVICE_VARIABLES[:2]))}."]),
    ({"script": "t.py", "script_args": ["$SHARDMAKE_SERVICE_PORT"]}, [
        "script_args: $SHARDMAKE_SERVICE_PORT is set only for a run with a service. Add service and service_nodes."]),
    ({"strategy": "zero33"}, [
        f"strategy: 'zero33' is not allowed. Did you mean 'zero3'? Allowed: {', '.join(STRATEGIES)}, auto."]),
    ({"strategy": "aut"}, [
        f"strategy: 'aut' is not allowed. Did you mean 'auto'? Allowed: {', '.join(STRATEGIES)}, auto."]),
    ({"scheduler": "cosin"}, [
        f"scheduler: 'cosin' is not allowed. Did you mean 'cosine'? Allowed: {', '.join(get_args(Schedule))}."]),
    ({"sequnce_length": 5}, [f"sequnce_length: there is no such key. Did you mean 'sequence_length'? "
                             f"Allowed here: {RUN_KEYS}."]),
    ({"cuda": 5}, [f"cuda: there is no such key. Allowed here: {RUN_KEYS}."]),
    ({"data": {"train": "a", "format": "cat"}}, ["data.format: 'cat' is not allowed. Did you mean 'chat'? Allowed: "
                                                 "auto, raw, chat, sharegpt, alpaca, prompt-completion, text, preference, "
                                                 "unpaired-preference."]),
    ({"data": {"train": "a", "columns": {"promt": "q"}}}, ["data.columns.promt: there is no such key. Did you mean "
     "'prompt'? Allowed here: messages, role, content, tools, template_arguments, system, prompt, completion, label, "
     "text, chosen, rejected, instruction, input, output."]),
    ({"data": {"train": "a", "columns": {"prompt": 3}}}, ["data.columns.prompt: 3 is not allowed. Allowed: text. YAML "
     "reads this as a number, also a time such as 12:00:00. Put it in quotes."]),
    ({"data": {"train": "a", "columns": {"prompt": "q", "text": "t"}}}, ["data: columns: no format reads prompt and "
     "text. chat reads messages, tools, template_arguments, role, content; sharegpt reads messages, tools, "
     "template_arguments, system, role, content; alpaca reads instruction, output, input, system; prompt-completion "
     "reads prompt, completion, tools, template_arguments, role, content; text reads text; preference reads chosen, "
     "rejected, prompt, tools, template_arguments, role, content; unpaired-preference reads prompt, completion, label, "
     "tools, template_arguments, role, content."]),
    ({"data": {"train": "a", "format": "text", "columns": {"prompt": "q"}}}, ["data: columns: no format reads prompt. "
     "text reads text."]),
    ({"data": {"train": "a", "evl": "b"}}, ["data.evl: there is no such key. Did you mean 'eval'? "
                                            f"Allowed here: {DATA_KEYS}."]),
    ({"data": {}}, ["data.train: this key is required and missing."]),
    ({"data": "train.jsonl"}, [f"data: 'train.jsonl' is not allowed. Allowed: the keys {DATA_KEYS}."]),
    ({"data": None}, [f"data: the value is missing. Allowed: the keys {DATA_KEYS}."]),
    ({"model": ...}, ["model: this key is required and missing."]),
    ({"model": ..., "sequence_length": ...}, ["model: this key is required and missing.",
                                            "sequence_length: this key is required and missing."]),
    ({"model": 7}, [f"model: 7 is not allowed. Allowed: text. {TEXT_OR_NUMBER}"]),
    ({"revision": True}, [f"revision: True is not allowed. Allowed: text. {TEXT_OR_TRUTH}"]),
    ({"sequence_length": 0}, ["sequence_length: 0 is not allowed. Allowed: a whole number from 1 to 10,000,000."]),
    ({"sequence_length": "256"}, ["sequence_length: '256' is not allowed. Allowed: a whole number from 1 to 10,000,000."]),
    ({"sequence_length": 2.5}, ["sequence_length: 2.5 is not allowed. Allowed: a whole number from 1 to 10,000,000."]),
    ({"sequence_length": True}, ["sequence_length: True is not allowed. Allowed: a whole number from 1 to 10,000,000."]),
    ({"sequence_length": None}, ["sequence_length: the value is missing. Allowed: a whole number from 1 to 10,000,000."]),
    ({"micro_batch_size": "many"}, ["micro_batch_size: 'many' is not allowed. Allowed: a whole number from 1 to 10,000,000, auto."]),
    ({"micro_batch_size": -1}, ["micro_batch_size: -1 is not allowed. Allowed: a whole number from 1 to 10,000,000, auto."]),
    ({"gradient_checkpointing": "on"}, ["gradient_checkpointing: 'on' is not allowed. Allowed: true, false, auto."]),
    ({"packing": 1}, ["packing: 1 is not allowed. Allowed: true, false."]),
    ({"learning_rate": "fast"}, ["learning_rate: 'fast' is not allowed. Allowed: a number > 0 and <= 100."]),
    ({"learning_rate": 0}, ["learning_rate: 0 is not allowed. Allowed: a number > 0 and <= 100."]),
    ({"learning_rate": float("inf")}, ["learning_rate: inf is not allowed. Allowed: a number > 0 and <= 100."]),
    ({"learning_rate": False}, ["learning_rate: False is not allowed. Allowed: a number > 0 and <= 100."]),
    ({"warmup_ratio": 1.5}, ["warmup_ratio: 1.5 is not allowed. Allowed: a number from 0 to 1."]),
    ({"data": {"train": "a", "eval_fraction": 0.5}}, ["data.eval_fraction: 0.5 is not allowed. Allowed: a number > 0 "
                                                      "and < 0.5."]),
    ({"epochs": 1}, ["set exactly one of max_steps and epochs."]),
    ({"max_steps": ...}, ["set exactly one of max_steps and epochs."]),
    ({"max_steps": ..., "epochs": -1}, ["epochs: -1 is not allowed. Allowed: a number > 0 and <= 100,000."]),
    ({"lora": {"targets": "all-lin"}}, ["lora.targets: 'all-lin' is not allowed. Did you mean 'all-linear'? Allowed: a list of "
                                    "text, all-linear."]),
    ({"lora": {"targets": ["q", 1]}}, [f"lora.targets.1: 1 is not allowed. Allowed: text. {TEXT_OR_NUMBER}"]),
    ({"lora": {"dropout": 1}}, ["lora.dropout: 1 is not allowed. Allowed: a number >= 0 and < 1."]),
    ({"checkpoints": {"keep": 0}}, ["checkpoints.keep: 0 is not allowed. Allowed: a whole number from 1 to 1,000,000."]),
    ({"checkpoints": {"every_steps": "often"}}, ["checkpoints.every_steps: 'often' is not allowed. Allowed: a whole number from 1 to 1,000,000,000, "
                                                "auto."]),
    ({"evaluation": {"prompts": "Hello?"}}, ["evaluation.prompts: 'Hello?' is not allowed. Allowed: a list of text."]),
    ({"push": {"to": "published"}}, ["push.to: 'published' is not a destination. Write file:FOLDER, hub:ORG/NAME or s3://BUCKET/PREFIX."]),
    ({"push": {"to": ["file:a", "file:"]}}, ["push.to: 'file:' is not a destination. Write file:FOLDER, hub:ORG/NAME or s3://BUCKET/PREFIX."]),
    ({"push": {"to": "hub:name"}}, ["push.to: 'hub:name' is not a hub repository. Write hub:ORG/NAME."]),
    ({"push": {"to": 3}}, [f"push.to: 3 is not allowed. Allowed: text, a list of text. {TEXT_OR_NUMBER}"]),
    ({"push": {"to": "file:a/{name}"}}, ["push.to: 'file:a/{name}' has the unknown name {name}. Only {run}, the run's "
                                         "name, is replaced."]),
    ({"push": {"to": "file:$NOT_SET/a"}}, ["push.to: '$NOT_SET/a' cannot be expanded: the environment variable NOT_SET is "
                                           "not set. Set it, or write the path."]),
    ({"model": ""}, ["model: '' cannot be a path or an id. Write it without control characters, or remove the key."]),
    ({"script": "a\0b.py"}, ["script: 'a\\x00b.py' cannot be a path or an id. Write it without control characters, or "
     "remove the key."]),
    ({"model": "~nobody-here/base"}, ["model: '~nobody-here/base' cannot be expanded: there is no such user. Write the path."]),
    ({"script": "${NOT_SET}.py"}, ["script: '${NOT_SET}.py' cannot be expanded: the environment variable NOT_SET is not set. "
                                   "Set it, or write the path."]),
    ({"global_batch_size": 10**20}, ["global_batch_size: 100000000000000000000 is not allowed. Allowed: a whole number from 1 "
                                     "to 10,000,000."]),
    ({"seed": -1}, ["seed: -1 is not allowed. Allowed: a whole number from 0 to 4,294,967,295."]),
    ({"seed": 2**32}, ["seed: 4294967296 is not allowed. Allowed: a whole number from 0 to 4,294,967,295."]),
    ({"learning_rate": float("nan")}, ["learning_rate: nan is not allowed. Allowed: a number > 0 and <= 100."]),
    ({"max_shard_size": "5 parsecs"}, ["max_shard_size: Cannot parse the size '5 parsecs'. Write a number and a unit, such as "
                                       "5GB, 500MB or 2GiB."]),
    ({"max_shard_size": "5"}, ["max_shard_size: '5' is not the size of a file. Write a size from 1KB to 1000TB, such as 5GB."]),
    ({"fsdp_version": 1}, ["fsdp_version: runs use FSDP2 alone. Remove this key."]),
    ({"deepspeed_values": "auto"}, [
        'deepspeed_values: deepspeed.json always holds numbers. Remove this key; your own file can say "auto".']),
    ({"revision": ""}, ["revision: '' is empty. Write a value, or remove the key."]),
    ({"revision": "ma\x07in"}, ["revision: 'ma\\x07in' has the control character '\\x07'. Remove it."]),
    ({"lora": {"targets": ["q_proj", " "]}}, ["lora.targets: ' ' is empty. Write a value, or remove the key."]),
    ({"notify": {"command": ""}}, ["notify.command: '' is empty. Write a value, or remove the key."]),
    ({"data": {"train": "a", "subset": "\n"}}, ["data.subset: '\\n' is empty. Write a value, or remove the key."]),
    ({"push": "file:a"}, ["push: 'file:a' is not allowed. Allowed: the keys to, private, samples, revision, pull_request."]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), INVALID_RUNS)
def test_a_run_is_rejected_with_key_value_and_allowed_values(
    changes: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    lines = errors_of_config(tmp_path, {"cluster": "c.yaml", "runs": {"chat": merged(RUN, changes)}})
    separator = ": " if expected[0].startswith(WHOLE_RUN) else "."
    assert lines == [f"  runs.chat{separator}{line}" for line in expected]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"runs": {"a": RUN}}, ["cluster: this key is required and missing."]),
        ({"cluster": "c", "runs": {}}, ["runs: add at least one run."]),
        ({"cluster": "c", "runs": ["a"]}, [f"runs: ['a'] is not allowed. Allowed: names, each with the keys {FIELDS}."]),
        ({"cluster": "c", "runs": {"a": None}}, [f"runs.a: the value is missing. Allowed: the keys {FIELDS}."]),
        ({"cluster": "c", "runs": {"a/b": RUN}}, [
            "runs: 'a/b' cannot be the name of a run's folder. Use letters, digits, '.', '_' and '-'."]),
        ({"cluster": "c", "runs": {".a": RUN}}, [
            "runs: '.a' cannot be the name of a run's folder. Use letters, digits, '.', '_' and '-'."]),
        ({"cluster": "c", "runs": {2024: RUN}}, [
            "runs.2024: YAML reads this name as a number, as null, or as true or false. Put it in quotes."]),
        ({"cluster": "c", "runs": {"str": {**RUN, "int": 1}}}, [
            f"runs.str.int: there is no such key. Allowed here: {RUN_KEYS}."]),
        ({"cluster": "c", "run": {"a": RUN}}, ["runs: this key is required and missing.",
            "run: there is no such key. Did you mean 'runs'? Allowed here: cluster, runs, defaults."]),
    ],
)  # fmt: skip
def test_a_config_is_rejected(values: Any, expected: list[str], tmp_path: Path) -> None:
    assert errors_of_config(tmp_path, values) == [f"  {line}" for line in expected]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"executor": "slrum"}, ["executor: 'slrum' is not allowed. Did you mean 'slurm'? Allowed: local, slurm."]),
        ({"memory_gib_per_node": "480GB"}, ["memory_gib_per_node: '480GB' is not allowed. Allowed: a number > 0 and <= 65,536."]),
        ({"processes_per_node": ...}, ["processes_per_node: this key is required and missing."]),
        ({"slurm": {"time_limit": "5h"}}, [
            "slurm.time_limit: '5h' is not a time limit. Write [D-]HH:MM:SS in quotes, such as '24:00:00'."]),
        ({"slurm": {"time_limit": "24:00"}}, [
            "slurm.time_limit: '24:00' is not a time limit. Write [D-]HH:MM:SS in quotes, such as '24:00:00'."]),
        ({"slurm": {"time_limit": "00:00:00"}}, ["slurm.time_limit: '00:00:00' means no limit in Slurm. Write the limit of the "
                                                 "partition, such as '24:00:00'."]),
        ({"slurm": {"time_limit": "9999-00:00:00"}}, ["slurm.time_limit: '9999-00:00:00' is longer than a year. Write at most "
                                                      "'365-00:00:00'."]),
        ({"executor": "local", "slurm": {"partition": "gpu"}}, [
            "slurm: these parameters have no effect with `executor: local`. Remove the section, or write `executor: slurm`."]),
        ({"accelerator": "A100"}, ["accelerator: 'A100' is not in the catalogue of accelerators. Did you mean 'a100-40gb' or "
                                   f"'a100-80gb'? {KNOWN}"]),
        ({"accelerator": "h1000"}, [f"accelerator: 'h1000' is not in the catalogue of accelerators. Did you mean 'h100'? {KNOWN}"]),
        ({"accelerator": "gtx9999"}, [f"accelerator: 'gtx9999' is not in the catalogue of accelerators. {KNOWN}"]),
        ({"accelerator": "MI300X"}, ["accelerator: 'MI300X' is not supported. Nothing of Shardmake ran on AMD GPUs, and its checks of nodes ask nvidia-smi. Use NVIDIA GPUs."]),
        ({"gpu_memory_gib": 81920}, ["gpu_memory_gib: 81920 is not allowed. Allowed: a number from 1 to 1,024."]),
        ({"scratch": "$NOT_SET"}, ["scratch: '$NOT_SET' cannot be expanded: the environment variable NOT_SET is not set. Set "
                                   "it, or write the path."]),
        ({"slurm": {"setup": "module load cuda"}}, [
            "slurm.setup: 'module load cuda' is not allowed. Allowed: a list of text."]),
        ({"slurm": {"extra": {"nice": 1.5}}}, [
            f"slurm.extra.nice: 1.5 is not allowed. Allowed: text, a whole number from -2,147,483,648 to 2,147,483,647, true, false. {TEXT_OR_NUMBER}"]),
        ({"slurm": {"extra": ["nice"]}}, [
            "slurm.extra: ['nice'] is not allowed. Allowed: names, each with text or a whole number from -2,147,483,648 to 2,147,483,647 or true or false."]),
        ({"slurm": {"partion": "gpu"}}, [
            "slurm.partion: there is no such key. Did you mean 'partition'? Allowed here: partition, account, qos, "
            "constraint, cpu_partition, cpu_account, cpu_qos, cpu_constraint, time_limit, stage_time_limit, driver, "
            "driver_time_limit, driver_memory_gib, gpu_request, "
            "memory, gpu_type, signal_seconds, wckey, exclude, setup, srun_extra, container, extra."]),
        ({"slurm": {"gpu_type": "gpu:a100:4"}}, [
            "slurm.gpu_type: 'gpu:a100:4' is not the name of a GPU type. Write the name alone, as `sinfo --format=%G` prints "
            "it, such as a100."]),
        ({"slurm": {"extra": {"qos": "long"}}}, ["slurm.extra: 'qos' is set by the key slurm.qos. Write it there."]),
        ({"slurm": {"extra": {"gpus_per_node": 8}}}, ["slurm.extra: 'gpus_per_node' is set by the key slurm.gpu_request. Write it there."]),
        ({"env": {"NCCL-DEBUG": "INFO"}}, [
            "env.NCCL-DEBUG: 'NCCL-DEBUG' is not the name of an environment variable. Use letters, digits and '_'."]),
        ({"env": {"MASTER_ADDR": "c1"}}, ["env.MASTER_ADDR: MASTER_ADDR is set by the launcher for each rank. Remove it."]),
        ({"env": {"WANDB_API_KEY": "x"}}, ["env.WANDB_API_KEY: WANDB_API_KEY seems to be a secret, and this file is not. Export it "
                                           "in your shell: jobs inherit it."]),
        ({"env": {"NCCL_DEBUG": True}}, [f"env.NCCL_DEBUG: True is not allowed. Allowed: text, a whole number from -2,147,483,648 to 2,147,483,647. {TEXT_OR_TRUTH}"]),
    ],
)  # fmt: skip
def test_a_cluster_is_rejected(changes: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    assert errors_of_cluster(tmp_path, changes) == [f"  {line}" for line in expected]


def visible_text(without: str = "") -> st.SearchStrategy[str]:
    characters = st.characters(exclude_characters=without, exclude_categories=["Cs", "Cc"])
    return st.text(characters, min_size=1).filter(str.strip)


runs = st.fixed_dictionaries(
    {
        "model": st.just("org/base"),
        "data": st.fixed_dictionaries(
            {"train": visible_text("~$")},
            optional={"eval_fraction": st.floats(0.01, 0.4), "loss_on": st.just("all")},
        ),
        "sequence_length": st.integers(1, 2**20),
        "global_batch_size": st.integers(1, 4096),
        "learning_rate": st.floats(1e-8, 1.0),
        "method": st.sampled_from(["lora", "qlora"]),
    },
    optional={
        "strategy": st.sampled_from([*STRATEGIES, "auto"]),
        "micro_batch_size": st.integers(1, 64) | st.just("auto"),
        "warmup_ratio": st.floats(0, 1),
        "seed": st.integers(0, 2**32 - 1),
        "lora": st.fixed_dictionaries({}, optional={"targets": st.lists(visible_text()) | st.just("all-linear")}),
        "push": st.fixed_dictionaries(
            {"to": st.sampled_from(["file:{run}", "hub:a/{run}", ["file:{run}", "hub:a/{run}"]])}
        ),
    },
).flatmap(lambda run: st.sampled_from([{**run, "max_steps": 3}, {**run, "epochs": 1.5}]))


def names_differ(values: dict[str, Any]) -> bool:
    """Return whether the runs have different names without regard to case, as a hub destination needs."""
    return len({name.lower() for name in values}) == len(values)


names = st.from_regex(r"[A-Za-z0-9][\w.-]{0,8}", fullmatch=True).filter(str.isascii)


def test_text_of_several_lines_is_taken_where_it_has_a_meaning() -> None:
    run = make_run(
        evaluation={"prompts": ["a\n\tb"]}, notify={"command": "date\nhostname"}, script="t.py", script_args=[""]
    )
    assert (run.evaluation.prompts, run.script_args) == (["a\n\tb"], [""])


@given(values=st.dictionaries(names, runs, min_size=1, max_size=3).filter(names_differ))
def test_a_config_is_equal_after_writing_and_reading(values: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = parse_config({"cluster": "c.yaml", "runs": values}, "test")
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    assert load_config(path) == config


def test_every_number_has_a_lower_and_an_upper_limit() -> None:
    """Also numbers of types that are added later: no number of the configuration is without limits."""
    found = {where: node for model in (Config, Cluster) for where, node in numbers(Schema(model).root, model.__name__)}
    assert len(found) > 35
    for where, node in found.items():
        assert {"minimum", "exclusiveMinimum"} & set(node), where
        assert {"maximum", "exclusiveMaximum"} & set(node), where


def numbers(node: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every part of a schema that is a number."""
    if isinstance(node, dict):
        if node.get("type") in ("integer", "number") and "enum" not in node:
            yield where, node
        for key, inner in node.items():
            yield from numbers(inner, f"{where}.{key}")
    elif isinstance(node, list):
        for index, inner in enumerate(node):
            yield from numbers(inner, f"{where}.{index}")


NOT_PATHS = {
    "Columns": None,  # every key of the section
    "Data": {"subset", "revision"},
    "TrainSource": {"name", "subset", "revision"},
    "EvalSource": {"name", "subset", "revision"},
    "Notify": {"command"},  # the shell expands it
    "Service": {"command", "health"},
    "Push": {"to", "revision"},  # `to` begins with a kind; its paths are tested below
    "Run": {"revision"},
    "Slurm": {
        *("partition", "account", "qos", "constraint", "cpu_partition", "cpu_account", "cpu_qos", "cpu_constraint"),
        *("gpu_type", "wckey", "exclude"),
    },
    "Cluster": {"accelerator", "network_interface"},
}


def test_every_text_is_a_path_that_is_expanded_or_known_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is added later must be one or the other."""
    monkeypatch.setenv("HOME", "/home/ada")
    sections = {
        model for model in vars(models).values() if isinstance(model, type) and issubclass(model, models.Section)
    }
    for section in sections:
        known = NOT_PATHS.get(section.__name__, set())
        for name, field in section.model_fields.items():
            if known is not None and name not in known and (read := as_text(field)) is not None:
                assert read == "/home/ada/x", f"{section.__name__}.{name}"


def as_text(field: FieldInfo) -> str | None:
    """Return what a field makes of a path, None if it takes no text."""
    try:
        return str(TypeAdapter(field.rebuild_annotation()).validate_python("~/x"))
    except ValidationError:
        return None


def test_every_path_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("DATA", "/data")
    run = make_run(
        model="~/base", data={"train": "$DATA/a.jsonl", "eval": "${DATA}/b.jsonl"}, script="~/t.py",
        deepspeed_config="$DATA/ds.json", accelerate_config="$DATA/acc.yaml",
        evaluation={"lm_eval": ["piqa"], "lm_eval_path": "~/tasks"}, push={"to": ["file:~/out/{run}", "hub:lab/{run}", "s3://b$DATA/x"]},
    )  # fmt: skip
    assert run.model_dump(include={"model", "script", "deepspeed_config", "accelerate_config"}) == {
        "model": "/home/ada/base", "script": "/home/ada/t.py", "deepspeed_config": "/data/ds.json",
        "accelerate_config": "/data/acc.yaml",
    }  # fmt: skip
    assert (run.data.train, run.data.eval, run.evaluation.lm_eval_path) == (
        "/data/a.jsonl",
        "/data/b.jsonl",
        "/home/ada/tasks",
    )
    assert run.push is not None
    assert run.push.destinations == ["file:/home/ada/out/chat", "hub:lab/chat", "s3://b/data/x"]
    cluster = Cluster(**CLUSTER, nvme_path="$DATA/n", cache="~/c", scratch="$DATA")
    assert (cluster.nvme_path, cluster.cache, cluster.scratch) == ("/data/n", "/home/ada/c", "/data")
    assert parse_config({"cluster": "~/c.yaml", "runs": {"chat": RUN}}, "c").cluster == "/home/ada/c.yaml"


def test_accelerators_are_found_in_any_case() -> None:
    assert Cluster(**CLUSTER, accelerator="A100-80GB").accelerator == "a100-80gb"


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [("24:00:00", 1440), ("1-00:00:00", 1440), ("00:30:00", 30), ("00:00:01", 1), ("2-03:04:05", 3065), ("100:00:00", 6000)],
)  # fmt: skip
def test_a_time_limit_in_minutes_is_rounded_up(limit: str, minutes: int) -> None:
    assert Cluster(**CLUSTER, slurm={"time_limit": limit}).slurm.time_limit_minutes == minutes


@pytest.mark.parametrize(
    ("to", "destinations"), [("file:a", ["file:a"]), (["file:a", "hub:b/c"], ["file:a", "hub:b/c"])]
)
def test_destinations_are_a_list(to: Any, destinations: list[str]) -> None:
    push = make_run(push={"to": to}).push
    assert push is not None and push.destinations == destinations


@pytest.mark.parametrize(
    ("values", "steps", "most"),
    [({}, 100, 2), ({"every_steps": 200}, 100, 1), ({"every_steps": 10, "keep": 3}, 100, 3), ({"every_steps": 10}, None, 2),
     ({"every_steps": "auto"}, 5, 2), ({"keep_every_steps": 50, "every_steps": 10}, 100, 4)],
)  # fmt: skip
def test_a_run_that_saves_once_keeps_one_checkpoint(values: dict[str, Any], steps: int | None, most: int) -> None:
    assert Checkpoints(**values).most(steps) == most
