"""Runs that learn from preferences: what the plan refuses until it is supported."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.attention import KERNELS
from shardmake.config.load import parse_config
from shardmake.config.methods import METHODS
from shardmake.config.objectives import OBJECTIVES
from shardmake.core.errors import ConfigError
from shardmake.memory.hardware import from_cluster
from shardmake.plan.abilities import Abilities
from shardmake.plan.candidates import choices
from shardmake.plan.choose import choose_from
from shardmake.plan.fallbacks import find_fallbacks
from shardmake.plan.planner import Planner, scenario_of
from shardmake.plan.refusals import refuse, wrong_model
from shardmake.plan.resolve import ResolvedRun, _attention, _why_not_varlen, resolve
from shardmake.plan.stage import plan_offline
from shardmake.run.paths import RunDir
from tests.plan_in_process import plan_in_this_process
from tests.unit.plan.test_planner import folders, gpus, run_of
from tests.unit.plans import make_cluster, make_model, make_run

__all__ = ["folders"]

REQUIRED = {"sequence_length": 512, "global_batch_size": 32, "max_steps": 10, "learning_rate": 1e-4}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_and_method_plans_with_the_required_keys_alone(
    folders: dict[str, str], objective: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No default of an objective or a method contradicts another default. The plan is one without optional packages."""
    plan_in_this_process(monkeypatch)
    run = {"model": folders["eight"], "data": {"train": "a.jsonl"}, "objective": objective, "method": method}
    found = parse_config({"cluster": "c", "runs": {"one": run | REQUIRED}}, "test").runs["one"]
    assert plan_offline(found, gpus(), RunDir(tmp_path / "runs/one")).workload.packing is (objective == "sft")


DPO: dict[str, Any] = {"objective": "dpo"}


def test_what_the_plan_cannot_estimate_or_run_is_refused() -> None:
    """A reward model needs a family that is written down."""
    run, reward, model = make_run(**DPO), make_run(objective="reward"), make_model()
    traced = replace(model, decoder=None)
    for good in ((run, model), (run, traced), (make_run(attention="varlen"), traced), (reward, model)):
        refuse(wrong_model(*good))
    with pytest.raises(ConfigError, match="a mixture of experts"):
        refuse(wrong_model(run, replace(model, config=model.config | {"router_aux_loss_coef": 0.1})))
    with pytest.raises(ConfigError, match=r"objective: reward is not supported for .* Use a model of the Llama"):
        refuse(wrong_model(reward, traced))


def test_padded_pairs_use_sdpa_on_gpus() -> None:
    run, hardware = make_run(**DPO), from_cluster(make_cluster(accelerator="h100"))
    abilities = Abilities("any", KERNELS)
    assert _attention(run, hardware, "bf16", abilities) == "sdpa"
    assert "padded examples" in _why_not_varlen(run, hardware, "bf16", abilities)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_precomputed_reference_needs_no_second_model_or_pass(folders: dict[str, str], objective: str) -> None:
    settings = [
        resolve(run_of(folders["tiny"], objective=objective, **{objective: {"reference": name}}), gpus())
        for name in ("model", "precomputed")
    ]
    choice = next(iter(choices(settings[0], ["ddp"])))
    held, saved = (Planner(resolved).scan(choice) for resolved in settings)
    assert held.memory.gpu.terms["reference model"] > 0 and not saved.memory.gpu.terms.get("reference model")
    assert saved.memory.gpu.device < held.memory.gpu.device and saved.step_seconds < held.step_seconds


def kto(folder: str, **changes: Any) -> ResolvedRun:
    return resolve(run_of(folder, objective="kto", **changes), gpus())


def test_kto_needs_two_examples_in_a_micro_batch(folders: dict[str, str]) -> None:
    sizes = {choice.micro_batch_size for choice in choices(kto(folders["tiny"], global_batch_size=32, nodes=1))}
    assert sizes == {4, 2}
    with pytest.raises(ConfigError, match=r"global_batch_size 8 leaves one example for each of 8 ranks.* at least 16"):
        list(choices(kto(folders["tiny"], global_batch_size=8, nodes=1)))


def test_a_fallback_of_kto_keeps_the_micro_batch(folders: dict[str, str]) -> None:
    """The loss of an example depends on the others, so another micro batch would be another training."""
    planner = Planner(kto(folders["eight"], global_batch_size=128))
    chosen, candidates = choose_from(planner)
    fallbacks, _ = find_fallbacks(chosen, candidates, planner)
    same = (chosen.choice.micro_batch_size, chosen.choice.nodes)
    assert {(item.choice.micro_batch_size, item.choice.nodes) for item in fallbacks} == {same}


def test_kto_runs_each_model_twice(folders: dict[str, str]) -> None:
    for reference, forwards in (("model", 3), ("precomputed", 1)):
        settings = kto(folders["tiny"], kto={"reference": reference})
        scenario = scenario_of(settings, next(iter(choices(settings, ["ddp"]))))
        found = (scenario.extra_forwards, scenario.reference_weights, scenario.log_probs)
        assert found == (forwards, reference == "model", True)


@pytest.mark.parametrize(("objective", "forwards"), [("dpo", 1), ("kto", 3), ("reward", 0)])
def test_a_plan_of_qlora_holds_the_base_once_in_4_bits(folders: dict[str, str], objective: str, forwards: int) -> None:
    """The reference is the trained model without its adapters."""
    settings = resolve(run_of(folders["eight"], objective=objective, method="qlora"), gpus())
    chosen, _ = choose_from(Planner(settings))
    scenario, terms = scenario_of(settings, chosen.choice), chosen.memory.gpu.terms
    assert chosen.fits and chosen.choice.spec.four_bits
    assert (scenario.extra_forwards, scenario.reference_weights) == (forwards, False)
    assert not terms.get("reference model") and terms["frozen weights"] < 0.5 * 2 * settings.model.parameters
