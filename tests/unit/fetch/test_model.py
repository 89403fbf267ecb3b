import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from shardmake.checkpoint.formats.huggingface import read, weight_names
from shardmake.core.atomic import read_json
from shardmake.core.disk import FreeSpace
from shardmake.core.errors import ShardmakeError
from shardmake.core.manifest import read_folder, record
from shardmake.fetch.model import check_model_folder, choose_files
from shardmake.fetch.stage import fetch
from shardmake.run.paths import RunDir
from shardmake.run.receipts import WeightsReceipt
from shardmake.run.sources import Sources, content_of_model, localize, read_sources, require_weights
from tests.finished_run import make_run
from tests.hub import READER, STRANGER, FakeHub

Patch = pytest.MonkeyPatch

SHARDS = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 300_000 for n in (1, 2)}
FILES = {
    "config.json": b"{}", "tokenizer.json": b"{}", "README.md": b"---\nlicense: mit\n---\n",
    "model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode(), **SHARDS,
}  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: Patch) -> Iterator[FakeHub]:
    with FakeHub(tmp_path / "hub") as server:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("shardmake.core.hub.RETRY_WAITS", (0.0, 0.0, 0.0))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", READER)
        (tmp_path / "train.jsonl").write_text("{}\n")
        yield server


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "chat")


RUN = make_run(model="lab/base", data={"train": "train.jsonl"})


def test_the_model_is_pinned_to_its_commit_with_sizes_and_checksums(hub: FakeHub, rundir: RunDir) -> None:
    commit = hub.add("lab/base", FILES)
    sources = fetch(RUN, rundir)
    assert (sources.model.name, sources.model.commit) == ("lab/base", commit)
    assert read_folder(Path(sources.model.path)) == sources.model.files and sources.model.files.keys() == FILES.keys()
    assert [(one.path, one.commit) for one in sources.train] == [("train.jsonl", None)]
    assert Sources.read(rundir.sources) == sources


