"""Learn from a rule instead of examples, with TRL's GRPOTrainer: answers with the right sbatch options are rewarded.

An ordinary script for `accelerate launch`. examples/grpo.yaml has its arguments under Shardmake.
"""

import argparse
import json
import os
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def option_reward(completions: list[list[dict[str, str]]], options: list[list[str]], **_: object) -> list[float]:
    """Return the options that answer and request share, relative to all options of both: 1 for the right answer."""
    answers = [set(message["content"].split()) for [message] in completions]
    pairs = zip(answers, map(set, options), strict=True)
    return [len(answer & wanted) / len(answer | wanted) for answer, wanted in pairs]


def read_prompts(folder: Path) -> Dataset:
    """Return ``prompt`` and wanted ``options`` from pairs of answers, of which the chosen one is right."""
    pairs = [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.open()]
    return Dataset.from_list(
        [{"prompt": pair["prompt"], "options": pair["chosen"][0]["content"].split()} for pair in pairs]
    )


def main() -> None:
    """Train, resuming from the newest checkpoint, and save the model."""
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "checkpoints", "output"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("steps", "batch", "accumulation", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    words = parser.parse_args()
    settings = GRPOConfig(
        output_dir=words.checkpoints,
        max_steps=words.steps,
        per_device_train_batch_size=words.batch,  # answers, not prompts
        gradient_accumulation_steps=words.accumulation,
        learning_rate=words.learning_rate,
        lr_scheduler_type="constant",
        bf16=os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16",  # as launched; TRL's default is bf16
        num_generations=8,  # answers to one prompt, whose rewards are compared
        max_completion_length=24,
        logging_steps=1,
        save_steps=20,
        seed=words.seed,
        report_to="none",
    )
    trainer = GRPOTrainer(words.model, option_reward, args=settings, train_dataset=read_prompts(Path(words.data)))
    trainer.train(resume_from_checkpoint=any(Path(words.checkpoints).glob("checkpoint-*")))
    trainer.save_model(words.output)


if __name__ == "__main__":
    main()
