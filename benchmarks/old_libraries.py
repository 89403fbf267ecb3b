"""The memory of trainings with transformers 4.32 to 4.48 and FSDP1, from which most published measurements come.

`shardmake.memory` models the pinned libraries. `estimate` replaces what differs, for one estimate.

Sources in transformers: ``modeling_llama.py`` returns fp32 logits up to 4.45 (pull request 33902). ``ForCausalLMLoss``
copies the shifted logits up to 4.48 (35646). SDPA takes grouped heads from 4.54 on (39412) and contiguous inputs before
4.48. FlashAttention takes grouped heads in all models from 4.48 on (35235). Trainer takes the fused AdamW from 4.55 on.
Checkpointing is reentrant before 5.0 (43203), and later if its arguments are an empty dictionary.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal
from unittest.mock import patch

from benchmarks.old_fsdp1 import OUTPUT, ForeachMemory, Fsdp1Memory, LoopMemory
from shardmake.commands.estimate import EstimateRequest, resolve_request
from shardmake.config.models import Precision
from shardmake.memory import estimate as memory_estimate
from shardmake.memory import size_tensors, states, trace
from shardmake.memory.buckets import Buckets
from shardmake.memory.ddp import DdpMemory, StepParts, replay
from shardmake.memory.decoder import DecoderStep
from shardmake.memory.scenario import Scenario
from shardmake.memory.size_tensors import SizeStorage, SizeTensor, TensorEvent
from shardmake.memory.timeline import Timeline
from shardmake.plan import planner
from shardmake.plan.candidates import Candidate, choices

EXPANDS_FLASH_KEYS = ("mistral", "qwen2")
"""Model types whose ``...FlashAttention2`` of transformers 4.45 calls ``repeat_kv``; that of Llama does not."""


@dataclass(frozen=True)
class OldScenario(Scenario):
    """A training with other libraries or another loop; the defaults are the pinned ones and Trainer."""

    transformers_4: bool = False
    """transformers 4.32 to 4.45 and its Trainer, and FSDP1."""
    transformers_48: bool = False
    """With `transformers_4`, its 4.48: 16-bit logits until the loss makes its fp32 copy, and no expanded keys."""
    keeps_output: bool = False
    """The training loop keeps the model's output during the backward pass."""
    keeps_last_output: bool = False
    """It keeps that in addition until the model returns the next one."""
    own_logits: bool = False
    """The model's own code leaves logits in 16 bits; only autocast casts them for the loss (Qwen 1)."""
    foreach_optimizer: bool = False
    """torch's foreach AdamW, which Trainer of transformers 4 takes; its temporaries are as large as trained weights."""
    mixed: bool = True
    """A 16-bit precision uses autocast or FSDP's mixed precision; else the weights' type is that of the computation."""
    kbit: Literal["widened", "norms", "plain"] = "widened"
    """``plain``: QLoRA without ``prepare_model_for_kbit_training``, which casts the rest to fp32. ``norms``: embedding
    and head are cast back to 16 bits, as TRL's SFTTrainer did on one GPU."""
    wide_base: bool = False
    """LoRA's frozen weights are loaded in fp32 and stay in it, except under DeepSpeed, which casts them."""
    checkpoint: Literal["around", "inside", "plain"] = "around"
    """``around`` and ``inside``: reentrant checkpointing, of FSDP1's units or inside them. ``plain``: not reentrant.

    Around the units, their forward pass runs without gradients. So no unit expects a backward pass
    (``_register_pre_backward_hooks``), and none is gathered ahead of it (``_get_handle_to_prefetch``).
    """

    single_quantization: bool = False
    """The scales of 4-bit weights are fp32."""
    repeats_keys: bool = False
    """Keys and values are repeated for the heads of each group."""
    plain_layers: bool = False
    """Of Liger's kernels only that of the loss is used."""
    checks_network: ClassVar[bool] = False

    @property
    def fused_layers(self) -> bool:  # noqa: D102
        return super().fused_layers and not self.plain_layers

    @property
    def frozen(self) -> int:  # noqa: D102
        widened = self.widens_frozen and self.kbit != "norms"
        wide = self.method == "lora" and self.wide_base and not self.spec.zero_stage
        return 4 if widened or wide else self.compute

    @property
    def widens_frozen(self) -> bool:  # noqa: D102
        return self.method_spec.in_four_bits and not self.spec.zero_stage and self.kbit != "plain"

    @property
    def autocast(self) -> bool:  # noqa: D102
        return super().autocast and self.mixed

    @property
    def adapter_compute(self) -> Precision:  # noqa: D102
        return super().adapter_compute if self.mixed or self.spec.zero_stage else self.adapter_weights

    @property
    def expands_keys(self) -> bool:  # noqa: D102
        old = self.attention == "sdpa" or (self.model.model_type in EXPANDS_FLASH_KEYS and not self.transformers_48)
        return self.repeats_keys or super().expands_keys or (self.transformers_4 and old)

    @property
    def is_reentrant(self) -> bool:
        """True if a recomputed layer runs to its end, and its output stays during its backward pass."""
        return self.checkpoint == "inside" or (self.transformers_4 and self.checkpoint == "around")

    @property
    def recomputes_units(self) -> bool:
        """True if whole units of FSDP1 are recomputed, each gathered when its turn comes and none ahead."""
        return self.spec.is_fsdp and self.is_reentrant and self.checkpointing and self.checkpoint == "around"


