"""A program for the launcher `deepspeed` that does not use Shardmake."""

import argparse

import deepspeed
import torch
from chat_rows import adapted, read_rows, save_factors
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--output_dir", required=True)
parser.add_argument("--batch_size", type=int, default=2)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--lora", help="settings of an adapter, as JSON")
parser.add_argument("--factors", help="file for the adapter's weights")
parser = deepspeed.add_config_arguments(parser)


def main() -> None:
    args = parser.parse_args()
    deepspeed.init_distributed()
    model = adapted(AutoModelForCausalLM.from_pretrained(args.model), args.lora)
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=1e-3)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)
    rows = read_rows(args.data, args.model)
    loader = DataLoader(rows, batch_size=args.batch_size, sampler=DistributedSampler(rows))
    for batch in loader:
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        if engine.global_steps == args.steps:
            break
    if args.lora:
        gathers = engine.zero_optimization_stage() == 3
        state = engine._zero3_consolidated_16bit_state_dict() if gathers else model.state_dict()
        save_factors(state, args.factors)
    else:
        engine.save_16bit_model(args.output_dir, "pytorch_model.bin")
    engine.save_checkpoint(args.output_dir)


if __name__ == "__main__":
    main()
