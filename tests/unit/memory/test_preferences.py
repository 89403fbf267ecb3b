"""The step of a training on preferences or of a reward model: the simulation matches TRL's own code on small tensors.

The peak of a reward model is in a layer's backward pass, where a recording has one gradient more: see `test_decoder`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shardmake.config.objectives import OBJECTIVES
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.memory.buckets import Buckets
from shardmake.memory.closed_form import profile
from shardmake.memory.decoder import micro_step
from shardmake.memory.estimate import estimate_closed_form, gpu_memory
from shardmake.memory.families import as_classifier
from shardmake.memory.read_config import from_config
from shardmake.memory.scenario import Scenario
from shardmake.memory.trace import _request
from shardmake.run.plan import GpuEstimate
from tests.unit.memory.test_decoder import SETTINGS, SIZES, agree, gradients, saved, scenario

SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
LORA = {"method": "lora"}
DPO: dict[str, Any] = {"log_probs": True, "extra_forwards": 1, "sequence_length": 256, "micro_batch": 4}
CASES: dict[str, Scenario] = {name: scenario(SMALL, **DPO, **setting) for name, setting in SETTINGS.items()} | {
    "tied": scenario({**SMALL, "tie_word_embeddings": True}, **DPO),
    "precomputed": scenario(SMALL, **DPO | {"extra_forwards": 0}),
    "precomputed for lora under autocast": scenario(SMALL, **DPO | {"extra_forwards": 0} | LORA, strategy="ddp"),
    "kto": scenario(SMALL, **DPO | {"extra_forwards": 3}),
    "kto with lora and checkpointing": scenario(SMALL, **DPO | {"extra_forwards": 3} | LORA, checkpointing=True),
    "kto precomputed": scenario(SMALL, **DPO | {"extra_forwards": 1}),
}


def reward(config: dict[str, Any] | None = None, **more: Any) -> Scenario:
    model = as_classifier(from_config({**SIZES, **SMALL, **(config or {})}))
    return scenario(model=model, **{"sequence_length": 256, "micro_batch": 4, **more})


REWARDS: dict[str, Scenario] = {f"reward {name}": reward(**setting) for name, setting in SETTINGS.items()}
REWARDS["reward gemma"] = reward({"model_type": "gemma", "head_dim": 64})


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let nothing be allocated where TRL's Triton kernels, and CUDA's products into fp32, work in place."""
    from trl.kernels import chunked_logprob

    for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
        monkeypatch.setattr(chunked_logprob, name, lambda *_, **__: None)
    yield


@pytest.mark.parametrize("name", [*CASES, *REWARDS])
def test_the_simulated_step_matches_the_recorded_one(name: str, tracer: Any, kernels: None) -> None:
    if name in REWARDS:
        case, peaks = REWARDS[name], 0.04
        recorded = recorded_reward(case, tracer)
    else:
        case, peaks = CASES[name], 0.035
        recorded = recorded_step(case, tracer, "kto" if "kto" in name else "dpo")
    simulated = micro_step(case)
    agree(simulated, recorded, saves=5e-3, peaks=peaks)
    assert gradients(simulated) == gradients(recorded)


