"""Set up the plain loop before training, as Trainer would."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
)
from torch.utils.data import DataLoader, RandomSampler
from transformers import Trainer, TrainingArguments
from transformers.integrations.liger import apply_liger_kernel
from transformers.trainer_utils import align_special_tokens

from shardmake.run.training_settings import TrainingSettings
from shardmake.train.training_arguments import planned_optimizer


def make_accelerator(arguments: TrainingArguments) -> Accelerator:
    """Return an Accelerator with the engine of the plan; the loop itself accumulates the gradients."""
    fsdp = arguments.fsdp_plugin_args
    return Accelerator(
        mixed_precision=arguments.mixed_precision,
        deepspeed_plugin=arguments.deepspeed_plugin,
        fsdp_plugin=FullyShardedDataParallelPlugin(**fsdp) if fsdp is not None else None,
        dynamo_plugin=TorchDynamoPlugin(backend=arguments.torch_compile_backend, mode=arguments.torch_compile_mode),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=arguments.data_seed),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=False)],
    )


def prepare_model(model: Any, tokenizer: Any, arguments: TrainingArguments) -> Any:
    """Set the tokenizer's special tokens, fused kernels and activation checkpointing on ``model``, and return it."""
    align_special_tokens(model, tokenizer)
    if arguments.use_liger_kernel:
        apply_liger_kernel(model, arguments.liger_kernel_config)
    if arguments.activation_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments.activation_checkpointing_kwargs)
    return model


def make_batches(accelerator: Accelerator, data: Any, collate: Any, arguments: TrainingArguments) -> Any:
    """Return this rank's micro batches, shuffled in each epoch; the order depends only on the seed."""
    size = arguments.train_batch_size
    return accelerator.prepare(DataLoader(data, size, sampler=RandomSampler(data), collate_fn=collate))


def make_optimizer(
    model: torch.nn.Module, arguments: TrainingArguments, settings: TrainingSettings
) -> torch.optim.Optimizer:
    """Return the planned optimizer, without weight decay for vectors (norms, biases), as in Trainer."""
    optimizer_class, options = planned_optimizer(settings) or Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A tensor that ZeRO-3 has sharded is flat; `ds_shape` is its original shape.
    is_matrix = [len(getattr(parameter, "ds_shape", parameter.shape)) > 1 for parameter in trained]
    groups = [
        {
            "params": [p for p, matrix in zip(trained, is_matrix, strict=True) if matrix == decays],
            "weight_decay": arguments.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    return optimizer_class(groups, **options)
