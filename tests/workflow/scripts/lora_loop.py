"""Train a LoRA adapter with Accelerate or DeepSpeed alone, save it as that library does, and its factors beside that."""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from chat_rows import read_rows
from factors import save_factors
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--lora", required=True, help="settings of the adapter, as JSON")
parser.add_argument("--output_dir", required=True)
parser.add_argument("--factors", required=True, help="file for the adapter's weights")
parser.add_argument("--deepspeed_config", help="train with DeepSpeed alone")
parser.add_argument("--save", choices=["state", "model"], default="state")
parser.add_argument("--own_scale", type=int, help="save an adapter_config.json with this scale before")
STEPS, BATCH_SIZE, ACCUMULATION = 2, 2, 2


def train_with_accelerate(model, optimizer, rows: list[torch.Tensor], args) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, BATCH_SIZE))
    for number, batch in enumerate(loader, 1):
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if number == STEPS * ACCUMULATION:
            break
    if args.save == "state":
        accelerator.save_state(args.output_dir)
    else:
        accelerator.save_model(model, args.output_dir)
    save_factors(accelerator, model, args.factors)


def train_with_deepspeed(model, optimizer, rows: list[torch.Tensor], args) -> None:
    import deepspeed

    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.deepspeed_config)
    for batch in DataLoader(rows, BATCH_SIZE, sampler=DistributedSampler(rows)):
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        if engine.global_steps == STEPS:
            break
    engine.save_checkpoint(args.output_dir)
    return (
        engine._zero3_consolidated_16bit_state_dict() if engine.zero_optimization_stage() == 3 else model.state_dict()
    )


def main() -> None:
    args = parser.parse_args()
    set_seed(0)
    if args.deepspeed_config:
        import deepspeed

        deepspeed.init_distributed()
    rows = read_rows(args.data, args.model, 64)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(args.model), LoraConfig(**json.loads(args.lora)))
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=1e-2)
    if args.own_scale:
        LoraConfig(lora_alpha=args.own_scale).save_pretrained(args.output_dir)
    train = train_with_deepspeed if args.deepspeed_config else train_with_accelerate
    train(model, optimizer, rows, args)


if __name__ == "__main__":
    main()
