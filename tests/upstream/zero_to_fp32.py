"""DeepSpeed's zero_to_fp32 drops frozen weights of ZeRO-1 and merges files of different steps, both without an error."""

import os
import shutil
import tempfile
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as merge

os.environ["LOCAL_RANK"] = "0"
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
model[0].weight.requires_grad = False
settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}  # fmt: skip
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW([model[1].weight], lr=0.1), config=settings)
folder = Path(tempfile.mkdtemp())
for step in (1, 2):
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    engine.save_checkpoint(str(folder), tag=f"step{step}")
right = merge(str(folder))
print("merged", sorted(right), "of a model with", [name for name, _ in model.named_parameters()])
shutil.copytree(folder / "step1", folder / "step2", ignore=shutil.ignore_patterns("*model_states*"), dirs_exist_ok=True)
same = torch.equal(merge(str(folder))["1.weight"], right["1.weight"])
print("step 2 with the optimizer file of step 1 equals step 2:", same)
