"""LoRA of a user's program: whichever library saves the checkpoint, it merges as PEFT merges the trained adapter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardmake.checkpoint.formats.lora import CONFIG
from shardmake.config.models import Strategy
from shardmake.consolidate.merge import consolidate
from tests.workflow.forked import Forked, Trained, log

pytestmark = pytest.mark.training
SCRIPTS = Path(__file__).with_name("scripts")
LORA: dict[str, Any] = {
    "r": 4, "lora_alpha": 6, "use_rslora": True, "alpha_pattern": {"v_proj": 3},
    "target_modules": ["q_proj", "v_proj", "down_proj"],
}  # fmt: skip
FILES = ["--model", "$SHARDMAKE_BASE", "--output_dir", "$SHARDMAKE_OUTPUT", "--lora", json.dumps(LORA)]
LOOP = ["--steps", "2", "--lr", "1e-2"]
NATIVE = ["--steps", "2", "--deepspeed_config", "$SHARDMAKE_DEEPSPEED_CONFIG"]
TRAINER = [
    *("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--max_steps", "2"),
    *("--learning_rate", "1e-2", "--save_steps", "2", "--report_to", "none"),
]
CASES: dict[str, tuple[Strategy, str, list[str]]] = {
    "fsdp2 by Trainer": ("fsdp", "hf_trainer.py", TRAINER),
    "zero3 by save_state": ("zero3", "accelerate_loop.py", LOOP),
    "zero3 by Trainer": ("zero3", "hf_trainer.py", TRAINER), "ddp by save_state": ("ddp", "accelerate_loop.py", LOOP),
    "ddp by save_model": ("ddp", "accelerate_loop.py", [*LOOP, "--save", "model"]),
    "zero2 by save_state": ("zero2", "accelerate_loop.py", LOOP),
    "fsdp2 by save_state": ("fsdp", "accelerate_loop.py", LOOP),
    "zero2 by DeepSpeed": ("zero2", "native_deepspeed.py", NATIVE),
    "zero3 by DeepSpeed": ("zero3", "native_deepspeed.py", NATIVE),
}  # fmt: skip
IN_CI = ("fsdp2 by Trainer", "zero3 by save_state")


def train(
    forked: Forked, folder: Path, strategy: Strategy, script: str, arguments: list[str], **settings: Any
) -> Trained:
    """Train two steps on two ranks; the trained factors are in ``factors.safetensors`` of the run's folder."""
    factors = str(folder / "run/factors.safetensors")
    words = [*FILES, "--data", str(forked.inputs / "train.jsonl"), "--factors", factors, *arguments]
    changes: dict[str, Any] = {
        "global_batch_size": 8, "micro_batch_size": 2, "max_steps": 2, "method": "lora", "script": str(SCRIPTS / script),
        "script_args": words,
    }  # fmt: skip
    return forked.trained(folder, strategy, **changes | settings)


def merged_by_peft(base: Path, factors: Path) -> dict[str, torch.Tensor]:
    """Return the base model's weights in fp32 with the trained factors, as PEFT merges them."""
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**LORA))
    trained = {name.removeprefix("module."): tensor.float() for name, tensor in load_file(factors).items()}
    assert len(trained) == 2 * sum(part.endswith(".lora_A.default") for part, _ in adapted.named_modules())
    assert all(tensor.abs().max() > 0 for tensor in trained.values())
    assert not adapted.load_state_dict(trained, strict=False).unexpected_keys
    return adapted.merge_and_unload().state_dict()


def assert_merges_as_peft(run: Trained) -> None:
    consolidate(run.rundir.script_output, run.rundir.model, base=run.base, dtype="fp32", workers=1)
    merged = load_file(run.rundir.model / "model.safetensors")
    expected = merged_by_peft(run.base, run.rundir.root / "factors.safetensors")
    assert any("q_proj" in name for name in merged)
    torch.testing.assert_close(merged, {name: expected[name] for name in merged}, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=() if one in IN_CI else pytest.mark.objectives) for one in CASES]
)
def test_an_adapter_of_a_program_is_merged(forked: Forked, tmp_path: Path, case: str) -> None:
    run = train(forked, tmp_path, *CASES[case])
    for path in run.rundir.script_output.rglob(CONFIG):
        config = json.loads(path.read_text())
        expected = {**LORA, "inference_mode": True, "target_modules": config["target_modules"]}
        assert expected == {key: config[key] for key in expected}
        assert set(config["target_modules"]) == set(LORA["target_modules"])
        assert Path(config["base_model_name_or_path"]).is_dir()
    assert_merges_as_peft(run)


@pytest.mark.objectives
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_adapter_on_a_base_in_4_bits_is_merged(quantizing: Forked, tmp_path: Path, strategy: Strategy) -> None:
    words, four_bits = [*TRAINER, "--four_bits", "True"], {"method": "qlora", "precision": "bf16"}
    assert_merges_as_peft(train(quantizing, tmp_path, strategy, "hf_trainer.py", words, **four_bits))


@pytest.mark.objectives
def test_a_file_of_the_program_stays(forked: Forked, tmp_path: Path) -> None:
    """The program's file has another scale than its adapter, which its log says."""
    rundir = train(forked, tmp_path, "ddp", "accelerate_loop.py", [*LOOP, "--own_scale", "5"]).rundir
    assert json.loads((rundir.script_output / CONFIG).read_text())["lora_alpha"] == 5
    said = "is not of the adapter that is saved beside it: lora_alpha, r, use_rslora, alpha_pattern differ"
    assert said in log(rundir)
