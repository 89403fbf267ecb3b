"""The auxiliary files of a model: config, generation config, tokenizer, chat template, processor, model code."""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats.dtypes import CONVERTIBLE, ITEM_SIZE, torch_name
from shardmake.core.atomic import read_json, write_json
from shardmake.core.errors import ModelError

_GROUPS = {
    "generation": ("generation_config.json",),
    "tokenizer": (
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
        "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "chat_template.jinja", "chat_template.json",
        "additional_chat_templates",
    ),
    "processor": ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    "code": ("*.py",),
}  # fmt: skip
_TRAINING_SCRIPTS = {"zero_to_fp32.py", "zero_to_torch.py"}  # DeepSpeed writes them beside every checkpoint


def find_aux_files(folder: Path) -> list[Path]:
    """Return the config and the auxiliary files in ``folder``; a merge copies them if training wrote no others."""
    patterns = ("config.json", *(pattern for group in _GROUPS.values() for pattern in group))
    found = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    return [path for path in found if path.is_file()]


def copy_aux_files(sources: Sequence[Path], target: Path, dtypes: Iterable[str], adapter: Path | None = None) -> None:
    """Copy the auxiliary files to ``target``, each group from the first of ``sources`` that has a file of it.

    Args:
        sources: Folders to search, in order.
        target: The merged model's folder.
        dtypes: The types of the merged tensors; the config declares the widest floating one.
        adapter: The adapter_config.json to copy instead of a model's config, if an adapter is written alone.

    Raises:
        ModelError: No folder holds a config.json.
    """
    target.mkdir(parents=True, exist_ok=True)
    groups = dict(_GROUPS)
    if adapter is None:
        write_json(target / "config.json", _config(sources, dtypes))
    else:
        write_json(target / adapter.name, {**read_json(adapter, "the training"), "inference_mode": True})
        groups = {"tokenizer": _GROUPS["tokenizer"]}
    for patterns in groups.values():
        for source in sources:
            found = [path for pattern in patterns for path in sorted(source.glob(pattern))]
            found = [path for path in found if path.name not in _TRAINING_SCRIPTS]
            for path in found:
                _copy(path, target / path.name)
            if found:
                break


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copyfile(source, target)


def config_folder(sources: Sequence[Path | None]) -> Path:
    """Return the first of ``sources`` with a config.json."""
    return _configs(sources)[0].parent


def _configs(sources: Sequence[Path | None]) -> list[Path]:
    found = [folder / "config.json" for folder in sources if folder is not None and (folder / "config.json").is_file()]
    if not found:
        searched = ", ".join(str(folder) for folder in sources if folder is not None) or "the adapter's folder"
        raise ModelError(f"There is no config.json in {searched}. Name the base model's folder with --base.")
    return found


def _config(sources: Sequence[Path], dtypes: Iterable[str]) -> dict[str, Any]:
    found = _configs(sources)
    config = read_json(found[0], "the training")
    _set_dtype(config, widest(dtypes))
    last = read_json(found[-1], "the base model")
    if "use_cache" in last:  # gradient checkpointing switches it off in the checkpoint's config
        config["use_cache"] = last["use_cache"]
    return config


def widest(dtypes: Iterable[str]) -> str:
    """Return the widest floating type of ``dtypes``, float32 without one."""
    floating = CONVERTIBLE & set(dtypes)
    return max(floating, key=lambda dtype: (ITEM_SIZE[dtype], dtype), default="F32")


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Write the type as transformers 5 does, also in the configs of sub-models that declare one."""
    config.pop("torch_dtype", None)
    config["dtype"] = torch_name(dtype)
    for value in config.values():
        if isinstance(value, dict) and {"dtype", "torch_dtype"} & set(value):
            _set_dtype(value, dtype)
