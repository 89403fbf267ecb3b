"""A script for transformers' Trainer that does not use Shardmake; with an adapter, or a server, if asked.

An adapter is on a base model in 4 bits if asked, and its factors are saved as well. Rank 0 asks the server after every
step, which takes ``seconds``.
"""

import json
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from chat_rows import adapted, read_rows, save_factors
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments
from transformers.hf_argparser import HfArg


@dataclass
class ScriptArguments:
    model_name_or_path: str = HfArg(aliases=["--model"])
    train_file: str = HfArg(aliases=["--data"])
    final: str | None = field(default=None)
    lora: str | None = field(default=None)
    factors: str | None = field(default=None)
    four_bits: bool = field(default=False)
    server: str | None = field(default=None)
    answers: str | None = field(default=None)
    seconds: float = field(default=0.0)


class AskServer(TrainerCallback):
    def __init__(self, options: ScriptArguments) -> None:
        self.options = options

    def on_step_end(self, args, state, control, **kwargs) -> None:
        time.sleep(self.options.seconds)
        if not state.is_world_process_zero:
            return
        url, prompts = f"http://{self.options.server}/v1/completions", [f"step {state.global_step}"]
        request = urllib.request.Request(url, json.dumps({"prompt": prompts}).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            found = json.load(answer)
        line = {"step": state.global_step, "text": found["choices"][0]["text"], "server": int(found["id"])}
        with Path(self.options.answers).open("a") as file:
            file.write(json.dumps(line) + "\n")


def load(script: ScriptArguments):
    if script.four_bits:
        from four_bits import load_in_four_bits

        model = load_in_four_bits(AutoModelForCausalLM, script.model_name_or_path)
    else:
        model = AutoModelForCausalLM.from_pretrained(script.model_name_or_path)
    return adapted(model, script.lora)


def main() -> None:
    script, arguments = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    rows = [{"input_ids": row, "labels": row} for row in read_rows(script.train_file, script.model_name_or_path)]
    asking = [AskServer(script)] if script.server else None
    trainer = Trainer(load(script), arguments, train_dataset=rows, callbacks=asking)
    saved = Path(arguments.output_dir).glob("checkpoint-*")
    newest = max(saved, key=lambda path: int(path.name.partition("-")[2]), default=None)
    trainer.train(resume_from_checkpoint=newest and str(newest))
    trainer.save_model(script.final)
    if script.factors:
        save_factors(trainer.accelerator.get_state_dict(trainer.model_wrapped), script.factors)


if __name__ == "__main__":
    main()
