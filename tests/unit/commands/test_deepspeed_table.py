"""`shardmake estimate --deepspeed-table` against what DeepSpeed prints for the same counts."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardmake.cli import app
from shardmake.commands.deepspeed_table import deepspeed_table, largest_layer
from shardmake.core.units import GIB
from shardmake.memory.model import ParameterSpec
from tests.unit.plans import LLAMA, make_model


def figures(text: str) -> list[tuple[str, str]]:
    """Host and GPU of each line."""
    return re.findall(r"(\d+\.\d\d)GB \| +(\d+\.\d\d)GB", text)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (2, 8)])
def test_the_rows_are_those_that_deepspeed_prints(nodes: int, gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_cold

    model = make_model(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, vocab_size=128256)
    estimate_zero2_model_states_mem_needs_all_cold(model.parameters, gpus, nodes)
    estimate_zero3_model_states_mem_needs_all_cold(model.parameters, largest_layer(model), gpus, nodes)
    theirs = figures(capsys.readouterr().out)
    table = deepspeed_table(model, nodes, gpus)
    assert len(theirs) == 8 and figures(table) == theirs
    assert table.count("ZeRO-2") == 2 and table.count("ZeRO-3") == 6


def test_zero2_rows_against_deepspeeds_documentation_and_formula() -> None:
    """Of ``docs/code-docs/source/memory.rst``: 2851e6 parameters, 8 GPUs on one node.

    Without offload the page has 15.93 GiB, from 4 + 16 / 8 bytes per parameter; the code has 2 + 18 / 8 today.
    """
    count = 2_851_000_000
    model = replace(make_model(), tensors=(ParameterSpec("model.weight", (count,), "linear"),))
    gpu = (2 + 18 / 8) * count / GIB
    assert figures(deepspeed_table(model, 1, 8))[:2] == [("127.45", "5.31"), ("127.45", f"{gpu:.2f}")]


def test_the_command_prints_the_table_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["estimate", str(tmp_path), "--deepspeed-table", "--gpus-per-node", "4", "--nodes", "2"]
    made = CliRunner().invoke(app, words)
    assert made.exit_code == 0 and made.stdout.startswith("DeepSpeed's estimate of params")
    assert "HW: 2 nodes, 4 GPUs per node." in made.stdout and len(figures(made.stdout)) == 8
