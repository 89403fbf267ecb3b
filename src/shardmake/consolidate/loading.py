"""Load a model's folder with transformers, without its bytes, and report missing or unexpected tensors.

transformers and torch need more memory than a merge and seconds to import, so they run in a separate process. Weights
are loaded to the meta device, so that only the headers are read. Sparse files with the right headers are sufficient.
"""

import contextlib
import os
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, validate_call

from shardmake.checkpoint.formats import hub_layout, huggingface
from shardmake.checkpoint.formats.hub_layout import ClassParameter, HubLayout, HubWeight, renamed
from shardmake.consolidate.aux_files import read_object
from shardmake.core.atomic import write_json
from shardmake.core.errors import ModelError, ShardmakeError
from shardmake.core.library_process import run_module
from shardmake.core.process import NEUTRAL_FOLDER
from shardmake.memory.cache import cached_path
from shardmake.memory.families import family_of, written_down
from shardmake.run.model_class import ModelClass, is_same_class
from shardmake.run.text_part import composite_class

_CONFIGS = ("config.json", "generation_config.json", "adapter_config.json")


def _cached_path(folder: Path, base: Path | None, layout: Path | None, model_class: Any) -> Path | None:
    """Return the file of the report on ``folder``; None if a file that it depends on cannot be read.

    Importing transformers takes longer than merging gigabytes, and its report does not change. It depends on the
    configs, on names, types and shapes of the tensors, on the layout, and on the code that asks. Reports of model code,
    which may do anything, and reports with problems are not kept.
    """
    configs = [place / name for place in (folder, base) if place for name in _CONFIGS]
    try:
        parts = {
            "configs": [path.read_bytes().hex() if path.is_file() else None for path in configs],
            "tensors": sorted((t.name, t.dtype, t.shape) for t in huggingface.read(folder).tensors.values()),
            "layout": layout and sorted(huggingface.weight_names(layout)),
            "class": model_class,
        }
    except (ShardmakeError, OSError):
        return None
    package = Path(__file__).parents[1]
    formats = sorted((package / "checkpoint" / "formats").glob("*.py"))
    classes = (package / "run" / name for name in ("model_class.py", "text_part.py"))
    return cached_path(__name__, parts, (Path(__file__), *formats, *classes))


_ACTIVATIONS = {"silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"}
"""Activations of transformers that models of the families have."""
_MOST_MODULES = 10_000
"""Largest number of layers, or of experts of a layer, that is taken from a config."""


@dataclass(frozen=True)
class LoadingReport:
    """The result of ``from_pretrained``.

    Attributes:
        architecture: The class that loaded the folder.
        missing: Names of the model's tensors that the folder does not hold.
        unexpected: Names in the folder that the model does not have.
        mismatched: Name, shape in the folder and shape in the model of each tensor of another shape.
        ties: Name of each tied weight and of the weight that it shares.
        weights: The weights of a model folder that are not a parameter of the same name.
        stacked: The parameters of the modules that hold one with stacked matrices, such as a mixture's experts.
        unloaded: Names in the folder with the layout that are not trained: those that the class declares it does not
            load, and those of the towers of a composite model.
        error: Error of loading; empty if the folder can be loaded.
    """

    architecture: str = ""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    weights: tuple[HubWeight, ...] = ()
    stacked: tuple[ClassParameter, ...] = ()
    unloaded: tuple[str, ...] = ()
    error: str = ""

    @property
    def ties_in_files(self) -> list[tuple[str, str]]:
        """The ties, with the names in the files."""
        names = renamed(self.weights)
        return [(names.get(alias, alias), names.get(owner, owner)) for alias, owner in self.ties]

    def problems(self, accepted: Collection[str] = ()) -> list[str]:
        """Return one sentence per problem; an empty list if the folder loads completely.

        Tensors in ``accepted`` may be unexpected.
        """
        found = [self.error] if self.error else []
        found += [f"{name} is missing" for name in self.missing]
        found += [f"{name} is not part of {self.architecture}" for name in self.unexpected if name not in accepted]
        return found + [f"shape of {n} is {list(ours)}, the model's {list(its)}" for n, ours, its in self.mismatched]


_REPORT = TypeAdapter(LoadingReport)


