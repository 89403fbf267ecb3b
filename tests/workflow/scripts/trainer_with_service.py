"""A script for transformers' Trainer in which rank 0 asks a server after every step; it does not use Shardmake."""

import json
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


@dataclass
class ScriptArguments:
    model: str = field()
    data: str = field()
    final: str = field()
    server: str = field()
    answers: str = field()
    seconds: float = field(default=0.0)


class AskServer(TrainerCallback):
    def __init__(self, options: ScriptArguments) -> None:
        self.options = options

    def on_step_end(self, args, state, control, **kwargs) -> None:
        time.sleep(self.options.seconds)
        if not state.is_world_process_zero:
            return
        request = urllib.request.Request(
            f"http://{self.options.server}/v1/completions",
            json.dumps({"prompt": [f"step {state.global_step}"]}).encode(),
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            found = json.load(answer)
        line = {"step": state.global_step, "text": found["choices"][0]["text"], "server": int(found["id"])}
        with Path(self.options.answers).open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    options, arguments = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    lines = [json.loads(line) for line in Path(options.data).read_text().splitlines()]
    texts = [tokenizer.apply_chat_template(line["messages"], tokenize=False) for line in lines]
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=64, return_tensors="pt")
    examples: list[dict[str, torch.Tensor]] = [{"input_ids": row, "labels": row} for row in encoded["input_ids"]]
    model = AutoModelForCausalLM.from_pretrained(options.model)
    trainer = Trainer(model, arguments, train_dataset=examples, callbacks=[AskServer(options)])
    steps = (int(path.name.partition("-")[2]) for path in Path(arguments.output_dir).glob("checkpoint-*"))
    newest = max(steps, default=None)
    trainer.train(resume_from_checkpoint=newest and f"{arguments.output_dir}/checkpoint-{newest}")
    trainer.save_model(options.final)


if __name__ == "__main__":
    main()
