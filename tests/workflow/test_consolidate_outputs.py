"""Outputs of a merge and their verification: an adapter alone, several tasks, a disk that is too small, damage."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from shardmake.checkpoint.formats.huggingface import MODEL_BIN
from shardmake.consolidate.merge import consolidate
from shardmake.consolidate.verify import verify
from shardmake.core.errors import ShardmakeError
from tests.kill_at_write import fork
from tests.workflow.consolidate_checkpoints import SHAPE, assert_equal, check_loading_in_process, load_weights

pytestmark = pytest.mark.usefixtures("loading_in_process")
COMMAND = [sys.executable, "-c", "from shardmake.cli import main; main()", "consolidate"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write ``base``, its weights in torch's format (``old``), and FSDP checkpoints of it (``run``, ``adapted``)."""
    folder = tmp_path_factory.mktemp("outputs")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).to(torch.bfloat16)
    model.save_pretrained(folder / "base")
    (folder / "old").mkdir()
    (folder / "old" / "config.json").write_bytes((folder / "base" / "config.json").read_bytes())
    torch.save(model.state_dict(), folder / "old" / MODEL_BIN.single)
    save(model, folder / "run" / "checkpoint-3")
    settings = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", modules_to_save=["norm"])
    adapted = get_peft_model(model, settings)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.rand_like(parameter)
    save(adapted, folder / "adapted" / "checkpoint-3")
    adapted.save_pretrained(folder / "peft" / "checkpoint-3")
    adapted.peft_config["default"].save_pretrained(folder / "adapted" / "checkpoint-3")
    return folder


def save(model: torch.nn.Module, checkpoint: Path) -> None:
    dcp.save({"model": model.state_dict()}, checkpoint_id=checkpoint / "pytorch_model_fsdp_0", no_dist=True)


def test_adapter_alone(root: Path, tmp_path: Path) -> None:
    receipt = consolidate(root / "adapted", tmp_path / "adapter", base=root / "base", adapter=True)
    assert receipt is not None and receipt.verification.architecture == "PeftModel of LlamaForCausalLM"
    peft = load_weights(root / "peft" / "checkpoint-3")
    assert_equal(load_weights(tmp_path / "adapter"), peft)
    base = LlamaForCausalLM.from_pretrained(root / "base")
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    consolidate(root / "adapted", tmp_path / "model", base=root / "base")
    torch.testing.assert_close(load_weights(tmp_path / "model"), dict(loaded.named_parameters()), rtol=2**-7, atol=1e-3)
    with pytest.raises(ShardmakeError, match="holds no LoRA adapter"):
        consolidate(root / "run", tmp_path / "other", base=root / "base", adapter=True)
    with pytest.raises(ShardmakeError, match="--base"):
        verify(tmp_path / "adapter")


def test_adapter_with_a_base_in_torch_format(root: Path, tmp_path: Path) -> None:
    for base in ("base", "old"):
        consolidate(root / "peft", tmp_path / base, base=root / base)
    assert_equal(load_weights(tmp_path / "base"), load_weights(tmp_path / "old"))


def test_adapter_that_does_not_fit_the_config(root: Path, tmp_path: Path) -> None:
    settings = json.loads((root / "base" / "config.json").read_text())
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 3}))
    with pytest.raises(ShardmakeError, match=r"layers\.2\.\S+ is missing"):
        consolidate(root / "peft", tmp_path / "adapter", base=tmp_path / "base", adapter=True)


def test_several_tasks_with_one_killed(root: Path, tmp_path: Path) -> None:
    """As under ``srun``: each task writes its files, the last one verifies; a killed task is started again alone."""
    settings = {"base": root / "base", "dtype": "fp32", "max_shard_size": "30KB"}

    def start(index: int) -> int:
        return fork(lambda: consolidate(root / "run", tmp_path / "model", **settings, task=(index, 2)))

    (tmp_path / ".model.partial" / ".skeleton-2").mkdir(parents=True)  # of a task of an earlier, larger merge
    (tmp_path / ".model.partial" / ".skeleton-2" / "config.json").touch()
    killed = start(1)
    while not (tmp_path / ".model.partial" / ".task-1").exists():
        time.sleep(0.001)
    os.kill(killed, signal.SIGKILL)
    assert os.waitpid(killed, 0)[1] == signal.SIGKILL
    command = [*COMMAND, root / "run", tmp_path / "model", "--base", root / "base", "--dtype", "fp32"]
    environment = {**os.environ, "SLURM_PROCID": "0"}
    options = ["--tasks", "2", "--max-shard-size", "30KB"]
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True)
    assert "Task 0 of 2 has written its files" in done.stdout, (done.stdout, done.stderr)
    assert not (tmp_path / "model").exists()
    assert [os.waitpid(process, 0)[1] for process in [start(1), start(0)]] == [0, 0]
    consolidate(root / "run", tmp_path / "alone", **settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "model"]
    for path in (tmp_path / "alone").iterdir():
        assert path.read_bytes() == (tmp_path / "model" / path.name).read_bytes(), path.name


def test_a_task_out_of_range_and_the_same_task_twice(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ShardmakeError, match="tasks are numbered from 0 to 1"):
        consolidate(root / "run", tmp_path / "model", base=root / "base", task=(2, 2))
    staging = tmp_path / ".model.partial"
    staging.mkdir()
    with (staging / ".task-1").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ShardmakeError, match="Another merge is writing"):
            consolidate(root / "run", tmp_path / "model", base=root / "base", task=(1, 2))


ON_A_SMALL_DISK = """
mount -t tmpfs -o size=48k none "$0" || exit 9
"$@"; echo "exit $?"; find "$0" -mindepth 1
"""


