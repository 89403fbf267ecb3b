"""Ranks that read the base model or get an empty one, the device of the weights, and the adapter's file beside a checkpoint."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from shardmake.config.models import Strategy
from shardmake.core.private_names import library_warnings
from shardmake.render.training_file import training_settings
from shardmake.run.model_class import ModelClass
from shardmake.run.training_settings import TrainingSettings
from shardmake.train import load_model
from shardmake.train.adapter_config import write_adapter_configs
from tests.finished_run import with_arguments
from tests.mixtures import mixture_configs
from tests.unit.data.test_encode import make_tokenizer
from tests.unit.plans import make_cluster, make_model, make_plan, make_run
from tests.unit.train.conftest import tiny_llama


def settings_on(accelerator: str, strategy: Strategy, **run: Any) -> TrainingSettings:
    cluster = make_cluster(accelerator=accelerator)
    return training_settings(make_plan(strategy), make_run(**run), cluster, make_model())


@pytest.mark.parametrize(("accelerator", "strategy", "method", "local_rank", "reads", "on_gpu"), [
    ("h100", "fsdp", "full", "0", True, False), ("h100", "fsdp", "full", "1", False, False),
    ("h100", "fsdp", "lora", "1", False, False), ("h100", "fsdp", "qlora", "0", True, True),
    ("h100", "fsdp", "qlora", "1", True, True), ("h100", "ddp", "full", "1", True, True),
    ("h100", "ddp", "lora", "3", True, True), ("h100", "ddp", "qlora", "1", True, True),
    ("h100", "zero1", "full", "5", True, True), ("h100", "zero2", "lora", "1", True, True),
    ("h100", "zero2-offload", "full", "1", True, True), ("h100", "zero3", "full", "1", False, False),
    ("h100", "zero3-offload", "lora", "0", True, False), ("cpu", "ddp", "full", "0", True, False),
    ("cpu", "zero2", "full", "0", True, False), ("cpu", "zero3", "full", "0", True, False),
])  # fmt: skip
def test_ranks_that_read_the_weights_and_where_to(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, strategy: Strategy, method: str, local_rank: str, reads: bool,
    on_gpu: bool,
) -> None:  # fmt: skip
    """Accelerate does not broadcast 4-bit weights."""
    empty = SimpleNamespace(tie_weights=lambda: None, eval=lambda: None)
    monkeypatch.setattr(ModelClass, "load_base", lambda *_, **options: options)
    monkeypatch.setattr(ModelClass, "build", lambda *_, **__: empty)
    monkeypatch.setattr(load_model, "AutoConfig", SimpleNamespace(from_pretrained=lambda *_, **__: None))
    monkeypatch.setattr(load_model, "load_sharded", lambda load, build, *_: load_model.read_on_rank_0(load, build))
    monkeypatch.setattr(load_model, "send_buffers", lambda base, _: base)
    monkeypatch.setattr(load_model, "match_rank_0", lambda base: base)
    monkeypatch.setattr(load_model, "_four_bit_config", lambda dtype: "four bits")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, local_rank)
    arguments: Any = SimpleNamespace(hf_deepspeed_config=None, device="cpu")
    settings = settings_on(accelerator, strategy, method=method)
    loaded = cast(dict[str, Any] | None, load_model.load_base(settings, arguments))
    assert (loaded is not None) is reads
    if loaded is not None:
        assert loaded.get("quantization_config") == ("four bits" if method == "qlora" else None)
        assert loaded.get("device_map") == ({"": int(local_rank)} if on_gpu else None)


@pytest.mark.parametrize(("name", "value", "calls"), [
    ("OTHER", "1", [(-3, 1 << 16), (-3, 1 << 25), (-1, 1 << 26)]), ("MALLOC_TRIM_THRESHOLD_", "65536", []),
    ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536", []),
])  # fmt: skip
def test_thresholds_of_the_environment_stay(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, calls: list[tuple[int, int]]
) -> None:
    made: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *given: made.append(given))
    monkeypatch.setattr(load_model, "ctypes", SimpleNamespace(CDLL=lambda _: library))
    monkeypatch.setenv(name, value)
    with load_model.no_cached_blocks():
        pass
    assert made == calls


def test_models_of_scripts_and_matrices_that_the_engine_splits_are_not_loaded_on_the_gpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert not settings_on("h100", "ddp", script=str(tmp_path / "train.py")).model.on_gpu
    choice = make_plan("zero2").choice
    assert choice.loads_on_gpu("full")
    assert not choice.model_copy(update={"tensor_parallel": 2}).loads_on_gpu("full")


def test_a_map_of_one_device_is_no_dispatched_model(tmp_path: Path) -> None:
    """Accelerate refuses to train a dispatched model, and hooks would move every layer's inputs."""
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}, dtype=torch.bfloat16)
    assert not hasattr(model, "hf_device_map") and not Accelerator.verify_device_map(Accelerator(cpu=True), model)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_the_loss_of_routers_is_a_mean_over_the_passes_of_a_step() -> None:
    """Two ranks with two passes each add up the loss of the tokens, and average that of the routers."""
    config = mixture_configs()["mixtral"]
    config.update({"output_router_logits": True, "router_aux_loss_coef": 0.5})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    batches = torch.randint(0, 64, (4, 1, 16))
    count = 4 * 15
    plain = [model(input_ids=ids, labels=ids, num_items_in_batch=count) for ids in batches]
    tokens = sum(out.loss - 0.5 * out.aux_loss for out in plain)
    routers = torch.stack([out.aux_loss for out in plain]).mean()
    settings = settings_on("cpu", "zero2")
    settings = with_arguments(settings, gradient_accumulation_steps=4 // settings.expected.world_size)
    load_model.average_router_loss(model, settings)
    step = sum(model(input_ids=ids, labels=ids, num_items_in_batch=count).loss for ids in batches)
    torch.testing.assert_close(step, tokens + 0.5 * routers)
    assert model.config.router_aux_loss_coef == 0.5


def test_the_checkpoints_get_the_chat_template_of_the_run(tmp_path: Path) -> None:
    make_tokenizer("{{ messages }}").save_pretrained(tmp_path)
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    own = {"train": "org/data", "chat_template": str(tmp_path / "own.jinja")}
    for data, expected in (({"train": "org/data"}, "{{ messages }}"), (own, "{{ messages[0].content }}")):
        settings = settings_on("h100", "ddp", model=str(tmp_path), data=data)
        assert load_model.load_tokenizer(settings).chat_template == expected


LORA = LoraConfig(r=2, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "v_proj"])


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that was loaded from a folder."""
    model = tiny_llama()
    model.name_or_path = str(tmp_path_factory.mktemp("base"))
    model.config.save_pretrained(model.name_or_path)
    return model


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return found | {"target_modules": sorted(found["target_modules"])}


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_it_is_the_file_of_pefts_save_pretrained(base: Any, tmp_path: Path, task: str | None) -> None:
    write_adapter_configs(base, tmp_path)
    assert not list(tmp_path.iterdir()), "without adapters"
    config = LoraConfig(**LORA.to_dict() | {"task_type": task})
    model = get_peft_model(base, config)
    write_adapter_configs(torch.nn.Sequential(model), tmp_path / "ours")
    assert not config.inference_mode, "the trained adapter stays trainable"
    model.save_pretrained(tmp_path / "theirs")
    assert read(tmp_path / "ours") == read(tmp_path / "theirs")
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["adapter_config.json"]


@pytest.mark.parametrize(("first", "second"), [("default", "other"), ("mine", "ref")])
def test_the_second_adapter_has_a_folder_of_its_name(base: Any, tmp_path: Path, first: str, second: str) -> None:
    """The default one needs none, nor does the only one beside TRL's reference."""
    model = get_peft_model(base, LORA, adapter_name=first)
    model.add_adapter(second, LoraConfig(r=2, lora_alpha=7, target_modules=["q_proj"]))
    write_adapter_configs(model, tmp_path)
    assert read(tmp_path)["lora_alpha"] == 6 and read(tmp_path / second)["lora_alpha"] == 7
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", second}


@pytest.mark.skipif(any("add_adapter" in line for line in library_warnings()), reason="with an older PEFT it stops")
def test_an_adapter_of_transformers_own_integration_is_described(base: Any, tmp_path: Path) -> None:
    base.add_adapter(LORA)
    write_adapter_configs(base, tmp_path)
    assert read(tmp_path)["base_model_name_or_path"] == base.name_or_path


def test_a_programs_file_stays_and_is_compared(base: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = get_peft_model(base, LORA)
    for _ in range(2):
        write_adapter_configs(model, tmp_path)
    assert not caplog.records
    path = tmp_path / "adapter_config.json"
    other = json.dumps(json.loads(path.read_text()) | {"lora_alpha": 8})
    words = ("is not of the adapter that is saved beside it: lora_alpha differ", "Cannot read the adapter's settings")
    for text, message in zip((other, "{"), words, strict=True):
        path.write_text(text)
        write_adapter_configs(model, tmp_path)
        assert path.read_text() == text and message in caplog.messages[-1]
