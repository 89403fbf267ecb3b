import pytest
import yaml

from shardmake.report.records import hide_folders, hide_folders_in_text
from shardmake.report.stage import configuration
from tests.finished_run import make_run


@pytest.mark.parametrize(("value", "shown"), [
    ("/home/ada/base", ".../base"), ("/home/ada/base/", ".../base/"),
    ("/home/ada lovelace/secret project/my base", ".../my base"), ("~/models/base", ".../base"),
    ("$HOME/models/base", ".../base"), ("../ada/secret/base", ".../base"), ("file:/scratch/ada/out", "file:.../out"),
    ("file:///scratch/ada lovelace/out", "file:.../out"), ("--data=/home/ada lovelace/x.jsonl", "--data=.../x.jsonl"),
    ("/scratch/ada/{run}/out", ".../out"), ("/data", "/data"),
    ("resources/demo/train.jsonl", "resources/demo/train.jsonl"), ("lab/base", "lab/base"),
    ("s3://lab/a/b", "s3://lab/a/b"), ("https://lab.org/a/b.jsonl", "https://lab.org/a/b.jsonl"),
    ("hub:lab/chat", "hub:lab/chat"),
])  # fmt: skip
def test_a_path_is_shown_without_its_folders(value: str, shown: str) -> None:
    assert hide_folders(value) == shown


@pytest.mark.parametrize(("text", "shown"), [
    ("/opt/ada/vllm serve lab/base --key=/home/ada/key", ".../vllm serve lab/base --key=.../key"),
    ("serve '/home/ada lovelace/base' --to file:///scratch/ada/out", "serve '.../base' --to file:.../out"),
    ("curl https://lab.org/a/b -d /home/ada/x", "curl https://lab.org/a/b -d .../x"),
])  # fmt: skip
def test_paths_in_a_command_are_shown_without_their_folders(text: str, shown: str) -> None:
    assert hide_folders_in_text(text) == shown


def test_a_command_and_the_path_of_a_url_stay_readable() -> None:
    service = {"command": "/opt/ada/vllm serve lab/base", "health": "/v1/models"}
    args = [f"--login={'0a' * 20}", "f3" * 20, "--revision=main", "config/long-name-of-a-model-7b-instruct.json"]
    run = make_run(script="/home/ada/t.py", script_args=args, service=service, service_nodes=1, nodes=1)
    entry = yaml.safe_load(configuration({"chat": run}))["runs"]["chat"]
    assert entry["service"] == {"command": ".../vllm serve lab/base", "health": "/v1/models"}
    assert entry["script"] == ".../t.py" and entry["script_args"] == ["--login=...", "...", *args[2:]]
