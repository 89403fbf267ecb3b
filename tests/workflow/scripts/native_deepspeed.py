"""A program for the launcher `deepspeed` that does not use Shardmake."""

import argparse

import deepspeed
import torch
from chat_rows import read_rows
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
parser = deepspeed.add_config_arguments(parser)


def main() -> None:
    args = parser.parse_args()
    deepspeed.init_distributed()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)
    rows = read_rows(args.data, args.model)
    loader = DataLoader(rows, batch_size=args.batch_size, sampler=DistributedSampler(rows))
    for batch in loader:
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        if engine.global_steps == args.steps:
            break
    engine.save_16bit_model(args.output_dir, "pytorch_model.bin")
    engine.save_checkpoint(args.output_dir)


if __name__ == "__main__":
    main()
