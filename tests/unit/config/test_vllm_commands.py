"""Commands and runs in the docs are accepted, name variables that scripts get, and start vLLM as the installed TRL does."""

import re
import shlex
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml

from shardmake.config.models import Run
from shardmake.config.script_file import PREFIX, SCRIPT_VARIABLES
from tests.replaced_commands import COMMON, RUNS
from tests.unit.config.samples import RUN, merged

PAGE = Path(__file__).resolve().parents[3] / "docs/how-to/user-script.md"
VALUES = {"SHARDMAKE_BASE": "base", "SHARDMAKE_SERVICE_HOST": "10.0.0.3", "SHARDMAKE_SERVICE_PORT": "12345"}


@pytest.fixture
def documented() -> dict[str, Any]:
    """The settings of the page's run with a server."""
    (block,) = re.findall(r"```yaml\n(    nodes: 2\n.*?)```", PAGE.read_text(), re.DOTALL)
    settings: dict[str, Any] = yaml.safe_load(block)
    return settings


def test_the_documented_run_is_accepted(documented: dict[str, Any]) -> None:
    run = Run(**merged(RUN, documented | {"script": "grpo.py"}))
    assert run.service_nodes == 1 and run.service and run.service.health == "/health"


def test_the_server_is_started_as_trl_starts_it(documented: dict[str, Any]) -> None:
    from trl.scripts.vllm_serve import ScriptArguments, build_command

    variable, *ours = shlex.split(Template(documented["service"]["command"]).substitute(VALUES))
    arguments = ScriptArguments(model="base", host="10.0.0.3", port=12345, tensor_parallel_size=8)
    theirs = build_command(arguments)
    assert variable == "VLLM_SERVER_DEV_MODE=1" and ours[:3] == ["vllm", "serve", "base"] and "base" in theirs
    pairs = dict(zip(ours[3::2], ours[4::2], strict=True))
    assert {name: theirs[theirs.index(name) + 1] for name in pairs} == pairs
    needed = {"--weight-transfer-config", "--logprobs-mode", "--max-logprobs"}
    assert needed <= pairs.keys()


def test_the_script_finds_the_server_with_trls_options(documented: dict[str, Any], tmp_path: Path) -> None:
    from transformers import HfArgumentParser
    from trl import GRPOConfig

    words = [Template(word).substitute(VALUES) for word in documented["script_args"]]
    (config,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(
        [*words, f"--output_dir={tmp_path}", "--use_cpu=true", "--bf16=false"]
    )
    assert config.use_vllm and config.vllm_mode == "server"
    assert (config.vllm_server_host, config.vllm_server_port) == ("10.0.0.3", 12345)
    assert config.vllm_gpu_memory_utilization == 0.3 and config.vllm_group_port == 51216, "as the page says"


@pytest.mark.parametrize("values", RUNS.values(), ids=RUNS.keys())
def test_every_configuration_on_the_page_is_valid(values: dict[str, Any]) -> None:
    run = Run(**COMMON | values)
    used = {word.removeprefix("$") for word in run.script_args if word.startswith(f"${PREFIX}")}
    assert run.script and used <= set(SCRIPT_VARIABLES)
