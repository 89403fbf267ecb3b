"""The closed form agrees with the simulated step."""

import pytest

from shardmake.config.models import STRATEGIES
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.memory import closed_form
from shardmake.memory.estimate import estimate_closed_form, gpu_memory
from tests.unit.memory.llama_8b import BUCKETS, scenario


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "fsdp-hybrid"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("gradients", ["bf16", "fp32"])
def test_closed_form_and_simulation_agree(strategy: str, checkpointing: bool, gradients: str) -> None:
    if gradients == "fp32" and not STRATEGY_SPECS[strategy].accumulates_in_fp32:
        gradients = "bf16"  # no plan has it otherwise
    case = scenario(strategy=strategy, checkpointing=checkpointing, gradient_dtype=gradients, accumulation=2)
    simulated = gpu_memory(case, BUCKETS)
    scanned = estimate_closed_form(case, BUCKETS, closed_form.profile(case)).gpu
    assert scanned.allocated == pytest.approx(simulated.allocated, rel=0.08)
    assert simulated.allocated <= simulated.reserved <= simulated.device
