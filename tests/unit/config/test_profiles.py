"""The profiles and the rules have the names that people type, and no profile silently overrides another."""

import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from typer.main import get_group

from shardmake.cli import app
from shardmake.run.paths import RunDir

REPOSITORY = Path(__file__).resolve().parents[3]
PROFILES = ("default", "local", "slurm")
ASK = "import sys; from snakemake.cli import parse_args; print(parse_args(sys.argv[1:])[1].executor)"

PAUSES = """
import asyncio, logging, sys, threading
from types import SimpleNamespace
import snakemake_executor_plugin_slurm as plugin
from snakemake.cli import parse_args
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

arguments = parse_args(sys.argv[1:])[1]
settings = ExecutorPluginRegistry().get_plugin(arguments.executor).get_settings(arguments)
executor = object.__new__(plugin.Executor)
executor.workflow = SimpleNamespace(
    executor_settings=settings, executor_plugin=SimpleNamespace(common_settings=plugin.common_settings)
)
executor.logger, executor.lock, executor.active_jobs, executor.wait = logging.getLogger(), threading.Lock(), [], True
pauses = []

async def sleep(seconds):
    pauses.append(seconds)
    executor.wait = len(pauses) < 4

asyncio.sleep = sleep
asyncio.run(executor._wait_for_jobs())
print(*pauses)
"""


def keys(profile: str) -> set[str]:
    return set(yaml.safe_load((REPOSITORY / "profiles" / profile / "config.yaml").read_text()))


def test_snakemake_merges_default_over_the_others_so_the_keys_are_disjoint() -> None:
    for one, other in combinations(PROFILES, 2):
        if "default" in (one, other):
            assert not keys(one) & keys(other), (one, other)
    link = REPOSITORY / "slurm"  # the word that people type is the profile
    assert link.is_symlink() and str(link.readlink()) == "profiles/slurm" and (link / "config.yaml").is_file()


@pytest.mark.parametrize(("profile", "executor"), [("slurm", "slurm"), ("profiles/local", "local")])
def test_the_executor_in_force_is_the_one_asked_for(profile: str, executor: str) -> None:
    command = [sys.executable, "-c", ASK, "--profile", profile]
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert answer.stdout.split()[-1] == executor


def test_snakemake_waits_at_its_end_for_a_short_pause_of_the_slurm_executor_at_most() -> None:
    """The executor's thread pauses between two looks, also while no job runs; Snakemake's end joins that thread."""
    command = [sys.executable, "-c", PAUSES, "--profile", "slurm"]
    pauses = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()[-4:]
    seconds = yaml.safe_load((REPOSITORY / "profiles/slurm/config.yaml").read_text())
    assert pauses == ["0", *[str(seconds["slurm-init-seconds-before-status-checks"])] * 3] and int(pauses[-1]) <= 5


def test_plain_snakemake_refuses_on_a_login_node() -> None:
    command = [sys.executable, "-m", "snakemake", "--nolock", "--configfile", "tests/lint.yaml"]
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert answer.returncode != 0 and "cores" in answer.stderr + answer.stdout


def test_each_rule_has_the_name_of_its_command_and_file() -> None:
    commands = get_group(app).commands.keys()
    files = {file.stem: file.read_text() for file in (REPOSITORY / "workflow/rules").glob("*.smk")}
    steps = set(files) - {"common"}
    assert steps == {"fetch", "plan", "render", "data", "train", "consolidate", "evaluate", "push", "report"}
    assert steps <= commands
    for step in steps:
        rules = re.findall(r"^rule (\w+):", files[step], flags=re.MULTILINE)
        assert rules[0] == f"{step}_run" and f'command("{step} ' in files[step]
        assert f'"{step}":' in files["common"], f"`snakemake {step}` has no target"


def test_the_page_marks_exactly_the_outputs_of_rules() -> None:
    rules = "".join(file.read_text() for file in (REPOSITORY / "workflow/rules").glob("*.smk"))
    sections = re.findall(r"output:\n(.*?)log:", rules, flags=re.DOTALL)
    names = {name for section in sections for name in re.findall(r"PATHS\.(\w+)", section)}
    outputs = {str(getattr(RunDir(Path()), name)) for name in names}
    marked = re.findall(r"`([^`]+?)/?` \*", (REPOSITORY / "docs/reference/run-folder.md").read_text())
    assert sorted(marked) == sorted(outputs)


def test_every_rule_logs_and_no_rule_declares_checkpoints() -> None:
    for file in (REPOSITORY / "workflow/rules").glob("*.smk"):
        for rule in re.split(r"^rule ", file.read_text(), flags=re.MULTILINE)[1:]:
            assert "checkpoints" not in rule.split("log:")[0]
            for directive in ("log:", "message:", "shell:"):
                assert directive in rule, (file.name, rule.splitlines()[0])
            assert "conda:" not in rule, "the rules run in the environment of Snakemake, which has Shardmake"
