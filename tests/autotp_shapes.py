"""The program of a rank that writes the shapes of its weights under DeepSpeed's AutoTP: run it with torchrun."""

import json
import sys
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 128,
}  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    {**SIZES, "model_type": "llama", "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    {**SIZES, "model_type": "qwen2", "tie_word_embeddings": False},
    {**SIZES, "model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 16},
    {**SIZES, "model_type": "gemma", "head_dim": 16},
]
SHARED = 2


def main(output: Path) -> None:
    """Write each model's shapes by name, and the elements of this rank's part of the flat states."""
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    deepspeed.init_distributed("gloo")
    settings = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True, "tensor_parallel": {"autotp_size": SHARED},
    }  # fmt: skip
    found = []
    for config in CONFIGS:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        shapes = {name: list(part.shape) for name, part in engine.module.named_parameters()}
        found.append([shapes, sum(part.numel() for part in engine.optimizer.single_partition_of_fp32_groups)])
    if torch.distributed.get_rank() == 0:
        output.write_text(json.dumps(found))
    torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
