"""Let transformers itself load a model's folder, without its bytes, and say what it misses.

transformers and torch take more memory than a merge and seconds to import, so they run in a process of their own.
Weights go to the meta device, so that only the files' headers are
read; a folder with sparse files of the right headers does as well as the real one.
"""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardmake.core.errors import ModelError, ShardmakeError
from shardmake.core.process import answer_request, run_module


@dataclass(frozen=True)
class Loading:
    """What ``from_pretrained`` said.

    Attributes:
        architecture: The class that loaded the folder.
        missing: Names of the model's tensors that the folder does not hold.
        unexpected: Names in the folder that the model has no use for.
        mismatched: Of each tensor of another shape its name, the folder's and the model's shape.
        ties: By name of a tied weight, the name of the weight that it shares.
        error: Why the folder cannot be loaded at all; empty if it can.
    """

    architecture: str = ""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    error: str = ""

    def problems(self) -> list[str]:
        """One sentence each; none if the folder loads as it should."""
        found = [self.error] if self.error else []
        found += [f"{name} is missing" for name in self.missing]
        found += [f"{name} is not part of {self.architecture}" for name in self.unexpected]
        return found + [f"shape of {text}" for text in self.mismatched]


def try_loading(folder: Path, trust_remote_code: bool = False, base: Path | None = None) -> Loading:
    """Load ``folder`` with transformers in another process.

    Where it is an adapter's, ``base`` is the folder with the config of the model that it is for.

    Raises:
        ShardmakeError: that process failed in a way that says nothing about the folder.
    """
    request = {"folder": str(folder), "trust_remote_code": trust_remote_code, "base": base and str(base)}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        return _from_json(run_module(__name__, request, environment))
    except RuntimeError as error:
        raise ModelError(f"{folder} could not be loaded for a check: {error}") from None


def _from_json(values: dict[str, Any]) -> Loading:
    return Loading(
        architecture=values["architecture"],
        missing=tuple(values["missing"]),
        unexpected=tuple(values["unexpected"]),
        mismatched=tuple(values["mismatched"]),
        ties=tuple((alias, owner) for alias, owner in values["ties"]),
        error=values["error"],
    )


def load(folder: Path, trust_remote_code: bool) -> Loading:
    """`try_loading` in this process."""
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
    except Exception as error:  # whatever transformers or the model's own code raises is the finding
        return Loading(error=f"transformers cannot load it: {type(error).__name__}: {error}")
    return Loading(
        architecture=type(model).__name__,
        missing=tuple(sorted(info["missing_keys"])),
        unexpected=tuple(sorted(info["unexpected_keys"])),
        mismatched=tuple(f"{name} is {list(ours)}, the model's {list(its)}" for name, ours, its in
                         sorted(info["mismatched_keys"])),
        ties=tuple(sorted((getattr(model, "all_tied_weights_keys", None) or {}).items())),
        error="; ".join(info.get("error_msgs") or ()),
    )  # fmt: skip


def load_adapter(folder: Path, base: Path, trust_remote_code: bool) -> Loading:
    """What PEFT would miss of the adapter in ``folder`` in the model of the config in ``base``; without any bytes."""
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
    except Exception as error:  # whatever PEFT, transformers or the model's own code raises is the finding
        return Loading(error=f"PEFT cannot load it: {type(error).__name__}: {error}")
    held = {name: tensor.shape for name, tensor in read(folder).tensors.items()}
    both = sorted(held.keys() & expected.keys())
    return Loading(
        architecture=f"{type(adapted).__name__} of {type(model).__name__}",
        missing=tuple(sorted(expected.keys() - held.keys())),
        unexpected=tuple(sorted(held.keys() - expected.keys())),
        mismatched=tuple(f"{name} is {list(held[name])}, the model's {list(expected[name])}" for name in both
                         if held[name] != expected[name]),
    )  # fmt: skip


def _model_class(folder: Path, config: Any, trust_remote_code: bool) -> Any:
    """The class that the config names, from transformers or, where that is allowed, from the folder's own code."""
    import transformers

    name = (getattr(config, "architectures", None) or ["AutoModelForCausalLM"])[0]
    if hasattr(transformers, name):
        return getattr(transformers, name)
    auto = [key for key, value in (getattr(config, "auto_map", None) or {}).items() if value.endswith(f".{name}")]
    if auto and trust_remote_code:
        return getattr(transformers, auto[0])
    raise ShardmakeError(
        f"config.json in {folder} names {name}, which this transformers ({transformers.__version__}) does not have"
        + (": its code comes with the model; allow it with trust_remote_code." if auto else ".")
    )


def _answer(request: Any) -> dict[str, Any]:
    folder, trust_remote_code = Path(request["folder"]), request["trust_remote_code"]
    if request["base"]:
        return asdict(load_adapter(folder, Path(request["base"]), trust_remote_code))
    return asdict(load(folder, trust_remote_code))


if __name__ == "__main__":
    answer_request(_answer)
