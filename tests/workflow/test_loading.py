"""Only one rank of a node keeps the weights in its memory while they are loaded."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Mistral3ForConditionalGeneration

from shardmake.config.models import Strategy
from shardmake.memory.read_config import read_model
from shardmake.render.stage import launch_command, render_files, write_files
from shardmake.run.model_class import ModelClass
from tests.unit.plans import make_cluster, make_plan, make_run
from tests.workflow.by_hand import free_port, rank_environment

pytestmark = pytest.mark.training
RANK = Path(__file__).with_name("load_rank.py")


def make_model(folder: Path, layers: int) -> int:
    """Save a model with arbitrary bf16 parameters; return their number."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": layers, "vocab_size": 32768}
    config = LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    model.save_pretrained(folder, max_shard_size="200MB")
    return model.num_parameters()


def peaks(model: Path, strategy: Strategy, ranks: int, folder: Path, kind: str = "peak") -> list[int]:
    """Return the peak resident memory of each rank of one node in bytes; ``anonymous``: without pages of files."""
    plan = make_plan(strategy, nodes=1, processes_per_node=ranks, gradient_accumulation_steps=8 // ranks)
    sizes = read_model(str(model))
    trained = ModelClass(name=sizes.architecture, text_part="text_config" in sizes.config)
    plan = plan.model_copy(update={"workload": plan.workload.model_copy(update={"model_class": trained})})
    write_files(render_files(plan, make_run(model=str(model)), make_cluster(), sizes, folder), folder, sizes)
    command = launch_command(plan, folder, 0, "127.0.0.1", free_port())
    start = command.index("-m", command.index("--num_cpu_threads_per_process"))
    command[start:] = [str(RANK), str(folder)]
    # Freed blocks are returned at once, so that the peak excludes memory cached by the allocator.
    subprocess.run(command, env={**rank_environment(), "MALLOC_MMAP_THRESHOLD_": "65536"}, check=True, timeout=300)
    return [json.loads((folder / f"rank-{rank}.json").read_text())[kind] for rank in range(ranks)]


def test_fsdp_loads_on_the_first_rank_only(tmp_path: Path) -> None:
    parameters = make_model(tmp_path / "model", layers=9)
    assert parameters > 500_000_000
    first, second = peaks(tmp_path / "model", "fsdp", 2, tmp_path)
    assert first > 4 * parameters
    assert second < 0.4 * first


def test_one_copy_of_the_text_part_alone_is_loaded(tmp_path: Path) -> None:
    """The towers of a composite are larger than the margin."""
    folder = tmp_path / "model"
    text = {"model_type": "mistral", "hidden_size": 2048, "num_hidden_layers": 4, "vocab_size": 32768}
    text |= {"intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4}
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16}
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config={"model_type": "pixtral", **vision})
    with torch.device("meta"):
        model = Mistral3ForConditionalGeneration(config).to(torch.bfloat16)
    model.to_empty(device="cpu").save_pretrained(folder, max_shard_size="50MB")
    copy = 4 * read_model(str(folder)).parameters
    assert 4 * model.num_parameters() > 1.3 * copy
    first, second = peaks(folder, "fsdp", 2, tmp_path, "anonymous")
    largest = 4 * text["vocab_size"] * text["hidden_size"]  # the embedding, which is converted as a whole
    assert first - second < 1.05 * copy + largest


def test_zero3_reads_on_rank_0_only(tmp_path: Path) -> None:
    """Ranks without a GPU also keep their shards in RAM: a quarter of the weights each, beside 0.8 GB of libraries."""
    parameters = make_model(tmp_path / "model", layers=28)
    first, *others = peaks(tmp_path / "model", "zero3", 4, tmp_path)
    assert first > 2 * parameters * 1.25
    assert max(others) < 0.4 * first
