"""Write PEFT's adapter_config.json beside checkpoints of a script whose library saves an adapter without it.

FSDP's checkpoints, `accelerator.save_state` and DeepSpeed's `save_checkpoint` hold an adapter's weights and neither its
scale nor its kind, which the consolidate stage needs. PEFT writes that file only with weights of its own.
"""

import logging
import os
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from shardmake.checkpoint.formats.lora import DEFAULT, REFERENCE
from shardmake.core.errors import ShardmakeError
from shardmake.core.run_folder import make_folder, rename
from shardmake.run.adapter_settings import CONFIG, AdapterSettings

logger = logging.getLogger(__name__)


def adapter_configs(model: torch.nn.Module) -> dict[str, Any]:
    """Return PEFT's settings of each adapter in ``model`` by the adapter's name; empty without adapters."""
    owner = _owner(model)
    return {} if owner is None else vars(owner)["peft_config"]


def write_adapter_configs(model: torch.nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the settings of the adapters in ``model`` to ``folder``, as PEFT would beside its own weights.

    Of several adapters, each but the default one has a folder of its name; TRL's reference always has. A file that
    exists is left as it is.
    """
    configs = adapter_configs(model)
    several = len(configs.keys() - {REFERENCE}) > 1
    for name, config in configs.items():
        has_own_folder = name == REFERENCE or (several and name != DEFAULT)
        _write(_owner(model), config, Path(folder) / name if has_own_folder else Path(folder))


def _owner(model: torch.nn.Module) -> Any:
    """Return the outermost part of ``model`` that holds settings of adapters, inside any wrapper."""
    return next((part for part in model.modules() if vars(part).get("peft_config")), None)


def _write(owner: Any, config: Any, folder: Path) -> None:
    path = folder / CONFIG
    if path.exists():
        _compare(path, config)
        return
    make_folder(folder)
    with TemporaryDirectory(dir=folder, prefix=".adapter-") as unfinished:
        _as_saved(owner, config, Path(unfinished))
        rename(Path(unfinished) / CONFIG, path)


def _as_saved(owner: Any, config: Any, folder: Path) -> None:
    """Save ``config`` as `PeftModel.save_pretrained` does (PEFT 0.21)."""
    from peft.tuners.tuners_utils import BaseTuner

    base = owner.model if isinstance(owner, BaseTuner) else owner
    saved = copy(config)
    saved.inference_mode = True
    saved.base_model_name_or_path = saved.base_model_name_or_path or vars(base).get("name_or_path") or None
    kind = type(base)
    mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    saved.save_pretrained(str(folder), auto_mapping_dict=None if saved.task_type else mapping)


def _compare(path: Path, config: Any) -> None:
    """Warn about an existing file of another adapter, with which a merge would be wrong."""
    try:
        found, trained = AdapterSettings.read(path), AdapterSettings.parse(config.to_dict())
    except ShardmakeError as error:
        logger.warning(error)
        return
    both = found.decisive(), trained.decisive()
    other = [key for key in both[0] | both[1] if both[0].get(key) != both[1].get(key)]
    if other:
        logger.warning(
            "%s is not of the adapter that is saved beside it: %s differ. A merge would use that file. Remove it, or "
            "save to an empty folder.",
            *(path, ", ".join(other)),
        )
