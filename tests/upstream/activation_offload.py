"""transformers: activation checkpointing with ``offload`` stops on a machine without an accelerator.

``python tests/upstream/activation_offload.py``
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(
    LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
).train()
model.activation_checkpointing_enable(offload=True)
ids = torch.zeros(1, 4, dtype=torch.long)
try:
    print(model(input_ids=ids, labels=ids).loss)
except RuntimeError as error:
    print(f"{type(error).__name__}: {error}")
