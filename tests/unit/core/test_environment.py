import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import shardmake
from shardmake.core.environment import checkout_commit, hub_environment, kernel_caches
from tests.workflow.checkout import LOCAL, UNPUSHED

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def test_the_cache_is_shared_and_nodes_are_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_environment(None, offline=False) == {}
    assert hub_environment("cache", offline=False)["HF_HOME"] == str(tmp_path / "cache")
    assert hub_environment(None, offline=True) == OFFLINE


STAGES = {
    "fetch": ("fetch.stage.fetch", False), "data": ("data.stage.prepare", True),
    "consolidate": ("consolidate.stage.consolidate_run", True), "evaluate": ("evaluate.stage.evaluate", True),
    "push": ("push.stage.push", False), "report": ("report.stage.write_report", False),
}  # fmt: skip
"""The function of a stage, and whether it runs on a node."""
TOKENIZED = SimpleNamespace(train=SimpleNamespace(examples=9, tokens=99, sequences=9))


@pytest.mark.parametrize("internet", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_offline_stages_on_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, internet: bool) -> None:
    from shardmake.cli import app

    lock = Path(kernel_caches(str(tmp_path))["TORCH_EXTENSIONS_DIR"]) / "cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setattr("shardmake.core.build_locks.version", lambda _: "2.13")
    cluster = LOCAL | {"scratch": str(tmp_path), "internet_on_compute_nodes": internet}
    (tmp_path / "cluster.yaml").write_text(json.dumps(cluster))
    run = UNPUSHED | {"model": "lab/b", "data": {"train": "lab/t"}}
    config = {"cluster": str(tmp_path / "cluster.yaml"), "runs": {"chat": run}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    function, on_node = STAGES[stage]
    seen: dict[str, str] = {}
    monkeypatch.setattr("os.environ", {key: value for key, value in os.environ.items() if "OFFLINE" not in key})
    monkeypatch.setattr(f"shardmake.{function}", lambda *_, **__: seen.update(os.environ) or TOKENIZED)
    options = ["--config", str(tmp_path / "config.yaml"), "--runs", str(tmp_path / "runs")]
    done = CliRunner().invoke(app, [stage, "chat", *options])
    assert done.exit_code == 0, done.output
    assert OFFLINE.keys() & seen.keys() == (OFFLINE.keys() if on_node and not internet else set())
    assert ("TRITON_CACHE_DIR" in seen) == on_node
    assert lock.exists() != on_node, "the lock of a build that was killed"


def test_a_machine_without_the_scratch_folder_compiles_in_its_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "job-7").mkdir()
    for job, folder in (("", tmp_path), ("6", tmp_path), ("7", tmp_path / "job-7")):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        caches = kernel_caches(f"{tmp_path}/job-${{SLURM_JOB_ID}}")
        assert Path(caches["TRITON_CACHE_DIR"]) == folder / f"shardmake-{os.getuid()}/triton"
    monkeypatch.setenv("TMPDIR", "")  # not the current folder
    assert Path(kernel_caches("$TMPDIR")["TRITON_CACHE_DIR"]).is_relative_to(tmp_path)


def test_each_user_has_a_cache_of_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmake.core.environment.private_folder", lambda path: path)  # of another user

    def folders(user: int) -> set[str]:
        monkeypatch.setattr("os.getuid", lambda: user)
        return set(kernel_caches(str(tmp_path)).values())

    assert all(folder.startswith(f"{tmp_path}/shardmake-42001/") for folder in folders(42001))
    assert folders(42001).isdisjoint(folders(42002))


def test_the_token_of_a_login_is_found_also_with_a_cache_for_the_lab(tmp_path: Path) -> None:
    """The library reads its variables when it is imported, so it is asked in a process of its own."""
    home, lab = tmp_path / "home", tmp_path / "lab/cache"
    for folder, token in ((home / ".cache/huggingface", "hf_of_this_user"), (lab, "hf_of_somebody_else")):
        folder.mkdir(parents=True)
        (folder / "token").write_text(token)
    program = (
        "import os; from shardmake.core.environment import hub_environment as variables\n"
        f"for _ in range(2): os.environ.update(variables({str(lab)!r}, offline=False))\n"
        "from huggingface_hub import constants, get_token; print(get_token(), constants.HF_HUB_CACHE)"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    command, clean = [sys.executable, "-c", program], clean | {"HOME": str(home)}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["hf_of_this_user", f"{lab}/hub"]


def test_a_commit_is_known_only_for_tracked_files(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").touch()
    assert checkout_commit(package) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    assert checkout_commit(package) is None, "installed below somebody else's repository"
    subprocess.run([*git, "add", "package"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "second"], check=True)
    assert re.fullmatch("[0-9a-f]{12}", checkout_commit(package) or "")
    (package / "module.py").write_text("edited")
    assert (checkout_commit(package) or "").endswith("-dirty")


def test_no_default_of_a_function_keeps_os_environ() -> None:
    """`datasets` puts another object in its place, and a default would stay the old one."""
    sources = list(Path(shardmake.__file__).parent.rglob("*.py"))
    assert len(sources) > 100
    assert [path.name for path in sources if re.search(r"= os\.environ[,)]", path.read_text())] == []


SLOW = "{'huggingface_hub', 'torch', 'transformers', 'datasets', 'pydantic', 'yaml', 'packaging', 'pickle'}"
SETTING = f"import shardmake.cli, sys; print(*sorted({SLOW} & {{*sys.modules}}))"
WITHOUT_TORCH = """
import sys
from shardmake.core.environment import import_without_torch
import_without_torch()
import datasets, trl.data_utils, transformers
print('torch' in sys.modules)
import torch
print(torch.ones(1).item())
"""


@pytest.mark.parametrize(
    ("program", "printed"), [(SETTING, "\n"), (WITHOUT_TORCH, "False\n1.0\n")], ids=["cli", "tokenizers"]
)
def test_the_command_line_imports_no_library_and_tokenizers_no_torch_which_stays_importable(
    program: str, printed: str
) -> None:
    """The hub's libraries read their variables at import, which the command line sets."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (printed, "")
