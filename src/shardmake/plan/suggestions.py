"""Suggestions: single changes of the configuration, each planned like the run itself.

If nothing fits, they are the changes that fit. If something fits, they are the changes that cost clearly less GPU-time.
The plan makes none of them, because each would replace a value of the run.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from shardmake.config.attention import FLASH_CAPABILITY
from shardmake.config.load import parse_section
from shardmake.config.methods import METHODS
from shardmake.config.models import Run
from shardmake.config.optimizers import DEFAULT_OPTIMIZER
from shardmake.core.errors import ShardmakeError
from shardmake.memory.optimizer_trial import optimizer_spec
from shardmake.plan.candidates import Candidate, last_resort
from shardmake.plan.choose import CLEARLY, find_choice, fits_better
from shardmake.plan.planner import Planner
from shardmake.plan.reasons import AVOIDED, beside, figures, memory_and_time
from shardmake.plan.refusals import missing_packages, unsuitable
from shardmake.plan.resolve import ResolvedRun, check, resolve
from shardmake.plan.verdict import Headroom
from shardmake.run.plan import Choice

MAX_NODE_FACTOR = 64
MIN_SEQUENCE_LENGTH = 128
Kind = tuple[str, list[Any]]
"""A setting with the values to try, the smallest change first."""


class Suggestion(NamedTuple):
    """One setting with its new value and the result."""

    setting: str
    value: Any
    outcome: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.value} ({self.outcome})"


def changes(nodes: int, sequence_length: int, method: str, optimizer: str) -> Iterator[Kind]:
    """Yield what costs more than a setting: first more nodes, then what changes the result of the training."""
    yield "nodes", [nodes << power for power in range(1, MAX_NODE_FACTOR.bit_length())]
    spec = optimizer_spec(optimizer)
    yield from (("optimizer", [other]) for other in spec.smaller)
    if spec.fails_flat or spec.fails_sharded:
        yield "optimizer", [DEFAULT_OPTIMIZER]
    yield from (("method", [other]) for other in METHODS[method].smaller)
    halves = (sequence_length >> power for power in range(1, sequence_length.bit_length()))
    yield "sequence_length", [length for length in halves if length >= MIN_SEQUENCE_LENGTH]


def levers(settings: ResolvedRun) -> Iterator[Kind]:
    """Yield the settings that cost nothing: the training has the same steps, up to rounding."""
    run = settings.run
    if settings.hardware.is_cpu:
        return
    if run.loss == "plain" and run.script is None:
        yield "loss", ["fused"] * _runs_triton(settings) + ["chunked"]
    if run.reference == "model" and not run.method_spec.has_adapters:
        yield f"{run.objective}.reference", ["precomputed"]
    for key in ("sequence_parallel", "tensor_parallel"):
        if getattr(run, key) == 1:
            yield key, shared_by(settings.cluster.processes_per_node)
    if not run.activation_offload and run.gradient_checkpointing is not False:
        yield "activation_offload", [True]
    if run.gradient_checkpointing is False:
        yield "gradient_checkpointing", ["auto"]
    if run.micro_batch_size != "auto":
        yield "micro_batch_size", ["auto"]


def _runs_triton(settings: ResolvedRun) -> bool:
    """Return True if Triton supports the GPU: since 3.3 it has no tensor cores before Ampere (pull request 5066)."""
    return settings.hardware.accelerator.capability >= FLASH_CAPABILITY


def shared_by(ranks: int) -> list[int]:
    """Return the numbers of ranks that can share a sequence or matrices on a node of ``ranks``."""
    return [size for size in (2, 4, 8) if size <= ranks and ranks % size == 0]


def suggestions(kinds: Iterable[Kind], outcome: Callable[[str, Any], str | None]) -> list[Suggestion]:
    """Return the first value of each setting that has an ``outcome``; None means that a value does not help."""
    found: list[Suggestion] = []
    for setting, values in kinds:
        tried = (Suggestion(setting, value, outcome(setting, value) or "") for value in values)
        found += islice((one for one in tried if one.outcome), 1)
    return found


def suggest(settings: ResolvedRun) -> list[Suggestion]:
    """Return the changes of the configuration that would each make something fit, the cheapest first."""
    run, base = settings.run, Planner(settings)

    def outcome(setting: str, value: Any) -> str | None:
        found = _plan_with(base, setting, value)
        return _describe(found, _changed(run, setting, value)) if found else None

    auto: list[Kind] = [("precision", ["auto"])] * (settings.precision == "fp32" and not settings.hardware.is_cpu)
    auto += [("strategy", ["auto"])] * (run.strategy != "auto")
    dearer = changes(run.nodes or settings.cluster.max_nodes, run.sequence_length, run.method, run.optimizer)
    return suggestions([*levers(settings), *auto, *_narrower_gradients(settings), *dearer], outcome)


def suggest_better(
    settings: ResolvedRun, chosen: Candidate, candidates: Iterable[Candidate]
) -> list[tuple[str, Suggestion]]:
    """Return the changes that would each offload less than ``chosen``, or cost at least a tenth less GPU-time.

    Each has a margin, and comes after what it gains. Settings that save memory are tried only if memory keeps a better
    candidate out. If neither avoids an offload, a smaller optimizer is tried together with another loss.
    """
    if settings.hardware.is_cpu:
        return []
    limit, nodes = CLEARLY * chosen.gpu_seconds, chosen.choice.nodes

    def is_better(choice: Choice, seconds: float) -> bool:
        avoided = last_resort(choice) - chosen.last_resort
        return avoided < 0 or (avoided == 0 and choice.world_size * seconds < limit)

    kept_out = any(is_better(item.choice, item.step_seconds) and item.choice.nodes == nodes for item in candidates)
    run = settings.run
    kinds = [kind for kind in levers(settings) if kept_out or not (kind[0] == "loss" or kind[0].endswith("reference"))]
    if kept_out:
        kinds += [("optimizer", [other]) for other in optimizer_spec(run.optimizer).smaller]
        kinds += _narrower_gradients(settings)
    if run.strategy != "auto":
        kinds.append(("strategy", ["auto"]))
    if run.nodes and kept_out:
        kinds.append(("nodes", [count for count in (2 * nodes, 4 * nodes) if count <= settings.cluster.max_nodes]))

    better = _gains(Planner(settings), kinds, chosen, is_better)
    losses = [kind for kind in kinds if kind[0] == "loss"]
    avoiding = {one.setting for gain, one in better if gain != _FASTER}
    if chosen.last_resort and kept_out and not avoiding & {"optimizer", "loss"}:
        for other in optimizer_spec(run.optimizer).smaller:
            if smaller := _resolve_with(settings, "optimizer", other):
                found = _gains(Planner(smaller), losses, chosen, is_better)
                better += [(gain, one._replace(setting=f"optimizer: {other}, loss")) for gain, one in found]
    return better


_FASTER = "clearly less GPU-time"


def _gains(
    base: Planner, kinds: Iterable[Kind], chosen: Candidate, is_better: Callable[[Choice, float], bool]
) -> list[tuple[str, Suggestion]]:
    """Return the first value of each setting that makes ``base``'s run better than ``chosen``, with what it gains."""
    gains: dict[str, str] = {}

    def outcome(setting: str, value: Any) -> str | None:
        found = _plan_with(base, setting, value, is_better)
        if found is None or found.headroom < Headroom.TIGHT or not is_better(found.choice, found.step_seconds):
            return None
        avoids = found.last_resort < chosen.last_resort
        gains[setting] = f"without {AVOIDED[found.last_resort + 1]}" if avoids else _FASTER
        return _describe(found, _changed(base.settings.run, setting, value), beside(found, chosen))

    return [(gains[one.setting], one) for one in suggestions(kinds, outcome)]


