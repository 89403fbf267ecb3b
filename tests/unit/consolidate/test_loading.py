"""The check with transformers runs nothing of the user's folders and asks nothing."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from shardmake.consolidate import loading, stage
from shardmake.consolidate.loading import LoadingReport, check_loading
from shardmake.core.errors import CheckpointError, ModelError
from shardmake.core.library_process import LibraryProcess
from shardmake.memory import cache
from shardmake.memory.families import FAMILIES
from tests.any_environment import AnyEnvironment
from tests.finished_run import make_run


def test_check_runs_in_a_neutral_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def ask(_: LibraryProcess, *order: Any) -> dict[str, Any]:
        asked.append(order)
        return vars(LoadingReport("Tiny"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":src")
    monkeypatch.setattr(AnyEnvironment, "ask", ask)
    assert check_loading(Path("model"), base=Path("base")).architecture == "Tiny"
    _, request, environment, folder, _ = asked[0]
    assert request["folder"] == str(tmp_path / "model") and request["base"] == str(tmp_path / "base")
    assert folder == Path("/")
    assert all(Path(entry).is_absolute() for entry in environment["PYTHONPATH"].split(os.pathsep))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of one tensor, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    save_file({"w": np.ones((2, 3), np.float32)}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "tiny"}')
    return tmp_path / "model"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LoadingReport]:
    """The answers of transformers that are still to be given."""
    answers = [LoadingReport("First", ties=(("a", "b"),)), LoadingReport("Second"), LoadingReport("Third")]
    monkeypatch.setattr(loading, "run_module", lambda *_: json.loads(json.dumps(vars(answers.pop(0)))))
    return answers


def test_same_config_and_headers_are_checked_once(model: Path, asked: list[LoadingReport]) -> None:
    """Other values of the weights and another folder give the same report."""
    found = check_loading(model)
    shutil.copytree(model, model.parent / "other")
    save_file({"w": np.zeros((2, 3), np.float32)}, model.parent / "other" / "model.safetensors")
    assert check_loading(model.parent / "other") == found == LoadingReport("First", ties=(("a", "b"),))
    assert len(asked) == 2


@pytest.mark.parametrize("what", ["config", "name", "shape", "type", "adapter", "base", "layout", "version", "code"])
def test_any_other_input_is_checked_again(
    what: str, model: Path, asked: list[LoadingReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(shutil.copytree(model, model.parent / "base"))
    check_loading(model, base=base, layout=base)
    weights = {"name": {"v": np.ones((2, 3), np.float32)}, "shape": {"w": np.ones((3, 2), np.float32)}}
    weights["type"] = {"w": np.ones((2, 3), np.float16)}
    if what in weights:
        save_file(weights[what], model / "model.safetensors")
    elif what == "layout":
        save_file(weights["name"], base / "model.safetensors")
    elif what in ("version", "code"):
        monkeypatch.setattr(cache, "_versions", lambda _: [what])
    else:
        name = "adapter_config.json" if what == "adapter" else "config.json"
        ((base if what == "base" else model) / name).write_text('{"model_type": "other"}')
    assert check_loading(model, base=base, layout=base).architecture == "Second"


def test_reports_that_are_not_kept(model: Path, asked: list[LoadingReport], monkeypatch: pytest.MonkeyPatch) -> None:
    asked[:] = [LoadingReport("A", missing=("w",)), LoadingReport("B"), LoadingReport("C"), LoadingReport("D")]
    assert [check_loading(model).architecture for _ in range(3)] == ["A", "B", "B"]  # the one with a problem
    assert check_loading(model, trust_remote_code=True).architecture == "C"  # code may do anything
    (kept,) = (model.parent / "cache" / "shardmake").glob("loading-*.json")
    kept.write_text("[")
    assert check_loading(model).architecture == "D"


def test_cache_that_cannot_be_written(model: Path, asked: list[LoadingReport]) -> None:
    (model.parent / "cache").touch()
    assert [check_loading(model).architecture for _ in range(2)] == ["First", "Second"]


@pytest.mark.parametrize("config", ['{"num_hidden_layers": 10000000}', '{"text_config": {"num_experts": 99999999}}'])
def test_impossible_config_is_refused(config: str, model: Path, asked: list[LoadingReport]) -> None:
    """transformers would build the layers one by one until the memory is used up."""
    (model / "config.json").write_text(config)
    with pytest.raises(ModelError, match="is not the config of a model"):
        check_loading(model)
    assert len(asked) == 3


def test_killed_check_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "killed.py").write_text("import os\n\ndef answer(request):\n    os.kill(os.getpid(), 9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(loading, "__name__", "killed")
    with pytest.raises(ModelError, match="was killed, most likely because the memory was used up"):
        check_loading(tmp_path)


@pytest.mark.parametrize("name", ["AutoModelForCausalLM", "AutoModel", "pipeline", "set_seed", "os", ""])
def test_architecture_is_a_model_class(name: str) -> None:
    """With an Auto class as architecture, transformers would choose the code that auto_map names."""
    config = LlamaConfig(architectures=[name], auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    with pytest.raises(ModelError, match=r"which transformers .* does not have"):
        loading.find_class(Path("model"), config, trust_remote_code=True)


def test_converter_of_parallel_parts_runs_in_a_neutral_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoint" / "global_step2").mkdir(parents=True)
    (tmp_path / "checkpoint" / "global_step2" / "mp_rank_01_model_states.pt").touch()
    started: list[Any] = []

    def run(command: list[str], **settings: Any) -> Any:
        started.append((command, settings))
        return SimpleNamespace(returncode=1, stderr="no optimizer")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardmake.consolidate.stage.subprocess.run", run)
    with pytest.raises(CheckpointError, match="no optimizer"), stage.joined_parts(Path("checkpoint"), Path()):
        pass
    command, settings = started[0]
    assert command[1:4] == ["-P", "-m", stage.CONVERTER] and settings["cwd"] == Path("/")
    assert str(tmp_path / "checkpoint" / "global_step2") in command


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "kind", [kind for kind, family in FAMILIES.items() if not family.experts and kind != "gemma4_text"]
)
def test_report_on_a_family_is_that_of_transformers(kind: str, tied: bool, tmp_path: Path) -> None:
    """The files of Gemma 4 also hold a buffer of each layer, so transformers is asked."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads))
    model.save_pretrained(tmp_path)
    report = loading.written_report(tmp_path, tmp_path, None)
    assert report == loading.load(tmp_path, False, layout=tmp_path) and bool(report.ties) == tied
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"hidden_activation": None}
    others = {"num_hidden_layers": 3, "hidden_act": "silv", "architectures": ["Other"], "vocab_size": "x"}
    for key, value in others.items():
        path.write_text(json.dumps(config | {key: value}))
        assert loading.written_report(tmp_path, tmp_path, None) is None, "transformers is asked"


def test_the_base_is_that_of_the_config_or_of_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, repository = "0123456789abcdef0123456789abcdef01234567", tmp_path / "models--lab--base"
    for folder in (snapshot := repository / "snapshots" / commit, repository / "refs"):
        folder.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    found = [stage.base_folder(make_run(model=name)) for name in (str(tmp_path), "lab/base", "lab/other")]
    assert found == [tmp_path, snapshot, None]
