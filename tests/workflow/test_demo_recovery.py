"""``make demo-faults``: the demo's run survives two kills and gives the same model."""

import re

import pytest

from shardmake.demo.recovery import AGAIN, DEMO
from tests.workflow.checkout import PROFILE, UNPUSHED, Checkout

pytestmark = [pytest.mark.training, pytest.mark.faults]


def test_a_rank_and_the_driver_are_killed_and_the_model_is_the_same(checkout: Checkout) -> None:
    checkout.write_config({"cluster": "config/cluster.yaml", "runs": {DEMO: UNPUSHED | {"max_steps": 60}}})
    missing = checkout("python", "-m", "shardmake.demo.recovery", check=False)
    assert missing.returncode == 1 and "Run `make demo` first." in missing.stdout

    checkout("snakemake", *PROFILE, f"runs/{DEMO}/model/receipt.json")
    lines = checkout("python", "-m", "shardmake.demo.recovery").stdout.splitlines()
    assert re.fullmatch(rf"\d+:\d\d  {AGAIN}: the settings of {DEMO}, 60 steps, .*", lines[0])
    assert sum("SIGKILL" in line for line in lines) == 2
    assert "60 steps in 2 attempts" in lines[-2] and f"runs/{AGAIN}/model equals runs/{DEMO}/model" in lines[-1]
