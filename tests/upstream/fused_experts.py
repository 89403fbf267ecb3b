"""transformers' Trainer resumes a mixture of experts with the experts of the base model."""

import tempfile

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_experts=4,
    num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2,
)  # fmt: skip
trained, resumed = Qwen3MoeForCausalLM(config), Qwen3MoeForCausalLM(config)
folder = tempfile.mkdtemp()
trained.save_pretrained(folder)
Trainer(resumed, TrainingArguments(folder, use_cpu=True, report_to=[]))._load_from_checkpoint(folder)
after = resumed.state_dict()
kept = [name for name, tensor in trained.state_dict().items() if not torch.equal(after[name], tensor)]
print("not loaded from the checkpoint:", kept or "nothing")
