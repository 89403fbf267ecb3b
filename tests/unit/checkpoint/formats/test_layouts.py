"""Layouts of other programs: each is merged, or refused by its name with a way out that works."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from shardmake.consolidate.merge import consolidate
from shardmake.consolidate.verify import verify
from shardmake.core.errors import CheckpointError, ShardmakeError
from tests.workflow.consolidate_checkpoints import assert_equal, check_loading_in_process, load_weights

SHAPE = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2,
)  # fmt: skip
QUERY = "model.layers.0.self_attn.q_proj.weight"
Weights = dict[str, torch.Tensor]
Writer = Callable[[Weights, Path], Path]


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    check_loading_in_process(monkeypatch)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    LlamaForCausalLM(SHAPE).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def trained() -> Weights:
    torch.manual_seed(1)
    return {name: tensor.clone() for name, tensor in LlamaForCausalLM(SHAPE).state_dict().items()}


def prefixed(weights: Weights, prefix: str) -> Weights:
    return {prefix + name: tensor for name, tensor in weights.items()}


def save(value: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


def deepspeed(module: Weights, folder: Path) -> Path:
    """Write what DeepSpeed's engine saves on one rank without ZeRO (_save_checkpoint in deepspeed/runtime/engine.py)."""
    state = {"module": module, "global_steps": 2, "skipped_steps": 0, "ds_version": "0.19", "ds_config": {}}
    save({**state, "shared_params": {}, "buffer_names": [], "param_shapes": []}, folder / "mp_rank_00_model_states.pt")
    return folder


def lightning(weights: Weights, place: Path) -> Path:
    """Lightning's DeepSpeedStrategy saves the engine, which holds the LightningModule, with the tag "checkpoint"."""
    deepspeed(prefixed(weights, "_forward_module.model."), place / "epoch=0-step=2.ckpt" / "checkpoint")
    (place / "epoch=0-step=2.ckpt" / "latest").write_text("checkpoint")
    return place


def torchtune(weights: Weights, place: Path) -> Path:
    """A folder for each epoch (FullModelHFCheckpointer in torchtune/training/checkpointing/_checkpointer.py)."""
    (place / "epoch_0").mkdir(parents=True)
    for number, names in enumerate((list(weights)[::2], list(weights)[1::2]), 1):
        file = place / "epoch_0" / f"ft-model-{number:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in names}, file)
    save({}, place / "recipe_state" / "recipe_state.pt")
    return place


def saved_by_dcp(state: dict[str, Any], folder: Path) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def fsdp(weights: Weights, place: Path, number: int) -> Path:
    return saved_by_dcp({"model": weights}, place / f"pytorch_model_fsdp_{number}")


def beside_checkpoints(weights: Weights, place: Path) -> Path:
    """The adapter that a Trainer saves at its end, into the folder of its checkpoints."""
    model = get_peft_model(LlamaForCausalLM(SHAPE), LoraConfig(target_modules=["q_proj"]))
    for folder in (place / "checkpoint-2", place):
        model.save_pretrained(folder)
    save_file(weights, place.parent / "base" / "model.safetensors", metadata={"format": "pt"})
    return place


def named_adapter(weights: Weights, place: Path) -> Path:
    """PEFT saves an adapter of another name than "default" into a sub-folder, without one above."""
    model = get_peft_model(LlamaForCausalLM(SHAPE), LoraConfig(target_modules=["q_proj"]), "mine")
    model.save_pretrained(place / "checkpoint-2")
    save({}, place / "checkpoint-2" / "optimizer.pt")
    save_file(weights, place.parent / "base" / "model.safetensors", metadata={"format": "pt"})
    return place


MERGED: dict[str, Writer] = {
    "Lightning, DeepSpeed": lightning,
    "Lightning, one file": lambda w, p: save(
        {"state_dict": prefixed(w, "model."), "optimizer_states": [{}], "loops": {}}, p / "last.ckpt"
    ),
    "the folder of it": lambda w, p: save({"state_dict": prefixed(w, "net.")}, p / "last.ckpt").parent,
    "Accelerate, FULL_STATE_DICT": lambda w, p: save(w, p / "pytorch_model_fsdp.bin").parent,
    "an optimizer beside it": lambda w, p: save({}, save(w, p / "a.bin").with_name("optimizer.bin")).parent,
    "model and optimizer": lambda w, p: save({"model": w, "optimizer": {"state": {}}, "step": 3}, p / "last.pt"),
    "compiled": lambda w, p: save({"model_state_dict": prefixed(w, "module._orig_mod."), "lr": 0.1}, p / "a.pth"),
    "a number in the name": lambda w, p: save(w, p / "tuned-2-of-3b.bin").parent, "torchtune": torchtune,
    "verl": lambda w, p: save(w, p / "actor" / "model_world_size_1_rank_0.pt").parents[1],
    "verl, above": lambda w, p: save(w, p / "global_step_2" / "actor" / "model_world_size_1_rank_0.pt").parents[2],
    "one folder of two": lambda w, p: fsdp(w, fsdp({}, p, 1).parent, 0),
    "an adapter beside checkpoints": beside_checkpoints, "an adapter of another name": named_adapter,
}  # fmt: skip