def layout_of(folder: Path) -> HubLayout:
    """Return the layout of a model's files."""
    found = check_loading(folder, layout=folder)
    return HubLayout(found.weights, found.stacked)


def check_loading(
    folder: Path,
    trust_remote_code: bool = False,
    base: Path | None = None,
    layout: Path | None = None,
    model_class: ModelClass | None = None,
) -> LoadingReport:
    """Load ``folder``, a model or an adapter, with transformers in another process, unless the report is known.

    Args:
        folder, trust_remote_code, model_class: As for `shardmake.consolidate.merge.consolidate`.
        base: For an adapter, the folder with the config of its base model.
        layout: A folder with weights in the layout that the report's ``weights`` describe; None for the default layout
            of transformers.

    Raises:
        ModelError: The process failed for a reason other than the folder, or a config describes an impossible model.
    """
    for place in filter(None, (folder, base)):
        refuse_impossible_config(place / "config.json")
    if base is None and not trust_remote_code and (known := written_report(folder, layout, model_class)) is not None:
        return known
    chosen = model_class and model_class.as_json()
    kept = None if trust_remote_code else _cached_path(folder, base, layout, chosen)
    if kept is not None:
        with contextlib.suppress(OSError, ValueError):
            return _REPORT.validate_json(kept.read_bytes())
    folders = {"folder": folder, "base": base, "layout": layout}
    request: dict[str, Any] = {"trust_remote_code": trust_remote_code, "model_class": chosen}
    request |= {name: place and str(place.absolute()) for name, place in folders.items()}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        answer = run_module(__name__, request, environment, NEUTRAL_FOLDER)
    except RuntimeError as error:
        raise ModelError(f"The check of {folder} with transformers failed: {error}") from None
    report = _REPORT.validate_python(answer)
    if kept is not None and not report.problems():
        with contextlib.suppress(OSError):
            write_json(kept, answer)
    return report


def written_report(folder: Path, layout: Path | None, model_class: ModelClass | None) -> LoadingReport | None:
    """Return the report on a model of a family that is written down and loads completely; None for any other.

    `load` needs seconds to import what is known: its tensors, of which none is renamed, and its tie.
    """
    path = folder / "config.json"
    config = read_object(path) if path.is_file() else {}
    family = family_of(config)
    named = model_class.name if model_class else next(iter(config.get("architectures") or [""]))
    activation = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if family is None or family.experts or named != family.architecture or activation not in _ACTIVATIONS:
        return None
    try:
        model = written_down(family, config, str(path))
        held = {tensor.name: tensor.shape for tensor in huggingface.read(folder).tensors.values()}
        names = huggingface.weight_names(layout) if layout else set()
    except (ShardmakeError, KeyError, TypeError, ValueError, ArithmeticError):
        return None
    expected = {tensor.name: tensor.shape for tensor in model.tensors}
    ties = {"lm_head.weight": "model.embed_tokens.weight"} if model.tied else {}
    also = {alias: expected[owner] for alias, owner in ties.items() if alias in held}
    if "quantization_config" in config or held != {**expected, **also} or not names <= {*expected, *ties}:
        return None
    return LoadingReport(family.architecture, ties=tuple(ties.items()))


def refuse_impossible_config(path: Path) -> None:
    """Raise `ModelError` for a number of layers or experts that no model has; building one would fill the memory."""
    configs = [read_object(path)] if path.is_file() else []
    for config in configs:
        configs += [value for value in config.values() if isinstance(value, dict)]  # those of sub-models
        for key, value in config.items():
            if isinstance(value, int) and value > _MOST_MODULES and re.search(r"layer|expert|block|depth", key):
                raise ModelError(f"{path} is not the config of a model: {key} is {value}. Copy it again.")


