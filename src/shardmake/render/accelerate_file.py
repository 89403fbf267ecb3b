"""``accelerate.yaml``: the ranks that `accelerate launch` starts, and their library."""

from typing import Any

from shardmake.config.models import Run
from shardmake.config.settings import SETTINGS
from shardmake.memory.model import Model
from shardmake.run.plan import Choice, Plan


def accelerate_config(plan: Plan, run: Run, model: Model) -> dict[str, Any]:
    """Return Accelerate's file.

    The node's rank, the address of node 0 and the place of the DeepSpeed file are known only at launch and stand on
    the command line. ``use_cpu`` is false also on CPU, because the launcher ignores it for these engines. The training
    arguments say that the ranks run on the CPU.
    """
    choice, spec = plan.choice, plan.choice.spec
    planned = {key: value for row in SETTINGS.values() for key, value in row.values(choice, run).items()}
    shared = ("distributed_type", "num_machines", "num_processes", "use_cpu")
    values: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"} | {key: planned[key] for key in shared}
    values["main_training_function"] = "main"
    if spec.is_deepspeed:
        # `standard` is torchrun: the default for several nodes is pdsh, which needs ssh.
        section = {"deepspeed_multinode_launcher": "standard", "zero3_init_flag": choice.zero_stage == 3}
        return values | {"deepspeed_config": section}
    values["mixed_precision"] = planned["mixed_precision"]
    if spec.is_fsdp:
        values["fsdp_config"] = {f"fsdp_{key}": value for key, value in fsdp_settings(choice, run, model).items()}
        # Replicas between nodes and shards within a node, or shards of tensor-parallel groups.
        mesh: dict[str, int] = {}
        if choice.tensor_parallel > 1:
            mesh = {"dp_shard_size": choice.data_parallel, "tp_size": choice.tensor_parallel}
        elif spec.hybrid:
            mesh = {"dp_replicate_size": choice.nodes, "dp_shard_size": choice.processes_per_node}
        if mesh:
            values["parallelism_config"] = {f"parallelism_config_{key}": size for key, size in mesh.items()}
    return values


def fsdp_settings(choice: Choice, run: Run, model: Model) -> dict[str, Any]:
    """Return FSDP's settings under accelerate's names, without their prefix ``fsdp_``."""
    spec = choice.spec
    values: dict[str, Any] = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ",".join(model.block_classes),
        "state_dict_type": "SHARDED_STATE_DICT",
        # Nothing broadcasts 4-bit weights. Transformers would leave a new head unwritten on all ranks but the first.
        "cpu_ram_efficient_loading": not run.method_spec.in_four_bits,
        "offload_params": spec.offload_param is not None,
        "activation_checkpointing": choice.gradient_checkpointing,
    }
    if run.activation_offload:
        values["activation_checkpointing_offload"] = True
    return values | {"reshard_after_forward": spec.reshard_after_forward}