@pytest.mark.parametrize("layout", MERGED)
def test_layout_is_merged(layout: str, base: Path, tmp_path: Path) -> None:
    weights = trained()
    checkpoint = MERGED[layout](weights, tmp_path / "checkpoint")
    consolidate(checkpoint, tmp_path / "model", base=base)
    assert_equal(load_weights(tmp_path / "model"), weights)
    verify(tmp_path / "model", checkpoint, base=base if "adapter" in layout else None)


def files(*names: str) -> Writer:
    def write(_: Weights, place: Path) -> Path:
        for name in names:
            save({"model": {"w": torch.ones(1)}}, place / name)
        return place

    return write


def adapter(change: Callable[[Weights], Weights]) -> Writer:
    """Return a function that writes a PEFT folder whose tensors are changed."""

    def write(weights: Weights, place: Path) -> Path:
        get_peft_model(LlamaForCausalLM(SHAPE), LoraConfig(target_modules=["q_proj"])).save_pretrained(place)
        save_file(change(load_file(place / "adapter_model.safetensors")), place / "adapter_model.safetensors")
        return place

    return write


def other_names(held: Weights) -> Weights:
    """Return the names of Kohya's scripts."""
    return {n.replace("lora_A", "lora.down").replace("lora_B", "lora.up"): weight for n, weight in held.items()}


def twice(held: Weights) -> Weights:
    """Return the tensors, and others under the names without PEFT's prefix, which PEFT does not load."""
    return {**held, **{n.removeprefix("base_model.model."): weight + 1 for n, weight in held.items()}}


def of_ranks(weights: Weights, place: Path) -> Path:
    """A file of each rank's parts (_gen_file_name in torch/distributed/checkpoint/_hf_utils.py)."""
    place.mkdir()
    for rank, half in enumerate(zip(*(tensor.chunk(2) for tensor in weights.values()), strict=True), 1):
        named = {name: part.contiguous() for name, part in zip(weights, half, strict=True)}
        save_file(named, place / f"shard-{rank:05d}-model-00001-of-00001.safetensors")
    return place


MEGATRON = r"of Megatron-core.* Megatron Bridge"
REFUSED: dict[str, tuple[Writer, str]] = {
    "Megatron": (files("common.pt", "metadata.json"), MEGATRON),
    "Megatron above": (files("latest_checkpointed_iteration.txt", "iter_0000002/common.pt"), MEGATRON),
    "Megatron ranks": (files("mp_rank_00/model_optim_rng.pt"), MEGATRON),
    "Meta": (files("consolidated.00.pth"), r"of Meta's Llama.* convert_llama_weights_to_hf"),
    "HuggingFaceStorageWriter": (of_ranks, r"of torch's HuggingFaceStorageWriter.* enable_consolidation=True"),
    "an adapter without weights": (
        adapter(lambda held: {}),
        r"Its adapter holds no weights: .*Merge the sharded checkpoint",
    ),
    "an adapter of other names": (
        adapter(other_names),
        r"(?s)\A(?!.*--allow).*q_proj\.lora\.down\.weight is not part of Llama",
    ),
    "an adapter twice": (adapter(twice), r"base_model\.model\.(\S+) and \1 are one tensor .*Delete the other"),
    "verl, incomplete": (lambda w, p: save(w, p / "model_world_size_2_rank_0.pt").parent, r"the file of rank 1"),
    "a step in the model": (lambda w, p: save({"model": {**w, "step": 3}}, p / "a.pt"), r"step in it is not a tensor"),
    "shards, incomplete": (files("ft-model-00001-of-00002.bin"), r"1 shards of ft-model of 2"),
    "unknown": (files("weights.npz"), r"none of the layouts Megatron-core \(.*DeepSpeed \(global_step\*.*one file"),
}


@pytest.mark.parametrize("layout", REFUSED)
def test_layout_is_refused(layout: str, base: Path, tmp_path: Path) -> None:
    write, reason = REFUSED[layout]
    with pytest.raises(CheckpointError, match=reason):
        consolidate(write(trained(), tmp_path / "checkpoint"), tmp_path / "model", base=base)


