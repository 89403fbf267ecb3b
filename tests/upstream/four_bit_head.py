"""transformers: under FSDP, a new head of a model in 4 bits stays unwritten on all ranks but the first.

With ``cpu_ram_efficient_loading`` the first rank is expected to send all weights; accelerate sends none of such a model.
It needs bitsandbytes; in a checkout ``make .venv/bitsandbytes`` and ``PYTHONPATH=.venv/bitsandbytes``.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, set_seed

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
)
folder = tempfile.mkdtemp()
LlamaForCausalLM(config).save_pretrained(folder)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)
for local_rank in ("0", "1"):
    os.environ["LOCAL_RANK"] = local_rank
    set_seed(0)
    before = torch.get_rng_state()
    AutoModelForSequenceClassification.from_pretrained(folder, quantization_config=quantized, num_labels=1)
    drawn = not torch.equal(before, torch.get_rng_state())
    print(f"local rank {local_rank}: numbers for the new head were drawn: {drawn}")
dist.destroy_process_group()