def _narrower_gradients(settings: ResolvedRun) -> list[Kind]:
    """Return the setting that accumulates gradients in 16 bits, if it is open."""
    is_open = settings.run.gradient_dtype == "auto" and settings.precision != "fp32"
    return [("gradient_dtype", ["bf16"])] if is_open and not settings.hardware.is_cpu else []


def suggest_smaller_loss(settings: ResolvedRun, chosen: Candidate) -> list[Suggestion]:
    """Return the loss without whole logits, if these are the peak of ``chosen`` and it saves a tenth of its memory."""
    if settings.run.loss != "plain" or settings.hardware.is_cpu or chosen.memory.gpu.phase != "cross entropy":
        return []

    def outcome(setting: str, value: Any) -> str | None:
        resolved = _resolve_with(settings, setting, value)
        if resolved is None or unsuitable(resolved.run, chosen.choice.strategy):
            return None
        found = Planner(resolved).simulate(chosen.choice)
        if not found.fits or found.memory.gpu.device > 0.9 * chosen.memory.gpu.device:
            return None
        against = f"{beside(found, chosen)} and {figures(chosen)}"
        return _describe(found, resolved.run, against) + _kept(settings, chosen)

    return suggestions([("loss", ["chunked"] + ["fused"] * _runs_triton(settings))], outcome)