def test_disk_that_is_too_small(root: Path, tmp_path: Path) -> None:
    """A real small file system: the merge fails before the first byte and leaves nothing behind."""
    merging = [*COMMAND, root / "run", tmp_path / "model", "--base", root / "base", "--dtype", "fp32"]
    command = ["unshare", "-rm", "sh", "-c", ON_A_SMALL_DISK, tmp_path, *merging]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "exit 2", (done.stdout, done.stderr)
    assert re.search(r"The merged model needs \d+ KiB, and .* has \d+ (KiB|bytes) left \(", done.stderr)


def test_quota_that_is_exceeded_while_writing(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs write, too; /dev/full provides the system's own error."""
    monkeypatch.setattr("shardmake.consolidate.destination.check_space", lambda *_: None)
    monkeypatch.setattr("shardmake.consolidate.writer._reserve", lambda *_: Path("/dev/full").write_bytes(b"x"))
    with pytest.raises(ShardmakeError, match=r"No space left on device.*No output was left behind"):
        consolidate(root / "run", tmp_path / "model", base=root / "base")
    assert not list(tmp_path.iterdir())


# --- verification detects every kind of damage -------------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain folder as DDP training saves it, with tokenizer files and a chat template."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint-5"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True)).save_pretrained(folder, max_shard_size="30KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "optimizer.pt").write_bytes(b"not part of the model")
    return folder


@pytest.fixture(scope="module")
def merged(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "model"
    with pytest.MonkeyPatch.context() as patch:
        check_loading_in_process(patch)
        consolidate(checkpoint, out, base=checkpoint, dtype="bf16", max_shard_size="20KB")
    return out


@pytest.fixture
def model(merged: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(merged, tmp_path / "model"))


def test_folder_equals_the_output_of_save_pretrained(checkpoint: Path, model: Path) -> None:
    assert {path.name for path in model.iterdir() if path.suffix != ".safetensors"} == {
        "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
        "chat_template.jinja", "receipt.json",
    }  # fmt: skip
    config = json.loads((model / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "torch_dtype" not in config
    loaded = LlamaForCausalLM.from_pretrained(model)
    original = LlamaForCausalLM.from_pretrained(checkpoint).to(torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), original.parameters(), strict=True))


def test_valid_model_and_its_receipt(checkpoint: Path, model: Path) -> None:
    found = verify(model, checkpoint)
    receipt = json.loads((model / "receipt.json").read_text())
    assert receipt["verification"] == {**found.model_dump(), "compared_with": None}
    assert found.compared_with == str(checkpoint)
    assert receipt["step"] == 5 and found.architecture == "LlamaForCausalLM" and found.dtype == "bfloat16"
    assert set(found.files) == {path.name for path in model.iterdir()} - {"receipt.json"}
    assert all(".bias" in name for name in found.zero) and found.zero


def change(
    name: str, value: Callable[[torch.Tensor], torch.Tensor], new: str | None = None
) -> Callable[[Path], None]:  # fmt: skip
    """Rewrite one tensor, under a ``new`` name, and remove the receipt, whose checksums would detect the change."""

    def damage(model: Path) -> None:
        (model / "receipt.json").unlink()
        file = model / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        path = model / index["weight_map"][name]
        index["weight_map"][new or name] = index["weight_map"].pop(name)
        tensors = load_file(path)
        tensors[new or name] = value(tensors.pop(name)).contiguous()
        file.write_text(json.dumps(index))
        save_file(tensors, path, metadata={"format": "pt"})

    return damage


def poison(tensor: torch.Tensor) -> torch.Tensor:
    tensor[1, 2] = float("nan")
    return tensor


def append(pattern: str) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        with sorted(model.glob(pattern))[0].open("ab") as file:
            file.write(b" ")

    return damage


@pytest.mark.parametrize(("damage", "message"), [
    (change(Q, poison), f"{Q} holds values that are not finite"),
    (change(Q, lambda tensor: tensor[:12]), rf"shape of {Q} is \[12, 24\], the model's \[24, 24\]"),
    (
        change(Q, torch.clone, Q.replace("q_proj", "query")),
        rf"{Q} is missing(.|\n)*self_attn\.query\.weight is not part of LlamaForCausalLM",
    ),
    (append("tokenizer.json"), r"tokenizer\.json differs from the receipt"),
    (lambda model: (model / "chat_template.jinja").unlink(), "in the receipt, but not in the folder"),
    (append("model-00001-*.safetensors"), "is not a complete safetensors file"),
    (lambda model: next(model.glob("model-00002-*")).unlink(), "is missing. The model is not complete"),
    (lambda model: (model / "notes.txt").touch(), r"notes\.txt is not in the receipt"),
    (lambda model: (model / "old.safetensors").touch(), r"old\.safetensors is not part of the model"),
])  # fmt: skip
def test_damage_is_reported(model: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(model)
    with pytest.raises(ShardmakeError, match=message):
        verify(model)


def test_unusual_values_are_reported(model: Path) -> None:
    """A banned token has a row of -inf, and some models are published with a matrix of zeros."""
    change(Q, torch.zeros_like)(model)

    def ban(tensor: torch.Tensor) -> torch.Tensor:
        tensor[3] = -torch.inf
        return tensor

    (model / "receipt.json").touch()  # it is removed again
    change("lm_head.weight", ban)(model)
    assert verify(model).remarks() == [f"{Q} is all zero.", "1 rows of lm_head.weight are -inf."]


def test_one_different_bit_is_detected(checkpoint: Path, model: Path) -> None:
    def flip(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.int16)[3, 3] ^= 1
        return tensor

    change(Q, flip)(model)
    verify(model)
    with pytest.raises(ShardmakeError, match=f"{Q} differs"):
        verify(model, checkpoint)
