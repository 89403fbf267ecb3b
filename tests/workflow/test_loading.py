"""Only rank 0 reads the weights, and under ZeRO-3 the ranks together hold one copy of them while they load."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from shardmake.config.models import Strategy
from shardmake.fetch.dequantize import dequantize
from shardmake.memory.read_config import read_model
from shardmake.render.stage import launch_command, render_files, write_files
from shardmake.run.model_class import ModelClass
from shardmake.run.text_part import composite_class
from tests.mixtures import SIZES, mixture_configs
from tests.unit.fetch.test_dequantize import mxfp4
from tests.unit.plans import make_cluster, make_plan, make_run
from tests.workflow.by_hand import free_port, rank_environment

pytestmark = pytest.mark.training
RANK = Path(__file__).with_name("load_rank.py")


WIDE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4,
    "vocab_size": 32768,
}  # fmt: skip
DEEP = WIDE | {"hidden_size": 1024, "intermediate_size": 1024, "vocab_size": 4096, "num_hidden_layers": 12}
"""The largest weight, which a rank briefly holds beside its part, is below 5 % of a model of twelve layers."""
VISION = {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}


def composite(**text: Any) -> Any:
    return AutoConfig.for_model("mistral3", text_config={"model_type": "mistral", **text}, vision_config=VISION)


def save(config: Any, folder: Path, file_size: str = "200MB") -> int:
    """Save a model with arbitrary bf16 parameters; return their number."""
    name = composite_class(config)
    with torch.device("meta"):
        built = getattr(transformers, name)(config) if name else AutoModelForCausalLM.from_config(config)
    model = built.to(torch.bfloat16).to_empty(device="cpu")
    model.save_pretrained(folder, max_shard_size=file_size)
    return int(model.num_parameters())


RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Freed blocks are returned at once, so that the peak excludes memory cached by the allocator."""


def load(model: Path, strategy: Strategy, ranks: int, folder: Path, **allocator: str) -> list[dict[str, Any]]:
    """Load the model on the ranks of one node, and return what each measured."""
    plan = make_plan(strategy, nodes=1, processes_per_node=ranks, gradient_accumulation_steps=8 // ranks)
    sizes = read_model(str(model))
    trained = ModelClass(name=sizes.architecture, text_part="text_config" in sizes.config, untied=sizes.untied)
    workload = plan.workload.model_copy(update={"model_class": trained, "attention": "eager"})
    plan = plan.model_copy(update={"workload": workload})
    write_files(render_files(plan, make_run(model=str(model)), make_cluster(), sizes, folder), folder, sizes)
    command = launch_command(plan, folder, 0, "127.0.0.1", free_port())
    start = command.index("-m", command.index("--num_cpu_threads_per_process"))
    command[start:] = [str(RANK), str(folder)]
    subprocess.run(command, env={**rank_environment(), **allocator}, check=True, timeout=300)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def peaks(model: Path, folder: Path, kind: str) -> list[int]:
    """Return the peak resident memory of each of two ranks under FSDP; ``anonymous``: without pages of files."""
    return [rank[kind] for rank in load(model, "fsdp", 2, folder, **RETURNED)]


def peak_of_all(ranks: list[dict[str, Any]]) -> int:
    """Return the peak of the ranks' sum of memory that loading takes beside pages of files."""
    now, most = [0] * len(ranks), 0
    for _, rank, size in sorted((time, rank, size) for rank, it in enumerate(ranks) for time, size in it["samples"]):
        now[rank] = size
        most = max(most, sum(now))
    return most


def test_fsdp_loads_on_the_first_rank_only(tmp_path: Path) -> None:
    parameters = save(AutoConfig.for_model("llama", **WIDE, num_hidden_layers=9), tmp_path / "model")
    assert parameters > 500_000_000
    first, second = peaks(tmp_path / "model", tmp_path, "peak")
    assert first > 4 * parameters
    assert second < 0.4 * first


def test_one_copy_of_the_text_part_alone_is_loaded(tmp_path: Path) -> None:
    """The towers of a composite are larger than the margin."""
    folder = tmp_path / "model"
    parameters = save(composite(**WIDE, num_hidden_layers=4), folder, "50MB")
    copy = 4 * read_model(str(folder)).parameters
    assert 4 * parameters > 1.3 * copy
    first, second = peaks(folder, tmp_path, "anonymous")
    largest = 4 * WIDE["vocab_size"] * WIDE["hidden_size"]  # the embedding, which is converted as a whole
    assert first - second < 1.05 * copy + largest


@pytest.mark.parametrize("kind", ["llama", "mixtral", "mistral3", "gpt_oss"])
def test_two_ranks_under_zero3_take_one_copy(kind: str, tmp_path: Path) -> None:
    """Without a GPU, ranks keep their parts in host RAM. The allocator is that of a job, which keeps freed blocks.

    The experts of Mixtral are joined from several weights, and those of gpt-oss were MXFP4.
    """
    folder, base = tmp_path / "model", tmp_path / "base"
    dense, experts = DEEP | {"intermediate_size": 5632}, DEEP | {"num_local_experts": 4}
    sizes = dense if kind == "llama" else experts
    config = composite(**dense) if kind == "mistral3" else AutoConfig.for_model(kind, **sizes)
    save(config, base, "9GB")
    if kind == "gpt_oss":
        save_file(mxfp4(load_file(base / "model.safetensors")), base / "model.safetensors", {"format": "pt"})
        values = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps({**values, "quantization_config": {"quant_method": "mxfp4"}}))
        (base / "tokenizer.json").write_text("{}")
        dequantize(base, folder)
    else:
        base.rename(folder)
    copy = 2 * read_model(str(folder)).parameters
    taken = peak_of_all(load(folder, "zero3", 2, tmp_path)) / copy
    assert 1 < taken < 1.1, taken


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe"])
def test_ranks_have_the_weights_and_buffers_of_the_files(family: str, tmp_path: Path) -> None:
    """transformers keeps a saved buffer of the first and a weight of the second in fp32."""
    config = mixture_configs().get(family) or AutoConfig.for_model(family, **SIZES, moe_num_experts=4)
    model = AutoModelForCausalLM.from_config(config)
    for buffer in model.buffers():
        buffer.add_(0.001)
    model.save_pretrained(tmp_path / "model")
    found = [rank["sums"] for rank in load(tmp_path / "model", "zero3", 2, tmp_path)]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    sums = [float(weight.to(torch.bfloat16).double().sum()) for weight in expected.parameters()]
    assert found == [sums + [float(buffer.double().sum()) for buffer in expected.buffers()]] * 2