@pytest.mark.parametrize("address", ["http://hub.invalid", "http://127.0.0.1:9"])
def test_without_a_network_the_message_says_what_to_do_after_one_retry(
    hub: FakeHub, rundir: RunDir, address: str, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shardmake.core.hub.RETRY_WAITS", (0.0, 1e6))
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(ShardmakeError, match=r"(?s)^Fetching lab/base failed: .*This machine does not reach the hub"):
        fetch(RUN, rundir)
    assert sum("Retrying" in message for message in caplog.messages) == 1


def test_a_plan_needs_no_weights(hub: FakeHub, rundir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    hub.add("lab/base", FILES)
    with pytest.raises(ShardmakeError, match="Run first: shardmake fetch chat"):
        fetch(RUN, rundir, part="weights")
    described = fetch(RUN, rundir, part="description")
    folder = Path(described.model.path)
    assert not hub.asked("resolve.*safetensors$")
    assert {path.name for path in folder.iterdir()} == FILES.keys() - SHARDS.keys()
    with pytest.raises(
        ShardmakeError, match=r"2 files of lab/base are missing .*Fetch them first: shardmake fetch chat"
    ):
        require_weights(rundir)
    caplog.set_level("INFO", "shardmake")
    assert fetch(RUN, rundir, part="weights") == described
    assert caplog.messages == ["Fetching the weights of lab/base: 2 files, 0.0 GB."]
    require_weights(rundir)
    assert read_folder(folder) == described.model.files, "what the hub listed is what arrived"
    assert read_json(rundir.weights_receipt, "")["files"].keys() == FILES.keys()
    hub.requests.clear()
    assert fetch(RUN, rundir) == described and not hub.requests


def test_weights_that_the_disk_has_no_room_for(hub: FakeHub, rundir: RunDir, monkeypatch: Patch) -> None:
    hub.add("lab/base", FILES)
    fetch(RUN, rundir, part="description")
    monkeypatch.setattr("shardmake.core.disk.free_space", lambda _: FreeSpace(1000, "your quota on /home"))
    with pytest.raises(ShardmakeError, match=r"The base model's weights need .* left \(your quota on /home\)"):
        fetch(RUN, rundir, part="weights")
    assert not hub.asked("resolve.*safetensors$")


def test_a_download_goes_on_where_it_broke_off(hub: FakeHub, rundir: RunDir, monkeypatch: Patch) -> None:
    hub.add("lab/base", FILES)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 50_000)
    hub.cut("GET .*model-00001")
    sources = fetch(RUN, rundir)
    assert hub.ranges == ["bytes=150000-"] and read_folder(Path(sources.model.path)) == sources.model.files


def test_later_stages_read_the_local_copy(hub: FakeHub, rundir: RunDir) -> None:
    assert localize(RUN, rundir) is RUN
    hub.add("lab/base", FILES)
    named = RUN.model_copy(update={"revision": "main"})
    sources, run = fetch(named, rundir), localize(named, rundir)
    assert (run.model, run.revision, run.data.train) == (sources.model.path, None, "train.jsonl")


def test_a_configuration_that_changed_since_asks_for_another_fetch(hub: FakeHub, rundir: RunDir) -> None:
    hub.add("lab/base", FILES)
    fetch(RUN, rundir)
    other, train = {"train": "other.jsonl"}, {"train": "train.jsonl"}
    for changes in ({"model": "lab/other"}, {"revision": "v2"}, {"data": other}, {"data": {**train, "eval": "other"}}):
        with pytest.raises(
            ShardmakeError, match=r"the configuration names .*, but .* has .*again: shardmake fetch chat"
        ):
            localize(make_run(**{"model": "lab/base", "data": train, **changes}), rundir)


def test_a_branch_that_moves_does_not_move_the_run(hub: FakeHub, rundir: RunDir) -> None:
    """But another revision is fetched anew."""
    first = hub.add("lab/base", FILES)
    fetch(RUN, rundir)
    newest = hub.add("lab/base", {**FILES, "config.json": b'{"new": 1}'})
    hub.requests.clear()
    assert fetch(RUN, rundir).model.commit == first and not hub.requests
    assert fetch(RUN.model_copy(update={"revision": "main"}), rundir).model.commit == newest
    assert fetch(RUN.model_copy(update={"revision": first}), rundir).model.commit == first


def test_finished_files_are_not_fetched_again(hub: FakeHub, rundir: RunDir) -> None:
    hub.add("lab/base", FILES)
    missing = Path(fetch(RUN, rundir).model.path, "model-00002-of-00002.safetensors")
    missing.resolve().unlink()
    missing.unlink()
    hub.requests.clear()
    assert missing.name in fetch(RUN, rundir).model.files
    assert [path.rpartition("/")[2] for path in hub.asked("GET /lab/base/resolve/")] == [missing.name]


@pytest.mark.parametrize("lost", ["README.md", "model-00002-of-00002.safetensors"])
def test_a_fetch_that_failed_leaves_no_receipt(hub: FakeHub, rundir: RunDir, lost: str) -> None:
    hub.add("lab/base", FILES)
    hub.fail(f"GET /lab/base/resolve/.*{lost}", times=99, status=404)
    with pytest.raises(ShardmakeError, match="Fetching lab/base failed"):
        fetch(RUN, rundir)
    assert (read_sources(rundir) is None) == (lost == "README.md") and not rundir.weights_receipt.exists()


def test_a_damaged_file_in_the_cache_is_replaced(hub: FakeHub, rundir: RunDir) -> None:
    hub.add("lab/base", FILES)
    path = Path(fetch(RUN, rundir).model.path, "config.json")
    path.write_bytes(b"[]")
    rundir.sources.unlink()
    fetch(RUN, rundir)
    assert path.read_bytes() == b"{}"


@pytest.mark.parametrize(("token", "advice"), [
    (None, r"Log in with `hf auth login` .*accept it there"), (STRANGER, r"Accept it at http://.*/lab/base"),
])  # fmt: skip
def test_a_gated_model_says_where_to_accept_its_licence(
    hub: FakeHub, rundir: RunDir, monkeypatch: Patch, tmp_path: Path, token: str | None, advice: str
) -> None:
    hub.add("lab/base", FILES, gated=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    restricted = "Fetching lab/base failed: Access to model lab/base is restricted"
    with pytest.raises(ShardmakeError, match=f"{restricted}.*\n.*{advice}"):
        fetch(RUN, rundir)


def test_a_misspelt_model(hub: FakeHub, rundir: RunDir) -> None:
    with pytest.raises(ShardmakeError, match=r"Fetching lab/base failed: Repository not found.*\n.*Check the name"):
        fetch(RUN, rundir)


def test_offline_what_is_in_the_cache_does(hub: FakeHub, rundir: RunDir, monkeypatch: Patch) -> None:
    hub.add("lab/base", FILES)
    online = fetch(RUN, rundir)
    rundir.sources.unlink()
    hub.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch(RUN, rundir) == online and not hub.requests
    with pytest.raises(ShardmakeError, match=r"lab/other is not in the local cache, and HF_HUB_OFFLINE"):
        fetch(make_run(model="lab/other", data={"train": "train.jsonl"}), rundir)


def test_a_model_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardmakeError, match=r"config\.json, its weights"):
        check_model_folder(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    check_model_folder(tmp_path)
    for removed in ("config.json", "model-00002-of-00002.safetensors", "tokenizer.json"):
        (tmp_path / removed).unlink()
        with pytest.raises(ShardmakeError, match=removed.replace("tokenizer.json", r"a tokenizer \(tokenizer.json")):
            check_model_folder(tmp_path)


def test_one_file_of_weights_counts_before_an_index(tmp_path: Path) -> None:
    """transformers leaves the index of earlier shards in a folder, and loads the one file, even beside the shards."""
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    first, second = (LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)) for _ in range(2))
    first.save_pretrained(tmp_path, max_shard_size="1KB")
    shards = {path: path.read_bytes() for path in tmp_path.glob("model-*.safetensors")}
    second.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert shards and (tmp_path / "model.safetensors.index.json").is_file()
    for content in ({}, shards):
        for path, held in content.items():
            path.write_bytes(held)
        check_model_folder(tmp_path)
        loaded = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(loaded[name], weight) for name, weight in second.state_dict().items())
        held_in = {piece.record.path.name for one in read(tmp_path).tensors.values() for piece in one.pieces}
        assert held_in == {"model.safetensors"} and weight_names(tmp_path) == loaded.keys()
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(SafetensorError):
        LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ShardmakeError, match=r"the content of model\.safetensors, which is empty"):
        check_model_folder(tmp_path)