def recorded_step(case: Scenario, tracer: Any, objective: str) -> list[Any]:
    """Return the events of TRL's loss and its backward pass."""
    import torch
    from trl import DPOTrainer, KTOTrainer

    from shardmake.train.preferences import DpoTrainer, KtoTrainer

    kind = KTOTrainer if objective == "kto" else DPOTrainer
    request = {**_request(case), "layers": None}
    tracer.emulate_gpu_kernels()
    model, reference = prepared(request, tracer), None
    precomputed = case.extra_forwards == OBJECTIVES[objective].forwards - 1
    if case.method == "full" and not precomputed:
        reference = prepared(request, tracer).requires_grad_(False)
    trainer = bare(
        kind, model, ref_model=reference, precompute_ref_logps=precomputed, aux_loss_enabled=False, ld_alpha=None,
        f_divergence_type="reverse_kl", loss_types=["sigmoid"], loss_weights=[1.0], label_smoothing=0.0, beta=0.1,
        use_weighting=False, calculate_KL=True, loss_type="kto", desirable_weight=1.0, undesirable_weight=1.0,
        args=SimpleNamespace(gradient_checkpointing_kwargs={"use_reentrant": False}),
    )  # fmt: skip
    tokens = torch.zeros((case.micro_batch, case.sequence_length), dtype=torch.long)
    masks = ("attention_mask", "completion_mask")
    inputs = {"input_ids": tokens, **{name: torch.ones_like(tokens) for name in masks}}
    if kind is KTOTrainer:
        inputs |= {f"KL_{name}": values.clone() for name, values in inputs.items()}
        inputs["label"] = torch.arange(len(tokens)) % 2 == 0
    if precomputed:
        trained = KtoTrainer if kind is KTOTrainer else DpoTrainer
        inputs |= {name: torch.zeros(len(tokens) // OBJECTIVES[objective].sequences) for name in trained.log_probs}
    return record_second(tracer, request, model, lambda: kind._compute_loss(trainer, model, inputs, False))


def recorded_reward(case: Scenario, tracer: Any) -> list[Any]:
    """Return the events of TRL's loss and its backward pass."""
    import torch
    from trl import RewardTrainer

    request = {**_request(case), "layers": None}
    tracer.emulate_gpu_kernels()
    model = tracer.prepare(request)
    tracer.materialize(model, request)
    model.config.pad_token_id = 1
    trainer = bare(RewardTrainer, model, args=SimpleNamespace(center_rewards_coefficient=0.01))
    tokens = torch.zeros((case.micro_batch, case.sequence_length), dtype=torch.long)

    def compute_loss() -> Any:
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        return RewardTrainer.compute_loss(trainer, model, inputs)

    return record_second(tracer, request, model, compute_loss)


def bare(kind: Any, model: Any, **settings: Any) -> Any:
    """Return a trainer of TRL with what computing its loss needs."""
    trainer = kind.__new__(kind)
    counts = {"_metrics": defaultdict(lambda: defaultdict(list)), "_total_train_tokens": 0, "_tp_size": 1}
    vars(trainer).update(model=model, accelerator=accelerator(), **counts, **settings)
    return trainer


def record_second(tracer: Any, request: dict[str, Any], model: Any, compute_loss: Callable[[], Any]) -> list[Any]:
    """Return the events of the second of two steps."""
    recorder = tracer.Recorder()
    with tracer._without_collector():
        tracer._mark(model, recorder)
        with recorder:
            for _ in range(2):
                recorder.start()
                with tracer._autocast(request):
                    loss = compute_loss()
                recorder.mark("backward")
                loss.backward()
                del loss
    return list(recorder.events)


def prepared(request: dict[str, Any], tracer: Any) -> Any:
    from trl.trainer.utils import add_fused_lm_head

    model = tracer.prepare(request)
    tracer.materialize(model, request)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    add_fused_lm_head(base, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    return model


def accelerator() -> Any:
    import torch

    same = lambda value: value  # noqa: E731
    return SimpleNamespace(
        device=torch.device("cpu"), gather=same, gather_for_metrics=same, unwrap_model=same, autocast=None
    )


def test_the_reference_pass_needs_less_than_a_second_training_pass() -> None:
    """It saves nothing for a backward pass."""
    case = CASES["bf16"]
    assert saved(micro_step(case)) < 1.1 * saved(micro_step(replace(case, extra_forwards=0)))


def plans_enough(case: Scenario) -> GpuEstimate:
    """Return the memory in closed form; fail if it is less than that of the simulated step."""
    planned = estimate_closed_form(case, Buckets(4096), profile(case)).gpu
    assert planned.allocated >= 0.97 * gpu_memory(case, Buckets(4096), micro_step(case)).allocated
    return planned


def test_a_reward_model_needs_less_than_a_language_model_of_its_base() -> None:
    """It has no logits over the vocabulary."""
    case = REWARDS["reward bf16"]
    language = replace(case, model=from_config({**SIZES, **SMALL}))
    assert saved(micro_step(case)) < saved(micro_step(language))


@pytest.mark.parametrize("strategy", [name for name, spec in STRATEGY_SPECS.items() if not spec.uses_nvme])
def test_every_strategy_has_an_estimate(strategy: Any) -> None:
    """The simulated step gathers the reference layer by layer; the closed form plans no less."""
    case = scenario(SMALL, strategy=strategy, ranks_per_node=4, reference_weights=True, **DPO)
    assert ("gathered reference" in plans_enough(case).terms) == case.spec.is_fsdp
    plans_enough(reward(strategy=strategy, ranks_per_node=4))
