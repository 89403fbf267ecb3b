"""The refusals of a configuration: the rows state the key, ``wording.yaml`` the messages (tests/unit/wording.py)."""

from pathlib import Path
from typing import Any, get_args

import pytest

from shardmake.config.accelerators import ACCELERATORS
from shardmake.config.load import load_cluster, load_config
from shardmake.config.models import STRATEGIES, Run, Schedule
from shardmake.config.script_file import SCRIPT_VARIABLES, SERVICE_VARIABLES
from shardmake.core.errors import ConfigError
from tests.unit.config.samples import CLUSTER, RUN, merged, write
from tests.unit.wording import Wording

Rows = list[tuple[str, dict[str, Any]]]
LISTS = {
    "KEYS": Run.model_fields, "STRATEGIES": STRATEGIES, "SCHEDULES": get_args(Schedule), "ACCELERATORS": ACCELERATORS,
    "VARIABLES": (*SCRIPT_VARIABLES, *SERVICE_VARIABLES[:2]),
}  # fmt: skip
"""Lists in messages, which grow with the tables."""
RUNS: Rows = [
    ("data.order", {"data": {"train": "a", "order": "length"}, "packing": True}),
    ("data.order", {"data": {"train": "a", "order": "given"}, "script": "train.py"}),
    ("service_nodes", {"script": "t.py", "service_nodes": 1}),
    ("service", {"script": "t.py", "nodes": 2, "service": {"command": "serve"}}),
    ("service", {"nodes": 2, "service_nodes": 1, "service": {"command": "serve"}}),
    ("service_nodes", {"script": "t.py", "service_nodes": 1, "service": {"command": "serve"}}),
    ("service_nodes", {"script": "t.py", "nodes": 2, "service_nodes": 0, "service": {"command": "serve"}}),
    ("service.health", {"script": "t.py", "nodes": 2, "service_nodes": 1, "service": {"command": "serve", "health": "health"}}),
    ("service.command", {"script": "t.py", "nodes": 2, "service_nodes": 1, "service": {"command": "serve $SHARDMAKE_SERVICE_HOSTS"}}),
    ("script_args", {"script": "t.py", "script_args": ["$SHARDMAKE_SERVICE_PORT"]}),
    ("strategy", {"strategy": "zero33"}),
    ("strategy", {"strategy": "aut"}),
    ("scheduler", {"scheduler": "cosin"}),
    ("sequnce_length", {"sequnce_length": 5}),
    ("cuda", {"cuda": 5}),
    ("data.format", {"data": {"train": "a", "format": "cat"}}),
    ("data.columns.promt", {"data": {"train": "a", "columns": {"promt": "q"}}}),
    ("data.columns.prompt", {"data": {"train": "a", "columns": {"prompt": 3}}}),
    ("data", {"data": {"train": "a", "columns": {"prompt": "q", "text": "t"}}}),
    ("data", {"data": {"train": "a", "format": "text", "columns": {"prompt": "q"}}}),
    ("data.evl", {"data": {"train": "a", "evl": "b"}}),
    ("data.train", {"data": {}}),
    ("data", {"data": "train.jsonl"}),
    ("data", {"data": None}),
    ("model", {"model": ...}),
    ("model", {"model": ..., "sequence_length": ...}),
    ("model", {"model": 7}),
    ("revision", {"revision": True}),
    ("sequence_length", {"sequence_length": 0}),
    ("sequence_length", {"sequence_length": "256"}),
    ("sequence_length", {"sequence_length": 2.5}),
    ("sequence_length", {"sequence_length": True}),
    ("sequence_length", {"sequence_length": None}),
    ("micro_batch_size", {"micro_batch_size": "many"}),
    ("micro_batch_size", {"micro_batch_size": -1}),
    ("gradient_checkpointing", {"gradient_checkpointing": "on"}),
    ("packing", {"packing": 1}),
    ("learning_rate", {"learning_rate": "fast"}),
    ("learning_rate", {"learning_rate": 0}),
    ("learning_rate", {"learning_rate": float("inf")}),
    ("learning_rate", {"learning_rate": False}),
    ("warmup_ratio", {"warmup_ratio": 1.5}),
    ("data.eval_fraction", {"data": {"train": "a", "eval_fraction": 0.5}}),
    ("set", {"epochs": 1}),
    ("set", {"max_steps": ...}),
    ("epochs", {"max_steps": ..., "epochs": -1}),
    ("lora.targets", {"lora": {"targets": "all-lin"}}),
    ("lora.targets.1", {"lora": {"targets": ["q", 1]}}),
    ("lora.dropout", {"lora": {"dropout": 1}}),
    ("checkpoints.keep", {"checkpoints": {"keep": 0}}),
    ("checkpoints.every_steps", {"checkpoints": {"every_steps": "often"}}),
    ("evaluation.prompts", {"evaluation": {"prompts": "Hello?"}}),
    ("push.to", {"push": {"to": "published"}}),
    ("push.to", {"push": {"to": ["file:a", "file:"]}}),
    ("push.to", {"push": {"to": "hub:name"}}),
    ("push.to", {"push": {"to": 3}}),
    ("run", {"push": {"to": ["file:x", "file:./x"]}}),
    ("push.to", {"push": {"to": "file:a/{name}"}}),
    ("push.to", {"push": {"to": "file:$NOT_SET/a"}}),
    ("model", {"model": ""}),
    ("script", {"script": "a\x00b.py"}),
    ("model", {"model": "~nobody-here/base"}),
    ("script", {"script": "${NOT_SET}.py"}),
    ("global_batch_size", {"global_batch_size": 10**20}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 2**32}),
    ("learning_rate", {"learning_rate": float("nan")}),
    ("max_shard_size", {"max_shard_size": "5 parsecs"}),
    ("max_shard_size", {"max_shard_size": "5"}),
    ("fsdp_version", {"fsdp_version": 1}),
    ("deepspeed_values", {"deepspeed_values": "auto"}),
    ("context_parallel", {"context_parallel": 2}),
    ("revision", {"revision": ""}),
    ("revision", {"revision": "ma\x07in"}),
    ("lora.targets", {"lora": {"targets": ["q_proj", " "]}}),
    ("notify.command", {"notify": {"command": ""}}),
    ("data.subset", {"data": {"train": "a", "subset": "\n"}}),
    ("push", {"push": "file:a"}),
    # Keys without effect.
    ("lora", {"lora": {"rank": 8}}),
    ("lora", {"lora": {"rank": 16}}),
    ("lora", {"lora": {}}),
    ("warmup_ratio", {"scheduler": "constant", "warmup_ratio": 0.1}),
    ("data.eval_fraction", {"data": {"train": "a/b", "eval": "a/c", "eval_fraction": 0.1}}),
    ("checkpoints.early_stopping", {"checkpoints": {"early_stopping": 3}, "eval_every_steps": "never"}),
    ("final_checkpoint", {"final_checkpoint": "best"}),
    ("profile", {"profile": {"steps": 3}, "script": "train.py"}),
    ("freeze", {"freeze": ["*.mlp"], "script": "train.py"}),
    ("freeze", {"freeze": ["*.mlp"], "method": "lora"}),
    ("learning_rates", {"learning_rates": {"*.mlp": 1e-5}, "script": "train.py"}),
    ("learning_rates.*.mlp", {"learning_rates": {"*.mlp": 0}}),
    ("script_args", {"script_args": ["--lr"]}),
    ("checkpoints.asynchronous", {"script": "train.py", "checkpoints": {"asynchronous": True}}),
    ("evaluation.lm_eval_limit", {"evaluation": {"lm_eval_limit": 5}}),
    ("evaluation.lm_eval_path", {"evaluation": {"lm_eval_path": "tasks"}}),
    ("push.private", {"push": {"to": "file:a", "private": False}}),
    ("push.revision", {"push": {"to": "s3://a/b", "revision": "x"}}),
    ("evaluation.max_new_tokens", {"objective": "reward", "evaluation": {"max_new_tokens": 5}}),
    ("push.samples", {"objective": "reward", "push": {"to": "file:a", "samples": True}}),
    ("lora", {"objective": "dpo", "lora": {"rank": 8}}),
    # Objectives.
    ("kto", {"objective": "sft", "kto": {"beta": 0.2}}),
    ("packing", {"objective": "kto", "packing": True}),
    ("micro_batch_size", {"objective": "kto", "micro_batch_size": 1}),
    ("lora.targets", {"objective": "kto", "method": "lora", "lora": {"targets": ["lm_head"]}}),
    ("objective", {"objective": "kto", "data": {"train": "org/data", "format": "preference"}}),
    ("dpo", {"objective": "sft", "dpo": {"beta": 0.2}}),
    ("packing", {"objective": "dpo", "packing": True}),
    ("script", {"objective": "dpo", "script": "train.py"}),
    ("loss", {"objective": "dpo", "loss": "fused"}),
    ("loss", {"objective": "dpo", "loss": "chunked"}),
    ("freeze", {"objective": "dpo", "freeze": ["*.mlp"]}),
    ("learning_rates", {"objective": "dpo", "learning_rates": {"*.mlp": 1e-5}}),
    ("torch_compile", {"objective": "dpo", "torch_compile": True}),
    ("sequence_parallel", {"objective": "dpo", "sequence_parallel": 2}),
    ("tensor_parallel", {"objective": "dpo", "tensor_parallel": 2}),
    ("expert_parallel", {"objective": "dpo", "expert_parallel": 2}),
    ("lora.dropout", {"objective": "dpo", "method": "lora", "lora": {"dropout": 0.1}}),
    ("lora.targets", {"objective": "dpo", "method": "lora", "lora": {"targets": ["lm_head"]}}),
    ("data.loss_on", {"objective": "dpo", "data": {"train": "org/data", "loss_on": "all"}}),
    ("objective", {"objective": "dpo", "data": {"train": "org/data", "format": "chat"}}),
    ("dpo.loss_type.0", {"objective": "dpo", "dpo": {"loss_type": ["aot"]}}),
    ("dpo.loss_type", {"objective": "dpo", "dpo": {"loss_type": []}}),
    ("reward", {"objective": "dpo", "reward": {}}),
    ("dpo", {"objective": "reward", "dpo": {}}),
    ("packing", {"objective": "reward", "packing": True}),
    ("lora.targets", {"objective": "reward", "method": "lora", "lora": {"targets": ["lm_head"]}}),
    ("evaluation.prompts", {"objective": "reward", "evaluation": {"prompts": ["Hi"]}}),
    ("evaluation.losses", {"objective": "reward", "evaluation": {"losses": True}}),
    ("evaluation.lm_eval", {"objective": "reward", "evaluation": {"lm_eval": ["piqa"]}}),
    ("reward.center_rewards_coefficient", {"objective": "reward", "reward": {"center_rewards_coefficient": 0}}),
    ("objective", {"objective": "stf"}),
    # Variables of scripts.
    ("script_args", {"script": "train.py", "script_args": ["$SHARDMAKE_LEARNIG_RATE"]}),
    ("script_args", {"script": "train.py", "script_args": ["--lr=${SHARDMAKE_LEARNIG_RATE}"]}),
    ("script_args", {"script": "train.py", "script_args": ["a$SHARDMAKE_LEARNIG_RATE"]}),
    ("script_args", {"script": "train.py", "script_args": ["$SHARDMAKE_LEARNING_RATE"], "learning_rate": ...}),
    ("set", {"learning_rate": ...}),
]  # fmt: skip
"""The beginning of the message about a run, and its changes; a value of ``...`` removes the key."""
CONFIGS: Rows = [
    ("cluster", {"runs": {"a": RUN}, "cluster": ..., "defaults": ...}),
    ("runs", {"runs": {}, "defaults": ...}),
    ("runs", {"runs": ["a"], "defaults": ...}),
    ("runs.a", {"runs": {"a": None}, "defaults": ...}),
    ("runs", {"runs": {"a/b": RUN}, "defaults": ...}),
    ("runs", {"runs": {".a": RUN}, "defaults": ...}),
    ("runs.2024", {"runs": {2024: RUN}, "defaults": ...}),
    ("runs.str.int", {"runs": {"str": {**RUN, "int": 1}}, "defaults": ...}),
    ("runs", {"run": {"a": RUN}, "defaults": ...}),
    ("runs.dpo.model", {"runs": {"sft": {}, "dpo": {"model": "run:stf"}}}),
    ("runs.dpo.model", {"runs": {"dpo": {"model": "run:"}}}),
    ("runs.dpo.model", {"runs": {"sft": {"sweep": {"seed": [1, 2]}}, "dpo": {"model": "run:sft"}}}),
    ("runs.sft.model", {"runs": {"judge": {"objective": "reward"}, "sft": {"model": "run:judge"}}}),
    ("runs.a.model", {"runs": {"a": {"model": "run:a"}}}),
    ("runs.b.model", {"runs": {"a": {"model": "run:b"}, "b": {"model": "run:c"}, "c": {"model": "run:b"}}}),
    ("runs.dpo.model", {"runs": {"sft": {}, "dpo": {"model": "runs/sft/model"}}}),
    ("runs.b.revision", {"runs": {"a": {}, "b": {"model": "run:a", "revision": "v2"}}}),
    ("runs.a.base", {"runs": {"a": {"base": "bb"}, "b": {}}}),
    ("runs.a.base", {"runs": {"a": {"base": ["b"]}, "b": {}}}),
    ("runs.b.base", {"runs": {"a": {"base": "b"}, "b": {"base": "a"}}}),
    ("runs.a.base", {"runs": {"a": {"base": "a"}}}),
    ("defaults", {"runs": {"a": RUN}, "defaults": 3}),
    ("runs.a.sweep", {"runs": {"a": {"sweep": 3}}}),
    ("runs.a.sweep", {"runs": {"a": {"sweep": {"seed": 3}}}}),
    ("runs.a.sweep", {"runs": {"a": {"sweep": [3]}}}),
    ("runs.a.sweep", {"runs": {"a": {"sweep": {"seed": [1, 1]}}}}),
    ("runs.a", {"runs": {"a": {"sweep": {"seed": [1]}}, "a-s1": {}}}),
    ("runs.a.sweep", {"runs": {"a": {"sweep": {"seed": [*range(40)], "max_steps": [*range(40)]}}}}),
    ("runs.a.seed", {"runs": {"a": {}, "b": {}, "c": {"seed": -2}}, "defaults": {**RUN, "seed": -1}}),
    ("runs.b", {"runs": {"a": RUN, "b": {"base": "a", "epochs": 2}}, "defaults": ...}),
    ("runs.a-s-1.seed", {"runs": {"a": {"sweep": {"seed": [-1]}}}}),
    ("sweeps", {"runs": {"a": {}}, "sweeps": {"a": ["b"]}}),
    ("runs", {"runs": None, "defaults": ...}),
    ("runs", {"runs": 3, "defaults": ...}),
    ("runs", {"runs": [], "defaults": ...}),
    ("runs.a", {"runs": {"a": 3}, "defaults": ...}),
    ("runs.1", {"runs": {1: RUN}, "defaults": ...}),
]  # fmt: skip
CLUSTERS: Rows = [
    ("executor", {"executor": "slrum"}),
    ("memory_gib_per_node", {"memory_gib_per_node": "480GB"}),
    ("processes_per_node", {"processes_per_node": ...}),
    ("slurm.time_limit", {"slurm": {"time_limit": "5h"}}),
    ("slurm.time_limit", {"slurm": {"time_limit": "24:00"}}),
    ("slurm.time_limit", {"slurm": {"time_limit": "00:00:00"}}),
    ("slurm.time_limit", {"slurm": {"time_limit": "9999-00:00:00"}}),
    ("slurm", {"executor": "local", "slurm": {"partition": "gpu"}}),
    ("accelerator", {"accelerator": "A100"}),
    ("accelerator", {"accelerator": "h1000"}),
    ("accelerator", {"accelerator": "gtx9999"}),
    ("accelerator", {"accelerator": "MI300X"}),
    ("gpu_memory_gib", {"gpu_memory_gib": 81920}),
    ("scratch", {"scratch": "$NOT_SET"}),
    ("slurm.setup", {"slurm": {"setup": "module load cuda"}}),
    ("slurm.extra.nice", {"slurm": {"extra": {"nice": 1.5}}}),
    ("slurm.extra", {"slurm": {"extra": ["nice"]}}),
    ("slurm.spare_nodes", {"slurm": {"spare_nodes": 1}}),
    ("slurm.spare_nodes", {"slurm": {"spare_nodes": 1, "restart_in_place": True, "extra": {"requeue": True}}}),
    ("slurm.partion", {"slurm": {"partion": "gpu"}}),
    ("slurm.gpu_type", {"slurm": {"gpu_type": "gpu:a100:4"}}),
    ("slurm.extra", {"slurm": {"extra": {"qos": "long"}}}),
    ("slurm.extra", {"slurm": {"extra": {"gpus_per_node": 8}}}),
    ("env.NCCL-DEBUG", {"env": {"NCCL-DEBUG": "INFO"}}),
    ("env.MASTER_ADDR", {"env": {"MASTER_ADDR": "c1"}}),
    ("env.WANDB_API_KEY", {"env": {"WANDB_API_KEY": "x"}}),
    ("env.NCCL_DEBUG", {"env": {"NCCL_DEBUG": True}}),
    ("slurm.container.binds.0", {"slurm": {"container": {"image": "x", "binds": ["data:/data"]}}}),
    ("slurm.container.binds.0", {"slurm": {"container": {"image": "x", "binds": ["/a,/b"]}}}),
    ("slurm.container.binds.0", {"slurm": {"container": {"image": "x", "binds": ["/a:/b:rx"]}}}),
    ("slurm.container.kind", {"slurm": {"container": {"image": "x", "kind": "docker"}}}),
    ("slurm", {"executor": "local", "slurm": {"container": {"kind": "apptainer", "image": "x.sif"}}}),
    ("env", {"slurm": {"container": {"kind": "apptainer", "image": "x.sif"}}, "env": {"PYTHONPATH": "/mine"}}),
    ("environment", {"executor": "local", "environment": "/x"}),
    ("environment", {"slurm": {"container": {"kind": "apptainer", "image": "x.sif"}}, "environment": "/x"}),
    ("environment", {"environment": "env"}),
    ("slurm.extra", {"slurm": {"extra": {"job-name": "1"}}}),
    ("slurm.extra", {"slurm": {"extra": {"array": "1"}}}),
    ("slurm.extra", {"slurm": {"extra": {"--nodes": "1"}}}),
    ("slurm.extra", {"slurm": {"extra": {"ntasks": "1"}}}),
    ("slurm.extra", {"slurm": {"extra": {"export": "1"}}}),
    ("slurm.extra", {"slurm": {"extra": {"signal": "1"}}}),
    ("slurm.extra", {"slurm": {"extra": {"clusters": "1"}}}),
    ("slurm.extra", {"slurm": {"extra": {"mem_per_cpu": "1"}}}),
    ("slurm.extra", {"slurm": {"extra": {"wait": "1"}}}),
    ("slurm.extra", {"slurm": {"extra": {"output": "1"}}}),
]  # fmt: skip