@pytest.mark.parametrize(("name", "dtype", "config", "settings", "refused"), [
    ("q.weight", torch.float8_e4m3fn, {}, {}, True),
    ("q.weight_scale", torch.float8_e8m0fnu, {}, {}, True),
    ("q.weight_packed", torch.uint8, {}, {}, True),
    ("q.qweight", torch.int32, {}, {}, True),
    ("q.weight", torch.float8_e4m3fn, {"quantization_config": {"quant_method": "fp8"}}, {}, False),
    ("q.weight", torch.float8_e4m3fn, {}, {"script": "train.py"}, False),
    ("q.weight", torch.float16, {}, {}, False),
    ("attn.bias", torch.uint8, {}, {}, False),
    ("position_ids", torch.int64, {}, {}, False),
])  # fmt: skip
def test_quantized_weights_that_no_config_declares(  # type: ignore[no-untyped-def]
    tmp_path: Path, rundir: RunDir, name: str, dtype: torch.dtype, config, settings, refused: bool
) -> None:
    """transformers converts them without their scales."""
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"a": torch.ones(1), name: torch.zeros(2).to(dtype)}, tmp_path / "model.safetensors")
    run = make_run(model=str(tmp_path), data={"train": str(tmp_path / "train.jsonl")}, **settings)
    with pytest.raises(ShardmakeError, match=f"but {name} in .* has the type") if refused else nullcontext():
        fetch(run, rundir)
    assert rundir.weights_receipt.exists() is not refused


@pytest.mark.parametrize(("there", "chosen"), [
    (["model.safetensors", "pytorch_model.bin", "tf_model.h5"], ["model.safetensors"]),
    (["pytorch_model-1.bin", "training_args.bin", "config.json"], ["config.json", "pytorch_model-1.bin"]),
    (["consolidated.safetensors", "model-1.safetensors"], ["model-1.safetensors"]),
    (["model.safetensors", "onnx/model.safetensors", "original/params.json"], ["model.safetensors"]),
    (["LICENSE", "tokenizer.model", "chat_template.jinja", "image.png"],
     ["LICENSE", "chat_template.jinja", "tokenizer.model"]),
])  # fmt: skip
def test_only_what_loading_needs_is_fetched(there: list[str], chosen: list[str]) -> None:
    assert choose_files(there) == chosen


def test_weights_of_folders_are_read_once(tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", "shardmake")
    base, run = tmp_path / "base", make_run(model="base", data={"train": "train.jsonl"})
    base.mkdir()
    (tmp_path / "train.jsonl").write_text("{}\n")
    for name, content in FILES.items():
        (base / name).write_bytes(content)
    first, second = RunDir(tmp_path / "runs/one"), RunDir(tmp_path / "runs/two")
    read: list[int] = []
    for rundir in (first, second):
        caplog.clear()
        fetch(run, rundir)
        assert WeightsReceipt.read(rundir.weights_receipt).files == {name: record(base / name) for name in SHARDS}
        read.append(sum("Reading the weights" in message for message in caplog.messages))
        require_weights(rundir)
    assert read == [1, 0]
    identity, shard = content_of_model(first), base / min(SHARDS)
    assert identity == content_of_model(second)
    shard.write_bytes(b"!" + shard.read_bytes()[1:])
    with pytest.raises(ShardmakeError, match=rf"{shard} has other content\..*--part weights.*train from the start"):
        require_weights(first)
    fetch(run, first)
    require_weights(first)
    assert content_of_model(first) != identity, "its checkpoints are of another base model"
    earlier = WeightsReceipt(files={})
    earlier.write(second.weights_receipt)
    second.checkpoints.mkdir(parents=True)
    fetch(run, second)
    assert WeightsReceipt.read(second.weights_receipt) == earlier, "a training of an older version resumes"
    WeightsReceipt(files={"pytorch_model.bin": record(shard)}).write(second.weights_receipt)
    fetch(run, second)
    assert content_of_model(second) == content_of_model(first), "the weights were those of another model"
