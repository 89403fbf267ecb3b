"""Write real checkpoints by FSDP2 training on the CPU: ``torchrun consolidate_train_fsdp.py OUT VARIANT...``.

Traits of a variant: ``trainer`` (Hugging Face's Trainer saves), ``tied``, ``bf16``, ``tp`` (also tensor parallel: tensors
are sharded in two dimensions), ``flat`` (saved without a level ``model``), ``fsdp1`` (saved as FSDP1's ShardedTensor),
``optim`` (optimizer state in the same folder), ``perrank`` and ``verl`` (per-rank files of Accelerate and verl).
Every variant writes ``OUT/VARIANT/checkpoint-2/pytorch_model_fsdp_0``, ``base`` and ``truth.safetensors``.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from shardmake.train.process_group import end_process, leave_together

STEPS = 2
PER_RANK = {"perrank": "pytorch_model_fsdp_rank{rank}.bin", "verl": "actor/model_world_size_{world}_rank_{rank}.pt"}


def main() -> None:
    out, *variants = sys.argv[1:]
    dist.init_process_group("gloo")
    for variant in variants:
        traits = variant.split("-")
        (train_with_trainer if "trainer" in traits else train)(Path(out) / variant, traits)
    leave_together()
    end_process()


def make_model(traits: list[str]) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=102, hidden_size=24, intermediate_size=52, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings="tied" in traits,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16 if "bf16" in traits else torch.float32)


def train(out: Path, traits: list[str]) -> None:
    model = make_model(traits)
    if dist.get_rank() == 0:
        model.save_pretrained(out / "base")
    wrap(model, traits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + (0 if "tp" in traits else dist.get_rank()))
        tokens = torch.randint(0, 101, (1, 16), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save(model, optimizer, out / f"checkpoint-{STEPS}" / "pytorch_model_fsdp_0", traits)
    save_truth(model, out)


def wrap(model: Any, traits: list[str]) -> None:
    world = dist.get_world_size()
    if "tp" not in traits:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def save(model: Any, optimizer: Any, folder: Path, traits: list[str]) -> None:
    rank = dist.get_rank()
    if file := PER_RANK.get(traits[0], "").format(world=dist.get_world_size(), rank=rank):
        (folder.parent / file).parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), folder.parent / file)
    elif "optim" in traits:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
    else:
        weights = get_model_state_dict(model)
        if "fsdp1" in traits:
            weights = {name: as_sharded_tensor(tensor) for name, tensor in weights.items()}
        dcp.save(weights if "flat" in traits else {"model": weights}, checkpoint_id=folder)


def as_sharded_tensor(tensor: Any) -> ShardedTensor:
    """Return the type of FSDP1's state dict; FSDP1 itself cannot run on a CPU."""
    local = tensor.to_local()
    rows = [0] * dist.get_world_size()
    dist.all_gather_object(rows, local.shape[0])
    offsets = [sum(rows[: dist.get_rank()]), *(0 for _ in local.shape[1:])]
    placement = f"rank:{dist.get_rank()}/cpu"
    shards = [Shard(local, ShardMetadata(offsets, list(local.shape), placement))] if local.numel() else []
    return init_from_local_shards(shards, *tensor.shape)


def save_truth(model: Any, out: Path) -> None:
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        names = {name for name, _ in model.named_parameters()}
        save_file({name: full[name].contiguous().clone() for name in names}, out / "truth.safetensors")
    dist.barrier()


def train_with_trainer(out: Path, traits: list[str]) -> None:
    """Train FSDP2 with the Trainer; on a CPU, Accelerate needs another distributed type to shard."""
    from accelerate import state
    from accelerate.utils import DistributedType
    from transformers import Trainer, TrainingArguments

    original = state.AcceleratorState.__init__

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("fsdp_plugin") is not None:
            state.PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        original(self, *args, **kwargs)

    state.AcceleratorState.__init__ = initialize
    model = make_model(traits)
    if dist.get_rank() == 0:
        model.save_pretrained(out / "base")
    settings = {
        "version": 2, "state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True,
    }  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=STEPS, save_steps=STEPS, per_device_train_batch_size=1, use_cpu=True,
        fsdp=True, fsdp_config=settings, bf16="bf16" in traits, learning_rate=1e-2, report_to=[],
    )  # fmt: skip
    tokens = torch.randint(0, 101, (8, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    assert type(trainer.model_wrapped).__name__.startswith("FSDP"), type(trainer.model_wrapped)
    save_truth(trainer.model_wrapped, out)


if __name__ == "__main__":
    main()