def _kept(settings: ResolvedRun, chosen: Candidate) -> str:
    """Return the settings that keep ``chosen``, where the run leaves them open: `auto` would use the memory again."""
    choice, run = chosen.choice, settings.run
    keys = ("strategy", "nodes", "micro_batch_size", "gradient_checkpointing")
    is_open = {"auto": True, None: settings.cluster.max_nodes > 1}
    kept = ", ".join(f"{key}: {getattr(choice, key)}" for key in keys if is_open.get(getattr(run, key)))
    return f"; with {kept}" if kept else ""


def suggest_measuring(settings: ResolvedRun, chosen: Candidate) -> list[Suggestion]:
    """Return what keeps the steps of ``chosen``, up to rounding, and whose gain the model of the step does not know."""
    run, decoder = settings.run, settings.model.decoder
    is_dense = decoder is not None and not (decoder.experts or decoder.linear or settings.abilities.text_part)
    if run.torch_compile or run.script is not None or not is_dense or not _runs_triton(settings):
        return []
    resolved = _resolve_with(settings, "torch_compile", True)
    found = [Suggestion("torch_compile", True, "measure some steps: the first two compile the layers")]
    return [] if resolved is None or unsuitable(resolved.run, chosen.choice.strategy) else found


def _plan_with(
    base: Planner, setting: str, value: Any, is_better: Callable[[Choice, float], bool] | None = None
) -> Candidate | None:
    """Return the choice of ``base``'s run with one other value; None if nothing fits, or a setting excludes it.

    It is also None if nothing that fits ``is_better``. That is found out first, because few candidates are, and the
    choice compares many.
    """
    resolved = _resolve_with(base.settings, setting, value)
    if resolved is None:
        return None
    planner = Planner(resolved, _least(base, resolved.run))
    try:
        return find_choice(planner) if is_better is None or fits_better(planner, is_better) else None
    except ShardmakeError:
        return None


def _least(base: Planner, run: Run) -> Callable[[Choice], int] | None:
    """Return the bytes that the activations of ``run`` take at least, which is ``base``'s run with one other value.

    It saves traces of steps that cannot fit. A changed loss, optimizer or number of nodes leaves the forward pass of
    the layers as it is, ranks that share a sequence divide it, and it grows at most with the square of the length.
    """
    before = base.settings.run
    others = ("method", "activation_offload", "precision", "tensor_parallel")
    if base.settings.model.decoder is not None or any(getattr(run, key) != getattr(before, key) for key in others):
        return None
    shared = {"sequence_parallel": before.sequence_parallel}
    parts = run.sequence_parallel // before.sequence_parallel * (before.sequence_length // run.sequence_length) ** 2
    return lambda choice: base.forward_bytes(choice.model_copy(update=shared)) // parts


def _resolve_with(settings: ResolvedRun, setting: str, value: Any) -> ResolvedRun | None:
    """Return the run with one other value; None if another setting, the model or the cluster excludes it."""
    changed = _changed(settings.run, setting, value)
    try:
        parse_section(Run, changed.model_dump(), "The change")
        nodes = max(settings.cluster.max_nodes, (changed.nodes or 0) + (changed.service_nodes or 0))
        resolved = resolve(changed, settings.cluster.model_copy(update={"max_nodes": nodes}))
        check(resolved, packages=False)
    except ShardmakeError:
        return None
    return resolved


def _changed(run: Run, setting: str, value: Any) -> Run:
    """Return ``run`` with another value of ``setting``, which may be a key of its objective's section."""
    section, _, key = setting.rpartition(".")
    if section:
        assert run.objective_settings is not None
        setting, value = section, run.objective_settings.model_copy(update={key: value})
    return run.model_copy(update={setting: value})


def _describe(found: Candidate, run: Run, against: str = "") -> str:
    missing = "".join(f"; needs pip install {package}" for _, package in missing_packages(run))
    return f"{found.name}: {memory_and_time(found)}{against}{missing}"
