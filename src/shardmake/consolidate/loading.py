"""Load a model's folder with transformers, without its bytes, and report missing or unexpected tensors.

transformers and torch need more memory than a merge and seconds to import, so they run in a separate process. Weights
are loaded to the meta device, so that only the headers are read. Sparse files with the right headers are sufficient.
"""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardmake.core.errors import ModelError
from shardmake.core.process import answer_request, run_module


@dataclass(frozen=True)
class LoadingReport:
    """The result of ``from_pretrained``.

    Attributes:
        architecture: The class that loaded the folder.
        missing: Names of the model's tensors that the folder does not hold.
        unexpected: Names in the folder that the model does not have.
        mismatched: Name, shape in the folder and shape in the model of each tensor of another shape.
        ties: Name of each tied weight and of the weight that it shares.
        error: Error of loading; empty if the folder can be loaded.
    """

    architecture: str = ""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    error: str = ""

    def problems(self) -> list[str]:
        """Return one sentence per problem; an empty list if the folder loads completely."""
        found = [self.error] if self.error else []
        found += [f"{name} is missing" for name in self.missing]
        found += [f"{name} is not part of {self.architecture}" for name in self.unexpected]
        return found + [f"shape of {text}" for text in self.mismatched]


def check_loading(folder: Path, trust_remote_code: bool = False, base: Path | None = None) -> LoadingReport:
    """Load ``folder`` with transformers in another process.

    For an adapter, ``base`` is the folder with the config of its base model.

    Raises:
        ModelError: The process failed for a reason other than the folder.
    """
    request = {"folder": str(folder), "trust_remote_code": trust_remote_code, "base": base and str(base)}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        return _from_json(run_module(__name__, request, environment))
    except RuntimeError as error:
        raise ModelError(f"The check of {folder} with transformers failed: {error}") from None


def _from_json(values: dict[str, Any]) -> LoadingReport:
    return LoadingReport(
        architecture=values["architecture"],
        missing=tuple(values["missing"]),
        unexpected=tuple(values["unexpected"]),
        mismatched=tuple(values["mismatched"]),
        ties=tuple((alias, owner) for alias, owner in values["ties"]),
        error=values["error"],
    )


def load(folder: Path, trust_remote_code: bool) -> LoadingReport:
    """Do the work of `check_loading` in this process."""
    import transformers
    from transformers import AutoConfig

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        kind = _model_class(folder, config, trust_remote_code)
        model, info = kind.from_pretrained(
            folder,
            device_map="meta",
            dtype="auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **({"trust_remote_code": True} if trust_remote_code else {}),
        )
    except Exception as error:  # transformers and the model code can raise anything
        return LoadingReport(error=f"transformers cannot load it: {type(error).__name__}: {error}")
    return LoadingReport(
        architecture=type(model).__name__,
        missing=tuple(sorted(info["missing_keys"])),
        unexpected=tuple(sorted(info["unexpected_keys"])),
        mismatched=tuple(f"{name} is {list(ours)}, the model's {list(theirs)}" for name, ours, theirs in
                         sorted(info["mismatched_keys"])),
        ties=tuple(sorted((getattr(model, "all_tied_weights_keys", None) or {}).items())),
        error="; ".join(info.get("error_msgs") or ()),
    )  # fmt: skip


def load_adapter(folder: Path, base: Path, trust_remote_code: bool) -> LoadingReport:
    """Compare the adapter in ``folder`` with what PEFT expects for the model in ``base``, without any bytes."""
    import torch
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoConfig

    from shardmake.checkpoint.formats.huggingface import read

    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
        kind = _model_class(base, config, trust_remote_code)
        with torch.device("meta"):
            model = kind.from_config(config) if kind.__name__.startswith("Auto") else kind(config)
            adapted = get_peft_model(model, PeftConfig.from_pretrained(str(folder)))
        expected = {name: tuple(t.shape) for name, t in get_peft_model_state_dict(adapted).items()}
    except Exception as error:  # PEFT, transformers and the model code can raise anything
        return LoadingReport(error=f"PEFT cannot load it: {type(error).__name__}: {error}")
    held = {name: tensor.shape for name, tensor in read(folder).tensors.items()}
    both = sorted(held.keys() & expected.keys())
    return LoadingReport(
        architecture=f"{type(adapted).__name__} of {type(model).__name__}",
        missing=tuple(sorted(expected.keys() - held.keys())),
        unexpected=tuple(sorted(held.keys() - expected.keys())),
        mismatched=tuple(f"{name} is {list(held[name])}, the model's {list(expected[name])}" for name in both
                         if held[name] != expected[name]),
    )  # fmt: skip


def _model_class(folder: Path, config: Any, trust_remote_code: bool) -> Any:
    """Return the class in the config, from transformers or, if that is allowed, from the folder's own code."""
    import transformers

    name = (getattr(config, "architectures", None) or ["AutoModelForCausalLM"])[0]
    if hasattr(transformers, name):
        return getattr(transformers, name)
    auto = [key for key, value in (getattr(config, "auto_map", None) or {}).items() if value.endswith(f".{name}")]
    if auto and trust_remote_code:
        return getattr(transformers, auto[0])
    advice = "Its code is part of the model: set trust_remote_code." if auto else "Install another version."
    raise ModelError(
        f"config.json in {folder} names {name}, which transformers {transformers.__version__} does not have. {advice}"
    )


def _answer(request: Any) -> dict[str, Any]:
    folder, trust_remote_code = Path(request["folder"]), request["trust_remote_code"]
    if request["base"]:
        return asdict(load_adapter(folder, Path(request["base"]), trust_remote_code))
    return asdict(load(folder, trust_remote_code))


if __name__ == "__main__":
    answer_request(_answer)