def named(value: object) -> str:
    return str(value).replace("'", "")


def lines_of(error: ConfigError, path: object, wording: Wording) -> list[str]:
    """Return the lines of a message after the first one, and compare their wording."""
    first, *lines = str(error).splitlines()
    assert first == f"{path} cannot be used:"
    text = "\n".join(line.strip() for line in lines)
    for name, values in LISTS.items():
        text = text.replace(", ".join(values), name)
    wording(text)
    return lines


@pytest.mark.parametrize(("key", "changes"), RUNS, ids=named)
def test_a_run_is_refused(key: str, changes: dict[str, Any], tmp_path: Path, wording: Wording) -> None:
    path = write(tmp_path / "config.yaml", {"cluster": "c.yaml", "runs": {"chat": merged(RUN, changes)}})
    with pytest.raises(ConfigError) as error:
        load_config(path)
    lines = lines_of(error.value, path, wording)
    assert lines[0].startswith((f"  runs.chat.{key}", f"  runs.chat: {key}", f"  runs: {key}"))


@pytest.mark.parametrize(("key", "changes"), CONFIGS, ids=named)
def test_a_configuration_is_refused(key: str, changes: dict[str, Any], tmp_path: Path, wording: Wording) -> None:
    path = write(tmp_path / "config.yaml", merged({"cluster": "c.yaml", "defaults": RUN}, changes))
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert lines_of(error.value, path, wording)[0].startswith(f"  {key}: ")


@pytest.mark.parametrize(("key", "changes"), CLUSTERS, ids=named)
def test_a_cluster_is_refused(key: str, changes: dict[str, Any], tmp_path: Path, wording: Wording) -> None:
    path = write(tmp_path / "cluster.yaml", merged(CLUSTER, changes))
    with pytest.raises(ConfigError) as error:
        load_cluster(path)
    assert lines_of(error.value, path, wording)[0].startswith(f"  {key}: ")
