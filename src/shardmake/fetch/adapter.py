"""Take an adapter whose training continues (``lora.adapter``): compare it with the run, and write it as PEFT does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open

from shardmake.checkpoint.formats.lora import config_file, read_settings
from shardmake.config.checks import run_before
from shardmake.config.models import Run
from shardmake.core.errors import ConfigError, ModelError
from shardmake.core.manifest import read_named, record
from shardmake.run.adapter_settings import AdapterSettings
from shardmake.run.paths import RunDir
from shardmake.run.receipts import MergeReceipt, WeightsReceipt
from shardmake.run.sources import PinnedAdapter, PinnedSource, Sources, localize, origin_of_adapter

Merge = Callable[[Run, Path, Path, Path], None]
"""Merges the checkpoint from which a run starts, and its base model in the next folder, into the last folder."""
_SHORTENED: Final = 20
"""Number of targets from which PEFT saves common ends of their names."""
_KEPT: Final = {"peft_type", "r", "lora_alpha", "fan_in_fan_out", "init_lora_weights"}
"""Settings that a run has as well, that PEFT derives from the model, or that matter before the first step alone."""


def describe(run: Run, rundir: RunDir, model: PinnedSource) -> PinnedAdapter:
    """Return rank, alpha and targets of the run's adapter by the adapter_config.json with which its chain begins.

    It is refused if it belongs to another base model, or is not what the section `lora` describes.
    """
    name = str(run.lora.adapter)
    if (before := run_before(name)) is not None:
        theirs = Sources.read(rundir.sibling(before).sources, f"shardmake fetch {before} --part description").adapter
        found = PinnedAdapter(name=name, **(theirs.model_dump(exclude={"name"}) if theirs else {}))
    else:
        settings = read_settings(Path(name), holds_base=False)
        _check_base(name, settings, model)
        found = PinnedAdapter(name=name, **_described(name, settings))
    found.merged_into(run.lora)
    return found


def _check_base(name: str, settings: AdapterSettings, model: PinnedSource) -> None:
    base = str(settings.base_model_name_or_path)
    if base != model.name and Path(base).resolve() != Path(model.path).resolve():
        raise ModelError(
            f"lora.adapter {name} belongs to another base model: {base}, not {model.name}. Name that one as the model. "
            f"If both are the same, write {model.name} as base_model_name_or_path into {config_file(Path(name))}."
        )


def _described(name: str, settings: AdapterSettings) -> dict[str, Any]:
    """Return the values of the section `lora`; raise `ConfigError` for settings that this section does not have."""
    modules, alpha = settings.target_modules, settings.lora_alpha
    odd = {key: value for key, value in settings.decisive().items() if key not in _KEPT}
    odd |= {key: getattr(settings, key) for key in ("exclude_modules", "layers_pattern") if getattr(settings, key)}
    odd |= {} if modules is None or isinstance(modules, list) else {"target_modules": modules}
    odd |= {} if 0 < alpha <= 1_000_000 and alpha == int(alpha) else {"lora_alpha": alpha}
    if odd:
        values = ", ".join(f"{key}: {value}" for key, value in odd.items())
        raise ConfigError(
            f"lora.adapter {name} cannot be continued: its {values} has no key in the section lora. Merge it into the "
            "base model instead, and train a new adapter: name it as resume_from."
        )
    targets = sorted({*(modules or []), *settings.target_parameters})
    return {"rank": settings.r, "alpha": int(alpha), "targets": targets}


def fetch_weights(run: Run, rundir: RunDir, sources: Sources, base: WeightsReceipt, merge: Merge) -> dict[str, Any]:
    """Write the adapter to `rundir.adapter`; return its part of the receipt of ``base``, the base model's weights.

    It is refused if it does not fit the model, or if the run that trains it has no finished model or another base
    model, or was started again.
    """
    name, model, again = str(run.lora.adapter), sources.model, f"shardmake fetch {rundir.name}"
    source, origin = Path(name), origin_of_adapter(rundir, name)
    if (before := run_before(name)) is not None:
        other = rundir.sibling(before)
        again = f"snakemake {other.model_receipt}"
        source = Path(MergeReceipt.read(other.model_receipt, again).checkpoint)
        trained = other.train_receipt
        if not trained.exists() or trained.stat().st_mtime_ns > other.model_receipt.stat().st_mtime_ns:
            raise ModelError(f"Run {before} was started again after its model was written. Finish it first: {again}")
        theirs = WeightsReceipt.read(other.weights_receipt, f"shardmake fetch {before}")
        if Sources.read(other.sources).model.first.commit != model.first.commit or theirs.files != base.files:
            raise ModelError(
                f"Run {before} trains its adapter on another state of {model.name}. Fetch both runs again, and train "
                f"{before} from the start."
            )
    merge(run, source, Path(model.path), rundir.adapter)
    found, planned = _described(name, read_settings(rundir.adapter, holds_base=False)), localize(run, rundir).lora
    wanted: dict[str, Any] = {"rank": planned.rank, "alpha": planned.alpha}
    if isinstance(planned.targets, list) and len(planned.targets) < _SHORTENED:
        wanted["targets"] = sorted({*planned.targets})
    if wanted != {key: found[key] for key in wanted}:
        raise ModelError(f"lora.adapter {name} has other values than planned: {found}, not {wanted}. Run: {again}")
    with safe_open(rundir.adapter / "adapter_model.safetensors", "numpy") as file:
        whole = [key for key in file.keys() if ".lora_" not in key]  # noqa: SIM118
    if whole:  # ZeRO-3 could not load them into its parts of the base model
        raise ModelError(
            f"lora.adapter {name} holds whole weights beside its matrices ({whole[0]}). Merge it into the base model "
            "instead, and train a new adapter: name it as resume_from."
        )
    files = [path.name for path in rundir.adapter.glob("adapter_*")]
    return {"adapter": read_named(rundir.adapter, sorted(files), record), "adapter_of": origin}
