"""The model of another run as a base model: described before it is trained, and linked once it is verified."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.models import Run
from shardmake.core.errors import ConfigError, ModelError
from shardmake.fetch.stage import fetch
from shardmake.run.paths import RunDir
from shardmake.run.sources import Sources, content_of_model, localize, read_sources, recorded_weights, require_weights
from tests.finished_run import make_run, write_model

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "vocab_size": 32, "eos_token_id": 2,
}  # fmt: skip
BASE = {"config.json": json.dumps(CONFIG).encode(), "tokenizer.json": b"{}", "LICENSE": b"free", "README.md": b"# base"}
WEIGHTS = {"model-00001-of-00002.safetensors": b"one", "model-00002-of-00002.safetensors": b"two"}
MERGED = {
    **BASE, "config.json": json.dumps(CONFIG | {"dtype": "bfloat16", "eos_token_id": 3}).encode(),
    "model.safetensors.index.json": json.dumps({"weight_map": {name: name for name in WEIGHTS}}).encode(), **WEIGHTS,
}  # fmt: skip
del MERGED["README.md"]


def make_runs(root: Path) -> tuple[RunDir, RunDir]:
    """Return the folders of the runs chat, whose base model was fetched, and next, which starts from its model."""
    base = root / "base"
    base.mkdir()
    for name, content in (BASE | {"model.safetensors": b"untrained"}).items():
        (base / name).write_bytes(content)
    data = root / "train.jsonl"
    data.write_text("{}")
    chat = RunDir(root / "runs/chat")
    fetch(make_run(model=str(base), data={"train": str(data)}), chat)
    return chat, chat.sibling("next")


def next_run(root: Path, **changes: Any) -> Any:
    run = make_run(data={"train": str(root / "train.jsonl")}, **changes)
    return run.model_copy(update={"model": "run:chat"})


def test_the_description_is_known_before_the_training(tmp_path: Path) -> None:
    following = make_runs(tmp_path)[1]
    run = next_run(tmp_path)
    with pytest.raises(ConfigError, match=r"run:chat is another run's model, and .*next/sources.json does not exist"):
        localize(run, following)
    sources = fetch(run, following, "description")
    assert sources == Sources.read(following.sources)
    assert sources.model.name == "run:chat" and sources.model.origin is not None
    assert sources.model.first.name == str(tmp_path / "base")
    assert {path.name: path.read_bytes() for path in following.base_model.iterdir()} == BASE
    assert localize(run, following).model == str(following.base_model)
    (tmp_path / "base/LICENSE").unlink()
    (tmp_path / "base/tokenizer.json").write_text("{} ")
    fetch(run, following, "description")
    assert not (following.base_model / "LICENSE").exists()
    assert (following.base_model / "tokenizer.json").read_text() == "{} "
    with pytest.raises(ModelError, match=r"Run chat has no finished model yet: .*snakemake .*chat/model/receipt.json"):
        fetch(run, following, "weights")
    with pytest.raises(ModelError, match=r"Training was not started: the model of run chat was not fetched yet."):
        require_weights(following)


def test_the_run_before_must_be_fetched_first(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(ModelError, match=r"run chat is not known yet: .* shardmake fetch chat --part description"):
        fetch(next_run(tmp_path), RunDir(tmp_path / "runs/next"))


def test_verified_weights_are_linked_and_identify_the_model(tmp_path: Path) -> None:
    chat, following = make_runs(tmp_path)
    run = next_run(tmp_path)
    write_model(chat, MERGED)
    fetch(run, following)
    require_weights(following)
    assert sorted(path.name for path in following.base_model.iterdir()) == sorted({**BASE, **MERGED})
    links = {path.name: path for path in following.base_model.iterdir() if path.is_symlink()}
    assert sorted(links) == sorted([*WEIGHTS, "model.safetensors.index.json"])
    assert not any(path.readlink().is_absolute() for path in links.values())
    assert links["model-00001-of-00002.safetensors"].read_bytes() == b"one"
    before = content_of_model(following)
    described = following.sources.read_bytes()
    single = {name: content for name, content in MERGED.items() if "model" not in name}
    write_model(chat, {**single, "model.safetensors": b"both"})
    with pytest.raises(
        ModelError, match=r"is not the one that .*weights.json records. Fetch it first: shardmake fetch"
    ):
        require_weights(following)
    fetch(run, following)
    require_weights(following)
    weights = [path.name for path in following.base_model.iterdir() if path.is_symlink()]
    assert weights == ["model.safetensors"], "links to files that are gone are removed"
    assert content_of_model(following) != before
    assert following.sources.read_bytes() == described, "plan and data do not depend on the weights"


def test_a_chain_of_three_runs(tmp_path: Path) -> None:
    chat, following = make_runs(tmp_path)
    write_model(chat, MERGED)
    fetch(next_run(tmp_path), following)
    last = chat.sibling("last")
    run = next_run(tmp_path).model_copy(update={"model": "run:next"})
    fetch(run, last, "description")
    write_model(following, MERGED)
    fetch(run, last)
    sources = read_sources(last)
    assert sources is not None and sources.model.first.name == str(tmp_path / "base")
    assert sources.model.origin is not None and sources.model.origin.name == "run:chat"


CLASS = ["LlamaForSequenceClassification"]
OTHER: list[tuple[str, Any, str]] = [
    ("tokenizer.json", {"added": 1}, "tokenizer.json"),
    ("added_tokens.json", {}, "added_tokens.json"),
    ("chat_template.jinja", "new", "chat_template.jinja"),
    ("config.json", CONFIG | {"vocab_size": 40}, "vocab_size is 40 instead of 32"),
    ("config.json", CONFIG | {"architectures": CLASS}, r"architectures is \['Llama\w+'\] instead of \['LlamaForCausalLM'\]"),
]  # fmt: skip


def test_a_model_that_is_damaged_or_has_another_tokenizer_or_size_is_refused(tmp_path: Path) -> None:
    chat, following = make_runs(tmp_path)
    for name, content, problem in OTHER:
        write_model(chat, MERGED | {name: json.dumps(content).encode()})
        with pytest.raises(ModelError, match=rf"run chat has another config or tokenizer than .* \({problem}\)\."):
            fetch(next_run(tmp_path), following)
    (chat.model / "model-00002-of-00002.safetensors").write_bytes(b"TWO")
    with pytest.raises(ModelError, match=r"not the one that was verified: model-00002-of-00002.safetensors has other"):
        fetch(next_run(tmp_path), following)
    assert not following.weights_receipt.exists()


def test_a_template_of_the_runs_own_replaces_that_of_the_run_before(tmp_path: Path) -> None:
    chat, following = make_runs(tmp_path)
    write_model(chat, MERGED | {"chat_template.jinja": b"new"})
    run = next_run(tmp_path)
    data = run.data.model_copy(update={"chat_template": "own.jinja"})
    fetch(run.model_copy(update={"data": data}), following)
    require_weights(following)


def test_weights_of_a_checkpoint_are_merged_and_linked(tmp_path: Path) -> None:
    following, base = make_runs(tmp_path)[1], tmp_path / "base"
    run = make_run(model=str(base), resume_from="checkpoint-3", data={"train": str(tmp_path / "train.jsonl")})

    def merge(_: Run, source: Path, found: Path, out: Path) -> None:
        assert (str(source), found, out.parent.parent) == ("checkpoint-3", base, following.fetched)
        write_model(RunDir(out.parent), MERGED)

    sources = fetch(run, following, "description", merge)
    assert sources.model.origin is not None and sources.model.first.name == str(base)
    assert localize(run, following).model == str(following.base_model)
    with pytest.raises(ModelError, match=r"Training was not started: .*shardmake fetch next --part weights"):
        require_weights(following)
    with pytest.raises(ModelError, match="is from before resume_from was added to the run or removed"):
        fetch(run.model_copy(update={"resume_from": None}), following, "weights", merge)
    fetch(run, following, "weights", merge)
    require_weights(following)
    assert (following.base_model / "model-00001-of-00002.safetensors").read_bytes() == b"one"
    weights = {str(following.base_model / name) for name in MERGED if "model" in name}
    assert recorded_weights(following).keys() == weights