def estimate(request: EstimateRequest, libraries: Mapping[str, Any]) -> Candidate:
    """Return the one candidate of ``request`` with ``libraries``, which are fields of `OldScenario`.

    Raises:
        ConfigError: An option cannot be used.
        ModelError: The model's config.json cannot be used.
    """
    settings = resolve_request(request)
    (choice,) = choices(settings, request.strategies)
    with _patched(libraries):
        return planner.Planner(settings).simulate(choice)


@contextmanager
def _patched(libraries: Mapping[str, Any]) -> Iterator[None]:
    scenario_of, rank_memory, request_of = planner.scenario_of, memory_estimate.rank_memory, trace._request

    def old_scenario(*arguments: Any) -> OldScenario:
        return OldScenario(**{**vars(scenario_of(*arguments)), **libraries})

    def old_memory(scenario: OldScenario, buckets: Buckets, timeline: Timeline) -> DdpMemory:
        if scenario.spec.is_fsdp and scenario.transformers_4:
            return Fsdp1Memory(scenario, buckets, timeline)
        if scenario.keeps_last_output:
            return LoopMemory(scenario, buckets, timeline)
        is_foreach = scenario.spec.is_ddp and (scenario.foreach_optimizer or scenario.transformers_4)
        return (ForeachMemory if is_foreach else rank_memory)(scenario, buckets, timeline)

    def old_request(scenario: OldScenario) -> dict[str, Any]:
        more = {"reentrant": scenario.is_reentrant, "own_logits": scenario.own_logits}
        return {**request_of(scenario), **more}

    with ExitStack() as stack:
        for module, name, new in (
            (planner, "scenario_of", old_scenario),
            (planner, "simulate", _two_steps),
            (planner, "_of_step", lambda scenario: scenario),  # more of an `OldScenario` changes its micro step
            (memory_estimate, "rank_memory", old_memory),
            (trace, "micro_step", micro_step),
            (states, "SCALE_BYTES", 4 / 64 if libraries.get("single_quantization") else states.SCALE_BYTES),
            (trace, "_request", old_request),
            (trace, "run_helper", _run_tracer),
        ):
            stack.enter_context(patch.object(module, name, new))
        yield


def _two_steps(scenario: OldScenario, buckets: Buckets, step: StepParts) -> Timeline:
    """Simulate each of two optimizer steps: a loop that keeps the output frees that of the first in the second."""
    timeline = Timeline()
    memory = memory_estimate.rank_memory(scenario, buckets, timeline)
    memory.load()
    timeline.enter("load")
    for micro_steps in (1, min(scenario.accumulation, 2)):
        for _ in range(micro_steps):
            replay(step, memory, timeline, len(scenario.model.blocks) - 1)
        timeline.enter("optimizer step")
        memory.step()
    return timeline