def engines(first: Weights, second: Weights, place: Path) -> Path:
    """``latest`` names the model that was saved last (save_state in accelerate/accelerator.py)."""
    deepspeed(first, place / "pytorch_model")
    deepspeed(second, place / "pytorch_model_1")
    (place / "latest").write_text("pytorch_model_1")
    return place


def two_files(name: str, other: str) -> Callable[[Weights, Weights, Path], Path]:
    def write(first: Weights, second: Weights, place: Path) -> Path:
        place.mkdir()
        for file, weights in ((name, first), (other, second)):
            (save_file if file.endswith("safetensors") else torch.save)(weights, place / file)
        return place

    return write


@pytest.mark.parametrize("write", [saved_by_dcp, lambda saved, place: save(saved, place / "a.pt")])
def test_a_model_beside_one_of_other_names_is_named_by_the_advice(write: Any, base: Path, tmp_path: Path) -> None:
    """An actor, and a critic whose tensors have no name of the actor's: nested levels of one model look the same."""
    critic = {f"value.{name}": tensor for name, tensor in trained().items()}
    checkpoint = write({"actor": trained(), "critic": critic}, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"those below actor\. .*, add --key actor\."):
        consolidate(checkpoint, tmp_path / "model", base=base)
    consolidate(checkpoint, tmp_path / "model", base=base, key="actor")
    assert_equal(load_weights(tmp_path / "model"), trained())


FSDP, WORLD = "pytorch_model_fsdp", "model_world_size"
SEVERAL: dict[str, tuple[Callable[[Weights, Weights, Path], Path], str, str]] = {
    "FSDP": (lambda a, b, p: fsdp(b, fsdp(a, p, 0).parent, 1).parent, f"{FSDP}_0", f"{FSDP}_1"),
    "DeepSpeed": (engines, "pytorch_model", "pytorch_model_1"),
    "DDP": (two_files("model.safetensors", "model_1.safetensors"), "model.safetensors", "model_1.safetensors"),
    "DDP, torch": (two_files("pytorch_model.bin", "pytorch_model_1.bin"), "pytorch_model.bin", "pytorch_model_1.bin"),
    "ranks": (two_files(f"{FSDP}_rank0.bin", f"{FSDP}_1_rank0.bin"), FSDP, f"{FSDP}_1"),
    "world sizes": (two_files(f"{WORLD}_1_rank_0.pt", f"{WORLD}_2_rank_0.pt"), f"{WORLD}_1", ""),
    "DCP": (lambda a, b, p: saved_by_dcp({"model": a, "ema": {"model": b}}, p), "model", "ema.model"),
    "files": (two_files("a.pt", "b.pt"), "a.pt", "b.pt"),
    "dictionaries": (lambda a, b, p: save({"model": a, "ema": b}, p / "a.pt"), "model", "ema"),
    "deep": (lambda a, b, p: save({"state": {"model": a}, "ema": {"model": b}}, p / "a.pt"), "state.model", "ema.model"),
}  # fmt: skip


@pytest.mark.parametrize("layout", SEVERAL)
def test_a_key_names_one_of_several_models(layout: str, base: Path, tmp_path: Path) -> None:
    """The refusal names the keys, and with each of them the merge is right."""
    write, *keys = SEVERAL[layout]
    models = (trained(), {name: 2 * tensor for name, tensor in trained().items()})
    checkpoint = write(*models, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=rf"holds several: .*{keys[0]}.*\. .* Name one with --key\."):
        consolidate(checkpoint, tmp_path / "model", base=base)
    with pytest.raises(CheckpointError, match=r"holds no model 'other'\. .* name one of: .*"):
        consolidate(checkpoint, tmp_path / "model", base=base, key="other")
    for key, weights in zip(filter(None, keys), models, strict=False):
        consolidate(checkpoint, tmp_path / "model", base=base, key=key, overwrite=True)
        assert verify(tmp_path / "model", checkpoint).compared_with == str(checkpoint)
        assert_equal(load_weights(tmp_path / "model"), weights)
    if keys[1]:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
            verify(tmp_path / "model", checkpoint, key=keys[0])


