"""A program for `torchrun` that does not use Shardmake."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from chat_rows import read_rows
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--output_dir", required=True)
parser.add_argument("--wrap", choices=["ddp", "fsdp", "none"], default="ddp")
parser.add_argument("--compile", choices=["wrapped", "model", "layers"], help="what torch.compile gets")
parser.add_argument("--batch_size", type=int, default=2)
parser.add_argument("--accumulation", type=int, default=2)
parser.add_argument("--same_rows", action="store_true")
parser.add_argument("--autocast", action="store_true")


def wrap(model, how: str):
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp":
        for layer in model.base_model.layers if hasattr(model.base_model, "layers") else model.base_model.h:
            fully_shard(layer)
        fully_shard(model)
    return model


def main() -> None:
    args = parser.parse_args()
    dist.init_process_group("gloo")
    plain = AutoModelForCausalLM.from_pretrained(args.model)
    if args.compile == "layers":
        for layer in plain.base_model.layers:
            layer.compile(backend="eager")
    model = torch.compile(plain, backend="eager") if args.compile == "model" else plain
    model = wrap(model, args.wrap)
    if args.compile == "wrapped":
        model = torch.compile(model, backend="eager")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = read_rows(args.data, args.model)
    sampler = None if args.same_rows else DistributedSampler(rows)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16) if args.autocast else contextlib.nullcontext()
    for number, batch in enumerate(DataLoader(rows, batch_size=args.batch_size, sampler=sampler), 1):
        with autocast:
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        if number % args.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
        if number == 4 * args.accumulation:
            break
    if dist.get_rank() == 0 and args.wrap == "ddp":
        plain.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
