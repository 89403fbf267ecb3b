"""The command ``shardmake consolidate``: its arguments, the dry run, raw weights, the progress, no traceback."""

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file

from shardmake import cli
from shardmake.consolidate import destination, merge
from shardmake.consolidate.destination import find_base
from shardmake.consolidate.stream import show_progress
from shardmake.core.errors import ConfigError, HubError
from shardmake.core.manifest import format_sums, read_folder
from tests.unit.test_cli import configure

Run = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def vocabulary(tiny: None) -> None:
    Path("base/vocab.json").write_text("{}")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process; return its status and what it printed."""

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["shardmake", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = "".join(capfd.readouterr())
        assert "Traceback" not in printed and "Unexpected" not in printed, printed
        return int(end.value.code or 0), " ".join(printed.split())

    return call


def tree() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*"))


@pytest.mark.parametrize("source", ["run/checkpoint-2", "run", "./run", "missing/checkpoint-3"])
@pytest.mark.parametrize("has_config", [False, True])
def test_missing_model_folder_is_named(run: Run, source: str, has_config: bool) -> None:
    if has_config:
        configure()
    status, printed = run("consolidate", source)
    words = f"The model's folder is missing. Name it after the checkpoint: shardmake consolidate {source}"
    assert status == 2 and words in printed


def test_options_of_a_checkpoint_are_refused_for_a_run(run: Run) -> None:
    configure()
    Path("chat").mkdir()  # a folder of this name does not hide the run
    for words in ("--dry-run", "--raw", "--base base", "--overwrite", "--adapter", "--tasks 2", "--allow steps"):
        status, printed = run("consolidate", "chat", *words.split())
        assert status == 2 and "chat is the name of a run, whose configuration decides" in printed
    assert "train/receipt.json does not exist yet" in run("consolidate", "chat")[1]


def test_dry_run_lists_what_the_merge_writes(run: Run) -> None:
    before = tree()
    words = ("consolidate", "run", "out", "--base", "base", "--dtype", "bf16", "--max-shard-size", "1KB")
    status, listed = run(*words, "--dry-run")
    assert status == 0 and tree() == before and run(*words)[0] == 0
    for path in Path("out").iterdir():
        assert path.name == "receipt.json" or path.name in listed
    assert "run/checkpoint-2 (Hugging Face folder, 1 ranks, step 2)" in listed and "6 parameters in 1 tensors" in listed
    assert "replaces what is there" in run(*words, "--dry-run")[1]
    Path("out/notes.txt").touch()
    assert run(*words, "--dry-run")[0] == 2


def test_what_may_be_allowed(run: Run) -> None:
    status, printed = run("consolidate", "run", "out", "--allow", "zeros")
    assert status == 2 and "Unknown value of --allow: 'zeros'. Use one of steps, unexpected, untied." in printed
    assert run("consolidate", "run", "out", "--allow", "unexpected", "--allow", "steps")[0] == 0
    assert json.loads(Path("out/receipt.json").read_text())["allowed"] == ["steps", "unexpected"]


def test_base_is_a_folder_or_a_hub_id(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_base("base") == Path("base")
    with pytest.raises(ConfigError, match=r"It is a file\. Name its folder: .*/base$"):
        find_base("base/config.json")
    for named in ("nowhere", "a/b/c", "no such/model", ""):
        with pytest.raises(ConfigError, match=r"There is no such folder\. Name a folder or a hub id"):
            find_base(named) if named else find_base("lab/model/@")
    asked: list[object] = []

    def download(repository: str, revision: str | None, **settings: object) -> str:
        asked.append((repository, revision, settings.get("local_files_only", False)))
        return "base"

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_base("lab/model@v1") == Path("base")
    monkeypatch.setattr(destination, "with_retries", lambda fetch: fetch())
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    Path("base/config.json").unlink()  # only an incomplete copy is cached
    assert find_base("lab/model") == Path("base")
    assert asked == [("lab/model", "v1", True), ("lab/model", None, True), ("lab/model", None, False)]

    def fail(*_: object, local_files_only: bool = False, **__: object) -> str:
        raise LocalEntryNotFoundError("not cached") if local_files_only else OSError("We have no connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(HubError, match="no connection"):
        find_base("lab/other")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: "base")
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    with pytest.raises(ConfigError, match="is not in the hub's local cache, and HF_HUB_OFFLINE is set"):
        find_base("lab/model")


def test_base_without_its_weights(run: Run) -> None:
    """As in the hub's cache after a fetch of the small files: the index is there, the weights are not."""
    Path("base/model.safetensors").unlink()
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    Path("base/model.safetensors.index.json").write_text(json.dumps(index))
    assert run("consolidate", "run", "out", "--base", "base")[0] == 0
    assert Path("out/vocab.json").is_file() and not Path("out/model.safetensors.index.json").exists()


def test_raw_weights(run: Run) -> None:
    """As of torchtitan: no config, and names of another library."""
    weights = {"tok_embeddings.weight": torch.rand(4, 3), "layers.0.attention.wq.weight": torch.rand(3, 3).bfloat16()}
    dcp.save({**weights, "optimizer": {"state": torch.ones(3)}}, checkpoint_id="titan/step-7", no_dist=True)
    status, printed = run("consolidate", "titan", "out")
    assert status == 2 and "--raw" in printed and run("consolidate", "titan", "out", "--raw", "--base", "base")[0] == 2
    assert run("consolidate", "titan", "out", "--raw", "--dry-run")[0] == 0 and not Path("out").exists()
    assert run("consolidate", "titan", "out", "--raw")[0] == 0
    found = load_file("out/model.safetensors")
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    assert sorted(path.name for path in Path("out").iterdir()) == ["model.safetensors", "receipt.json"]
    assert json.loads(Path("out/receipt.json").read_text())["step"] == 7 and run("verify", "out")[0] == 0
    assert run("consolidate", "titan", "out", "--raw", "--max-shard-size", "0.04KB")[0] == 0
    assert Path("out/model.safetensors.index.json").is_file() and run("verify", "out")[0] == 0