@validate_call
def load(
    folder: Path,
    trust_remote_code: bool,
    base: Path | None = None,
    layout: Path | None = None,
    model_class: ModelClass | None = None,
) -> LoadingReport:
    """Do the work of `check_loading` in this process."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        if base is not None:
            return _load_adapter(folder, empty_model(base, trust_remote_code, model_class))
        model, info = _find_class(folder, trust_remote_code, model_class)[0].from_pretrained(
            folder,
            device_map="meta",
            dtype="auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=trust_remote_code,  # without a value, transformers asks on the standard input
        )
        names = huggingface.weight_names(layout) if layout is not None else None
        is_text = model_class is not None and model_class.text_part
        missing = model.state_dict() if is_text else info["missing_keys"]
        try:
            weights = tuple(hub_layout.hub_weights(model, names, missing))
        except ModelError:  # of towers, which are the base's, byte for byte
            if is_text or composite_class(model.config) is None:
                raise
            weights = tuple(hub_layout.hub_weights(model, names, model.state_dict()))
    except ModelError as error:
        return LoadingReport(error=str(error).removesuffix("."))
    except Exception as error:  # transformers, PEFT and the model code can raise anything
        library = "PEFT" if base is not None else "transformers"
        return LoadingReport(error=f"{library} cannot load it: {type(error).__name__}: {error}")
    return LoadingReport(
        architecture=type(model).__name__,
        missing=tuple(sorted(info["missing_keys"])),
        unexpected=tuple(sorted(info["unexpected_keys"])),
        mismatched=tuple((name, tuple(ours), tuple(its)) for name, ours, its in sorted(info["mismatched_keys"])),
        ties=tuple(sorted((getattr(model, "all_tied_weights_keys", None) or {}).items())),
        weights=weights,
        stacked=hub_layout.stacked_parameters(model),
        unloaded=tuple(hub_layout.unloaded_names(model, names or ())),
        error="; ".join(info.get("error_msgs") or ()),
    )  # fmt: skip


def _load_adapter(folder: Path, model: Any) -> LoadingReport:
    """Compare the adapter in ``folder`` with what PEFT expects for the ``model`` without any bytes."""
    import torch
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict

    with torch.device("meta"):
        adapted = get_peft_model(model, PeftConfig.from_pretrained(str(folder)))
    expected = {name: tuple(t.shape) for name, t in get_peft_model_state_dict(adapted).items()}
    held = {name: tensor.shape for name, tensor in huggingface.read(folder).tensors.items()}
    both = sorted(held.keys() & expected.keys())
    return LoadingReport(
        architecture=f"{type(adapted).__name__} of {type(model).__name__}",
        missing=tuple(sorted(expected.keys() - held.keys())),
        unexpected=tuple(sorted(held.keys() - expected.keys())),
        mismatched=tuple((name, held[name], expected[name]) for name in both if held[name] != expected[name]),
    )  # fmt: skip


def empty_model(folder: Path, trust_remote_code: bool = False, model_class: ModelClass | None = None) -> Any:
    """Return the model that config.json in ``folder`` describes, on the meta device."""
    import torch

    kind, config = _find_class(folder, trust_remote_code, model_class)
    with torch.device("meta"):
        is_auto = kind.__name__.startswith("Auto")
        return kind.from_config(config, trust_remote_code=trust_remote_code) if is_auto else kind(config)


def _find_class(folder: Path, trust_remote_code: bool, model_class: ModelClass | None) -> tuple[Any, Any]:
    """Return the class and the config of the model in ``folder``."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return model_class.whole.find() if model_class else find_class(folder, config, trust_remote_code), config


def find_class(folder: Path, config: Any, trust_remote_code: bool) -> Any:
    """Return the class in the config, from transformers or, if that is allowed, from the folder's own code."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = getattr(config, "architectures", None)
    if not named:
        return transformers.AutoModelForCausalLM
    name = str(named[0])
    found = getattr(transformers, name, None)
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    auto = [key for key, value in (getattr(config, "auto_map", None) or {}).items() if value.endswith(f".{name}")]
    if auto and trust_remote_code:
        return getattr(transformers, auto[0])
    own = composite_class(config) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if own and is_same_class(str(own), name):
        return getattr(transformers, str(own))
    advice = "Its code is part of the model: set trust_remote_code." if auto else "Install another version."
    raise ModelError(
        f"config.json in {folder} names {name}, which transformers {transformers.__version__} does not have. {advice}"
    )


def answer(request: Any) -> dict[str, Any]:
    """Return the fields of a `LoadingReport` for the requested folder."""
    return asdict(load(**request))