def test_an_adapter_beside_the_default_one(base: Path, tmp_path: Path) -> None:
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"]))
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"holds several: default, other\. .* --key"):
        consolidate(tmp_path / "adapter", tmp_path / "model", base=base)
    consolidate(tmp_path / "adapter", tmp_path / "model", base=base, key="default")
    assert_equal(load_weights(tmp_path / "model"), load_weights(base))
    consolidate(tmp_path / "adapter", tmp_path / "second", base=base, key="other")
    assert not torch.equal(load_weights(tmp_path / "second")[QUERY], load_weights(base)[QUERY])


@pytest.mark.parametrize("lost", ["", "layers.1", "v_proj"])
def test_an_adapter_that_lacks_layers(lost: str, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    deep = LlamaForCausalLM(LlamaConfig(**{**SHAPE.to_dict(), "num_hidden_layers": 3}))
    deep.save_pretrained(base)
    chosen = LoraConfig(target_modules=["q_proj", "v_proj"], layers_to_transform=None if lost else [0])
    get_peft_model(deep, chosen).save_pretrained(place := tmp_path / "adapter")
    held = load_file(place / "adapter_model.safetensors")
    save_file(
        {n: weight for n, weight in held.items() if not lost or lost not in n}, place / "adapter_model.safetensors"
    )
    receipt = consolidate(place, tmp_path / "model", base=base)
    names = {
        "layers.1": ["2 weights", "layers.1.self_attn.q_proj"],
        "v_proj": ["3 weights", "layers.0.self_attn.v_proj"],
    }
    found = [one for one in receipt.warnings if one in caplog.messages] if receipt else []
    assert [all(word in one for word in names[lost]) for one in found] == ([True] if lost else [])


def test_a_tie_that_base_and_checkpoint_store_twice(base: Path, tmp_path: Path) -> None:
    config = LlamaConfig(**{**SHAPE.to_dict(), "tie_word_embeddings": True})
    weights = {name: held.clone() for name, held in LlamaForCausalLM(config).state_dict().items()}
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(base)
    save_file(weights, base / "model.safetensors")
    consolidate(save(weights, tmp_path / "checkpoint" / "a.pt"), tmp_path / "model", base=base)
    assert_equal(load_weights(tmp_path / "model"), {n: held for n, held in weights.items() if n != "lm_head.weight"})


def test_allow_unexpected_is_not_advised_where_something_trained_is_lost(base: Path, tmp_path: Path) -> None:
    file = save(prefixed(trained(), "inner.") | {"other.weight": torch.ones(2)}, tmp_path / "checkpoint" / "a.pt")
    with pytest.raises(CheckpointError, match=f"{QUERY} is missing") as refused:
        consolidate(file, tmp_path / "model", base=base)
    assert "--allow" not in str(refused.value)


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_resized_embeddings(kind: str, base: Path, tmp_path: Path) -> None:
    """The refusal asks for a base that was saved after the resize, and with that the merge is right."""
    model: Any = LlamaForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(100)
    model.save_pretrained(tmp_path / "resized")
    if kind == "adapter":
        adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "lm_head"]))
        adapted.save_pretrained(tmp_path / "checkpoint", save_embedding_layers=False)
    else:
        save(model.state_dict(), tmp_path / "checkpoint" / "a.pt")
    with pytest.raises(ShardmakeError, match=r"If the vocabulary was resized before training, name a .* saved after"):
        consolidate(tmp_path / "checkpoint", tmp_path / "model", base=base)
    consolidate(tmp_path / "checkpoint", tmp_path / "model", base=tmp_path / "resized")
    assert load_weights(tmp_path / "model")["lm_head.weight"].shape == (100, 32)


def test_names_of_a_vision_language_model(tmp_path: Path) -> None:
    """Its class has other names (model.language_model...) than its files, and PEFT uses those of the class."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    sizes = ("vocab", "hidden_s", "inter", "num_")
    text = {name: value for name, value in SHAPE.to_dict().items() if name.startswith(sizes)}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=vision)
    Qwen2VLForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    names = load_weights(tmp_path / "base").keys()
    assert not any("language_model" in name for name in names)
    targets = LoraConfig(target_modules=r".*language_model.*(q_proj|down_proj)", init_lora_weights=False)
    model: Any = Qwen2VLForConditionalGeneration.from_pretrained(tmp_path / "base")
    get_peft_model(model, targets).save_pretrained(tmp_path / "adapter")
    consolidate(tmp_path / "adapter", tmp_path / "model", base=tmp_path / "base")
    again: Any = Qwen2VLForConditionalGeneration.from_pretrained(tmp_path / "base")
    PeftModel.from_pretrained(again, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "expected")
    ours, theirs = load_weights(tmp_path / "model"), load_weights(tmp_path / "expected")
    assert ours.keys() == theirs.keys() == names
    for name in names:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-6)
