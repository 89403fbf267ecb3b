"""A training script for `accelerate launch` that does not use Shardmake."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, set_seed
from chat_rows import adapted, read_rows, save_factors
from peft import LoraConfig
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--output_dir", required=True)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--batch_size", type=int, default=2)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--losses")
parser.add_argument("--checkpoints")
parser.add_argument("--die_after", type=int)
parser.add_argument("--load_dtype", default="float32")
parser.add_argument("--precision", help="mixed_precision of the Accelerator")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--own_plugin", help="a DeepSpeed file for a plugin, with bf16")
parser.add_argument("--own_loader", choices=["same", "reversed"], help="each rank reads all rows")
parser.add_argument("--save", choices=["state", "model", "gathered"], default="state")
parser.add_argument("--lora", help="settings of an adapter, as JSON")
parser.add_argument("--factors", help="file for the adapter's weights")
parser.add_argument("--own_scale", type=int, help="save an adapter_config.json with this scale before")


def main() -> None:
    args = parser.parse_args()
    set_seed(0)
    steps = args.gradient_accumulation_steps
    plugin = DeepSpeedPlugin(hf_ds_config=args.own_plugin) if args.own_plugin else None
    precision = "bf16" if args.own_plugin else args.precision
    compiler = "eager" if args.compile else None
    accelerator = Accelerator(
        gradient_accumulation_steps=steps, deepspeed_plugin=plugin, mixed_precision=precision, dynamo_backend=compiler
    )
    model = adapted(AutoModelForCausalLM.from_pretrained(args.model, dtype=args.load_dtype), args.lora)
    if args.own_scale:
        LoraConfig(lora_alpha=args.own_scale).save_pretrained(args.output_dir)
    loader = DataLoader(read_rows(args.data, args.model), args.batch_size)
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=args.lr)
    if args.own_loader:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    newest = sorted(Path(args.checkpoints or "none").glob("step-*"))
    done = 0
    if newest:
        accelerator.load_state(str(newest[-1]))
        done = int(newest[-1].name.removeprefix("step-"))
    losses: list[float] = []
    for batch in accelerator.skip_first_batches(loader, done * args.gradient_accumulation_steps):
        if args.own_loader == "reversed" and accelerator.process_index:
            batch = batch.flip(0)
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        if not accelerator.sync_gradients:
            continue
        done += 1
        if args.checkpoints:
            accelerator.save_state(f"{args.checkpoints}/step-{done}")
        if done == args.die_after and not newest:
            raise RuntimeError("simulated failure")
        if done == args.steps:
            break
    if args.losses and accelerator.is_main_process:
        Path(args.losses).write_text(json.dumps(losses))
    if args.save == "gathered":
        state = accelerator.get_state_dict(model)
        whole = accelerator.unwrap_model(model)
        whole.save_pretrained(args.output_dir, is_main_process=accelerator.is_main_process, state_dict=state)
    elif args.save == "model":
        accelerator.save_model(model, args.output_dir)
    else:
        accelerator.save_state(args.output_dir)
    if args.factors:
        save_factors(accelerator.get_state_dict(model), args.factors)
    accelerator.end_training()


if __name__ == "__main__":
    main()