class Terminal(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_alone_shows_progress(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with show_progress("Writing", 10) as advance:
        advance(10)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(logging.getLogger("shardmake"), "level", logging.INFO)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with show_progress("Writing", 2_000_000) as advance:
        advance(1_000_000)
    shown = terminal.getvalue()
    assert "Writing" in shown and "2.0 MB" in shown


def test_progress_counts_every_byte() -> None:
    counted: dict[str, list[int]] = {}

    @contextmanager
    def show(name: str, total: int) -> Iterator[Callable[[int], None]]:
        counted[name] = [total]
        yield counted[name].append

    merge.consolidate(Path("run"), Path("out"), base=Path("base"), progress=show)
    found = {name: (total, sum(parts)) for name, (total, *parts) in counted.items()}
    assert found == {"Writing": (24, 24), "Verifying": (24, 24)}


SHARD = "run/checkpoint-2/model.safetensors"
DAMAGE: list[tuple[str, bytes]] = [
    *(("run/checkpoint-2/config.json", content) for content in (b"[]", b"[" * 200_000, b"\xff\xfe\x00")),
    *((SHARD, len(header).to_bytes(8, "little") + header + bytes(24 * (len(header) > 9))) for header in (
        b"[]", b"3", b'{"w":3}', b'{"w":{"dtype":"F32","shape":[6],"data_offsets":[0.0,24.0]}}',
        b'{"w":{"dtype":"F32","shape":[1e400,-1],"data_offsets":[0,24]}}      ',
    )),
    *((f"{SHARD}.index.json", b) for b in (b'{"weight_map": {"w": ".."}}', b'{"weight_map": {"w": 3}}', b"[]")),
    ("run/checkpoint-2/latest", b"\xff\x00\xfe"),
    ("run/checkpoint-2/.metadata", b"\x80\x04K\x01."),
    ("base/tokenizer.json", b"[" * 200_000),
    ("base/config.json", b"[]"),
    ("base/config.json", b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    ("base/model.safetensors", (2).to_bytes(8, "little") + b"[]"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "content"), DAMAGE, ids=lambda value: str(value[:60]))
@pytest.mark.parametrize("command", ["consolidate", "verify"])
def test_no_input_ends_in_a_traceback(run: Run, path: str, content: bytes, command: str) -> None:
    Path(path).write_bytes(content)
    if path.endswith("index.json"):  # beside one file of weights it is not read
        Path(SHARD).unlink()
    if command == "verify":
        run("verify", str(Path(path).parent))
        return
    status, _ = run("consolidate", "run", "out", "--base", "base")
    assert status in (0, 2) and not Path(".out.partial").exists() and (status == 0) == Path("out").exists()


@pytest.mark.parametrize("workers", ["0", "-1", "one"])
def test_invalid_number_of_workers(run: Run, workers: str) -> None:
    assert run("consolidate", "run", "out", "--workers", workers)[0] == 2
    assert run("verify", "base", "--workers", workers)[0] == 2 and not Path(".out.partial").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"verification": 3}', "\x00"])
def test_verify_of_a_foreign_receipt(run: Run, text: str) -> None:
    Path("base/receipt.json").write_text(text)
    assert run("verify", "base")[0] == 2


def test_verify_compares_a_pushed_model_with_its_sums(run: Run) -> None:
    assert "The folder has no checksums to compare with." in run("verify", "base")[1]
    sums = Path("base/SHA256SUMS")
    sums.write_text(format_sums(read_folder(Path("base"))))
    Path("base/.cache").mkdir()
    Path("base/.cache/of-the-hub").touch()
    status, printed = run("verify", "base")
    assert status == 0 and "Every file has its checksum in SHA256SUMS." in printed
    Path("base/vocab.json").write_text("[]")
    status, printed = run("verify", "base")
    assert status == 2 and "vocab.json differs from SHA256SUMS" in printed
    Path("base/vocab.json").rename("base/words.json")
    status, printed = run("verify", "base")
    assert status == 2 and "vocab.json is in SHA256SUMS, but not in the folder" in printed
    assert "words.json is not in SHA256SUMS" in printed
    sums.write_text("of another program")
    status, printed = run("verify", "base")
    assert status == 2 and "SHA256SUMS was not written by Shardmake" in printed


def test_verify_compares_the_type_that_a_config_names(run: Run) -> None:
    assert run("verify", "base")[0] == 0, "a config may name none"
    Path("base/config.json").write_text('{"model_type": "tiny", "torch_dtype": "bfloat16"}')
    status, printed = run("verify", "base")
    assert status == 2 and "config.json declares bfloat16, the tensors are float32" in printed


def test_folders_and_pipes_in_place_of_files(run: Run) -> None:
    for name in ("model_states", "optim_states"):
        Path(f"ds/mp_rank_00_{name}.pt").mkdir(parents=True)
    assert run("consolidate", "ds", "out", "--base", "base")[0] == 2
    Path("fsdp").mkdir()
    Path("fsdp/.metadata").mkdir()
    assert run("consolidate", "fsdp", "out", "--base", "base")[0] == 2