def _run_tracer(_module: str, request: Mapping[str, Any], _doing: str) -> None:
    """Trace in this process, with the checkpointing and the loss of the steps' own transformers."""
    import transformers.loss.loss_utils
    import transformers.modeling_utils
    from torch.nn import functional

    from shardmake.memory import tracer

    original = transformers.modeling_utils.checkpoint
    ((is_reentrant, own_logits),) = {(step["reentrant"], step["own_logits"]) for step in request["requests"]}

    def checkpoint(*arguments: Any, use_reentrant: bool, **named: Any) -> Any:
        return original(*arguments, use_reentrant=is_reentrant, **named)

    def loss(logits: Any, labels: Any, **_: Any) -> Any:
        shifted, wanted = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        return functional.cross_entropy(shifted.flatten(0, 1), wanted.flatten())

    losses = transformers.loss.loss_utils.LOSS_MAPPING
    with (
        patch.object(transformers.modeling_utils, "checkpoint", checkpoint),
        patch.dict(losses, {"ForCausalLM": loss} if own_logits else {}),
    ):
        tracer.answer(request)


def micro_step(scenario: OldScenario) -> list[TensorEvent]:
    """Return the events of one forward and backward pass of ``scenario``'s decoder."""
    assert scenario.model.decoder is not None
    return OldStep(scenario, scenario.model.decoder).run()


class OldStep(DecoderStep):
    """A decoder's micro step as transformers 4 and the loop of ``scenario`` run it."""

    scenario: OldScenario

    def run(self) -> list[TensorEvent]:
        """Return the events; an output that the loop keeps is freed at their end."""
        self._again: list[SizeStorage] = []
        self._output: SizeTensor | None = None
        events = super().run()
        if self._output and self.scenario.keeps_last_output:
            self.tape.mark("grad", self._output.storage.number, OUTPUT)
        self._output = None
        return events

    def _checkpointed(self, hidden: SizeTensor, index: int) -> SizeTensor:
        """Hold the layer's output until its backward pass has ended (``CheckpointFunction.backward``)."""
        out = super()._checkpointed(hidden, index)
        node = out.node
        assert node is not None and node.backward is not None
        node.backward = partial(self._end_backward, node.backward)
        return out

    def _end_backward(self, backward: size_tensors.Backward, grad: SizeTensor) -> Any:
        made = backward(grad)
        self._again.clear()
        return made

    def _layer(self, hidden: SizeTensor, index: int, stops_early: bool = False) -> SizeTensor:
        out = super()._layer(hidden, index, stops_early and not self.scenario.is_reentrant)
        if stops_early and self.scenario.is_reentrant:
            self._again.append(out.storage)
        return out

    def _mix(self, query: SizeTensor, key: SizeTensor, value: SizeTensor) -> SizeTensor:
        """Copy SDPA's output to be contiguous."""
        out = super()._mix(query, key, value)
        return size_tensors.copy(out) if self.scenario.transformers_4 and self.scenario.attention == "sdpa" else out

    def _loss(self, hidden: SizeTensor) -> tuple[SizeTensor, SizeTensor | None]:
        loss, logits = super()._loss(hidden)
        self._output = logits if self.scenario.keeps_output else None
        return loss, logits

    def _cross_entropy(self, logits: SizeTensor) -> tuple[SizeTensor, SizeTensor | None]:
        """Return logits in fp32, and copy the shifted ones."""
        if not self.scenario.transformers_4:
            return super()._cross_entropy(logits)
        returned = logits if self.scenario.transformers_48 else None
        logits = logits if self.scenario.own_logits else size_tensors.cast(logits, 4)
        shifted = without_last_row(logits, self.scenario.micro_batch)
        scored = size_tensors.cast(shifted, 4) if self.tape.autocast else shifted
        return size_tensors.nll_of_log_softmax(scored, self.tokens), returned or logits


def without_last_row(tensor: SizeTensor, sequences: int) -> SizeTensor:
    """Model ``tensor[..., :-1, :].contiguous()``, a copy unless there is one sequence, whose rows are contiguous.

    The gradient is padded to the whole tensor in another copy (``slice_backward``). The row is not subtracted.
    """
    storage = tensor.storage if sequences == 1 else None
    out = SizeTensor(tensor.tape, tensor.numel, tensor.item, storage=storage)
    return size_tensors.derive(out, [tensor], lambda grad: [size_tensors.new(grad)])
