"""Write real checkpoints by training on the CPU: ``torchrun consolidate_train.py OUT VARIANT...``.

Every variant writes ``OUT/VARIANT/checkpoint-2`` in the Trainer's layout, ``OUT/VARIANT/base`` (the model's folder) and
``OUT/VARIANT/truth.safetensors``, the weights that the ranks gathered at the end of training. DeepSpeed trains a variant
that begins with ``zero``. Traits of the others, of FSDP2: ``trainer`` (Hugging Face's Trainer saves), ``tied``, ``bf16``,
``tp`` (also tensor parallel: tensors are sharded in two dimensions), ``flat`` (saved without a level ``model``), ``fsdp1``
(saved as FSDP1's ShardedTensor), ``optim`` (optimizer state in the same folder), ``perrank`` and ``verl`` (per-rank files
of Accelerate and verl).
"""

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, ResNetConfig, ResNetForImageClassification

from shardmake.train.process_group import end_process, leave_together

STEPS = 2
SHAPE = {
    "hidden_size": 24, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
PER_RANK = {"perrank": "pytorch_model_fsdp_rank{rank}.bin", "verl": "actor/model_world_size_{world}_rank_{rank}.pt"}


def main() -> None:
    out, *variants = sys.argv[1:]
    deepspeed.init_distributed("gloo")
    get_accelerator().is_fp16_supported = lambda: True  # torch supports it on any CPU, slowly
    for variant in variants:
        traits, folder = variant.split("-"), Path(out) / variant
        torch.manual_seed(0)
        model = make_model(traits)
        if dist.get_rank() == 0:
            model.save_pretrained(folder / "base")
        by_fsdp = train_with_trainer if "trainer" in traits else train
        truth = (train_with_deepspeed if traits[0].startswith("zero") else by_fsdp)(model, folder, traits)
        if dist.get_rank() == 0:
            save_file({name: one.contiguous().clone() for name, one in truth.items()}, folder / "truth.safetensors")
        dist.barrier()
    leave_together()
    end_process()


def make_model(traits: list[str]) -> torch.nn.Module:
    if "resnet" in traits:
        shape = dict(embedding_size=6, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=3)
        return ResNetForImageClassification(ResNetConfig(**shape))
    by_deepspeed = traits[0].startswith("zero")
    config = LlamaConfig(**SHAPE, vocab_size=101 if by_deepspeed else 102, tie_word_embeddings="tied" in traits)
    return LlamaForCausalLM(config).to(torch.bfloat16 if "bf16" in traits and not by_deepspeed else torch.float32)


def tokens_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 101, (1, 16), generator=torch.Generator().manual_seed(100 * step + rank))


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def train_with_deepspeed(model: torch.nn.Module, out: Path, traits: list[str]) -> dict[str, torch.Tensor]:
    """Train one variant, such as ``zero3-bf16-tied``."""
    if "lora" in traits:
        model = add_adapter(model, out / f"checkpoint-{STEPS}")
    if "frozen" in traits:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "layers.1" not in name and "embed" not in name
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=settings(traits))
    for step in range(STEPS):
        engine.backward(forward(engine, traits, step))
        engine.step()
    engine.save_checkpoint(str(out / f"checkpoint-{STEPS}"), exclude_frozen_parameters="nobase" in traits)
    dist.barrier()
    if "universal" in traits and dist.get_rank() == 0:
        make_universal(out / f"checkpoint-{STEPS}" / f"global_step{STEPS}", out / "universal")
    return gathered(engine, traits)


def add_adapter(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """Return a PEFT model; write its config as the Trainer does."""
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
    if dist.get_rank() == 0:
        adapted.peft_config["default"].save_pretrained(folder)
    return adapted


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return two optimizer groups, as Trainer does."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def settings(traits: list[str]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": int(traits[0][-1])}
    if "subgroups" in traits:
        zero["sub_group_size"] = 2000
    if "roundrobin" in traits:
        zero["round_robin_gradients"] = True
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }  # fmt: skip
    if "bf16" in traits:
        config["bf16"] = {"enabled": True}
    if "masters" in traits:
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if "fp16" in traits:
        config["fp16"] = {"enabled": True, "initial_scale_power": 4}
    if "accumfp32" in traits:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def forward(engine: Any, traits: list[str], step: int) -> torch.Tensor:
    if "resnet" in traits:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        pixels = torch.rand(2, 3, 32, 32, generator=generator)
        return engine(pixel_values=pixels, labels=torch.tensor([0, 1])).loss
    tokens = tokens_of(step, dist.get_rank())
    return engine(input_ids=tokens, labels=tokens).loss


def gathered(engine: Any, traits: list[str]) -> dict[str, torch.Tensor]:
    """Return the full weights: trained ones as the optimizer's fp32 values, frozen ones and buffers unchanged."""
    truth = {}
    for name, parameter in engine.module.named_parameters():
        if "roundrobin" in traits:  # DeepSpeed's mapping has another order; the module holds fp32 weights
            truth[name] = parameter.detach().clone()
        elif parameter.requires_grad:
            full = safe_get_full_fp32_param(parameter).clone()
            truth[name] = full.bfloat16() if "masters" in traits else full  # DeepSpeed widens what it returns
        else:
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                truth[name] = parameter.detach().clone()
    persistent = set(engine.module.state_dict(keep_vars=True))
    truth |= {name: buffer.clone() for name, buffer in engine.module.named_buffers() if name in persistent}
    return {name: tensor.reshape(shape_of(engine, name, tensor)) for name, tensor in truth.items()}


def shape_of(engine: Any, name: str, tensor: torch.Tensor) -> torch.Size:
    parameter = dict(engine.module.named_parameters()).get(name)
    return tensor.shape if parameter is None else getattr(parameter, "ds_shape", parameter.shape)


def make_universal(source: Path, out: Path) -> None:
    from argparse import Namespace

    from deepspeed.checkpoint.ds_to_universal import main as convert

    options = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True)
    convert(Namespace(input_folder=str(source), output_folder=str(out), inject_missing_state=True, **options))


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def train(model: torch.nn.Module, out: Path, traits: list[str]) -> dict[str, torch.Tensor]:
    wrap(model, traits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        tokens = tokens_of(step, 0 if "tp" in traits else dist.get_rank())
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save(model, optimizer, out / f"checkpoint-{STEPS}" / "pytorch_model_fsdp_0", traits)
    return full_weights(model)


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


def full_weights(model: Any) -> dict[str, torch.Tensor]:
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: full[name] for name, _ in model.named_parameters()} if dist.get_rank() == 0 else {}


def train_with_trainer(model: torch.nn.Module, out: Path, traits: list[str]) -> dict[str, torch.Tensor]:
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
    return full_weights(trainer.model_wrapped)


if __name__ == "__main__":
    main()
