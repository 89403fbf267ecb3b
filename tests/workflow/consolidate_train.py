"""Write real checkpoints by training with DeepSpeed on the CPU: ``torchrun consolidate_train.py OUT VARIANT...``.

Every variant writes ``OUT/VARIANT/checkpoint-2`` in the Trainer's layout, ``OUT/VARIANT/base`` (the model's folder) and
``OUT/VARIANT/truth.safetensors``, the weights that the ranks gathered at the end of training.
"""

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, ResNetConfig, ResNetForImageClassification

from shardmake.train.process_group import end_process, leave_together

STEPS = 2


def main() -> None:
    out, *variants = sys.argv[1:]
    deepspeed.init_distributed("gloo")
    get_accelerator().is_fp16_supported = lambda: True  # torch supports it on any CPU, slowly
    for variant in variants:
        train(Path(out) / variant, variant.split("-"))
    leave_together()
    end_process()


def train(out: Path, traits: list[str]) -> None:
    """Train one variant, such as ``zero3-bf16-tied``."""
    torch.manual_seed(0)
    model = make_model(traits)
    if dist.get_rank() == 0:
        model.save_pretrained(out / "base")
    if "lora" in traits:
        model = add_adapter(model, out / f"checkpoint-{STEPS}")
    if "frozen" in traits:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "layers.1" not in name and "embed" not in name
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=settings(traits))
    for step in range(STEPS):
        loss = forward(engine, traits, step)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(out / f"checkpoint-{STEPS}"), exclude_frozen_parameters="nobase" in traits)
    dist.barrier()
    save_truth(engine, traits, out)
    if "universal" in traits and dist.get_rank() == 0:
        make_universal(out / f"checkpoint-{STEPS}" / f"global_step{STEPS}", out / "universal")
    dist.barrier()


def make_model(traits: list[str]) -> torch.nn.Module:
    if "resnet" in traits:
        shape = dict(embedding_size=6, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=3)
        return ResNetForImageClassification(ResNetConfig(**shape))
    config = LlamaConfig(
        vocab_size=101, hidden_size=24, intermediate_size=52, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings="tied" in traits,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def add_adapter(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """Return a PEFT model; write its config as the Trainer does."""
    from peft import LoraConfig, get_peft_model

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
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
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
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    if "resnet" in traits:
        pixels = torch.rand(2, 3, 32, 32, generator=generator)
        return engine(pixel_values=pixels, labels=torch.tensor([0, 1])).loss
    tokens = torch.randint(0, 101, (1, 16), generator=generator)
    return engine(input_ids=tokens, labels=tokens).loss


def save_truth(engine: Any, traits: list[str], out: Path) -> None:
    """Save the full weights: trained ones as the optimizer's fp32 values, frozen ones and buffers unchanged."""
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
    if dist.get_rank() == 0:
        shaped = {name: tensor.reshape(shape_of(engine, name, tensor)) for name, tensor in truth.items()}
        save_file({name: tensor.contiguous() for name, tensor in shaped.items()}, out / "truth.safetensors")


def shape_of(engine: Any, name: str, tensor: torch.Tensor) -> torch.Size:
    parameter = dict(engine.module.named_parameters()).get(name)
    return tensor.shape if parameter is None else getattr(parameter, "ds_shape", parameter.shape)


def make_universal(source: Path, out: Path) -> None:
    from argparse import Namespace

    from deepspeed.checkpoint.ds_to_universal import main as convert

    options = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True)
    convert(Namespace(input_folder=str(source), output_folder=str(out), inject_missing_state=True, **options))


if __name__ == "__main__":
    main()
