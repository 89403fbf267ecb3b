"""Compare a merge of an adapter with PEFT: one module of each shape and kind, merged by PEFT itself.

PEFT gets a model of these modules alone, with the base's real values and the adapter's own settings, in a process of
its own. Of a large weight it gets the first rows, so that memory is bounded; every row is merged in the same way.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file, save_file

from shardmake.checkpoint.formats.contents import Contents, StoredTensor, Update
from shardmake.checkpoint.formats.lora import PREFIX, EmbeddingUpdate, LoraUpdate, TokenUpdate
from shardmake.consolidate.blocks import Block, Converter
from shardmake.consolidate.destination import checkpoint_folders
from shardmake.consolidate.stream import read_array
from shardmake.core.errors import CheckpointError
from shardmake.core.library_process import one_library_process, run_module
from shardmake.core.process import NEUTRAL_FOLDER
from shardmake.core.temporary import temporary_folder
from shardmake.run.adapter_settings import CONFIG

if TYPE_CHECKING:
    import torch

_ELEMENTS = 1 << 22
"""Elements of all weights that PEFT merges."""
_AT_ONCE = 16
"""Modules of one model."""
_WHOLE = {
    "modules_to_save": None, "bias": "none", "auto_mapping": None, "task_type": None, "init_lora_weights": True,
    "ensure_weight_tying": False,
}  # fmt: skip
"""Settings that concern the whole model, or what the base weights were before the training."""
_CLOSE = 4e-6
"""Part of a value by which sums of float32 differ in another order."""


@dataclass(frozen=True)
class PeftSample:
    """Rows ``[begin, begin + len(before))`` of a merged weight: its name, the values before, and PEFT's result."""

    name: str
    begin: int
    before: Block
    merged: Block


def merge_with_peft(contents: Contents) -> list[PeftSample]:
    """Let PEFT merge one module of each shape and kind of a plan with an adapter.

    The modules have the classes of the model's own, if transformers can build it from the config.

    Raises:
        CheckpointError: PEFT cannot merge the adapter; the message has its reason.
    """
    chosen: dict[Any, tuple[StoredTensor, Update]] = {}
    for tensor in contents.tensors.values():
        if update := tensor.update:
            shapes = tuple((part, held.shape) for part, held in update.parts.items())
            kind = re.sub(r"\.\d+(?=\.)", "", update.module), update.settings.scale(update.module), shapes
            chosen.setdefault((tensor.dtype, tensor.shape, *kind), (tensor, update))
    all_of_them = sorted(chosen.values(), key=lambda held: not isinstance(held[1], TokenUpdate))
    of_base = {piece.record.path.parent for tensor, _ in all_of_them for piece in tensor.pieces[:1]}
    places = [*checkpoint_folders(contents), *of_base] if all_of_them else []
    config = next((str(place.absolute()) for place in places if (place / "config.json").is_file()), None)
    with one_library_process():
        batches = (all_of_them[at : at + _AT_ONCE] for at in range(0, len(all_of_them), _AT_ONCE))
        libraries = ("peft",) * (len(all_of_them) > _AT_ONCE)
        elements = _ELEMENTS // max(1, len(all_of_them))
        return [sample for batch in batches for sample in _merge(batch, elements, config, libraries)]


def _merge(
    batch: Sequence[tuple[StoredTensor, Update]], elements: int, config: str | None, libraries: Sequence[str]
) -> Iterator[PeftSample]:
    samples: dict[str, tuple[str, int, Block]] = {}
    modules: dict[str, tuple[str, list[int]]] = {}
    adapter: dict[str, Block] = {}
    for tensor, update in batch:
        rows = update.rows if isinstance(update, TokenUpdate) else []
        begin = min(rows, default=0)
        end = min(tensor.shape[0], begin + max(1, elements // tensor.shape[1]))
        samples[update.module] = (tensor.name, begin, read_array(tensor.rows(begin, end)))
        adapter |= {f"{PREFIX}{update.module}.{p}": held for p, held in update.part(read_array, begin, end).items()}
        is_embedding = isinstance(update, EmbeddingUpdate | TokenUpdate)
        is_transposed = isinstance(update, LoraUpdate) and update.transposed
        layer = "Embedding" if is_embedding else "Conv1D" if is_transposed else "Linear"
        modules[update.module] = (layer, [row - begin for row in rows if begin <= row < end])
    with temporary_folder("peft") as folder:
        save_file({module: np.ascontiguousarray(held) for module, (*_, held) in samples.items()}, folder / "base")
        save_file({n: np.ascontiguousarray(held) for n, held in adapter.items()}, folder / "adapter_model.safetensors")
        settings = batch[0][1].settings.model_dump(exclude_defaults=True)
        (folder / CONFIG).write_text(json.dumps({**settings, **_WHOLE}))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        request = {"folder": str(folder), "modules": modules, "config": config}
        try:
            run_module(__name__, request, environment, NEUTRAL_FOLDER, libraries)
        except RuntimeError as error:
            raise CheckpointError(f"The merge of an adapter's modules with PEFT failed: {error}") from None
        merged = load_file(folder / "merged")
    for module, (name, begin, before) in samples.items():
        yield PeftSample(name, begin, before, merged[module])


def compare_with_peft(samples: list[PeftSample], written: Mapping[str, StoredTensor]) -> int:
    """Compare the ``written`` tensors with PEFT's, rounded to their type; return the number of modules.

    Raises:
        CheckpointError: A value is not PEFT's.
    """
    for sample in samples:
        tensor = written[sample.name]
        ours = read_array(tensor.rows(sample.begin, sample.begin + len(sample.before)))
        change = np.abs(sample.merged - sample.before).max(axis=1, keepdims=True)
        close = _CLOSE * (np.abs(sample.merged) + np.abs(sample.before) + change)
        low, high = (_rounded(sample.merged + sign * close, tensor.dtype) for sign in (-1, 1))
        wrong = ~((low <= ours) & (ours <= high))
        if wrong.any():
            raise CheckpointError(
                f"The merged {sample.name} is not PEFT's: {int(wrong.sum())} of {wrong.size} values differ, by up to "
                f"{float(np.abs(ours - sample.merged)[wrong].max()):.3g}. Merge with PEFT's merge_and_unload, and "
                "report this adapter's adapter_config.json."
            )
    return len(samples)


def _rounded(values: Block, dtype: str) -> Block:
    """Return float32 values after rounding to ``dtype``."""
    converter = Converter(values.size)
    narrow = converter.convert(values.reshape(-1).view(np.uint8), "F32", dtype).copy()
    return converter.convert(narrow, dtype, "F32").view(np.float32).copy().reshape(values.shape)


# --- in the child process ---------------------------------------------------------------------------------------------


def answer(request: Any) -> None:
    """Let PEFT merge the modules of the request."""
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file, save_file

    folder, modules = Path(request["folder"]), request["modules"]
    path = folder / CONFIG
    config = json.loads(path.read_text())
    if config.get("target_modules") in (None, "all-linear"):
        config["target_modules"] = [name for name, (_, rows) in modules.items() if not rows]
    config["trainable_token_indices"] = {name: rows for name, (_, rows) in modules.items() if rows} or None
    path.write_text(json.dumps(config))
    kinds = _kinds(Path(request["config"])) if request["config"] else {}
    model = torch.nn.Module()
    for name, weight in load_file(folder / "base").items():
        *levels, last = name.split(".")
        place: Any = model
        for level in levels:
            if not hasattr(place, level):
                place.add_module(level, torch.nn.Module())
            place = getattr(place, level)
        place.add_module(last, _module(kinds.get(name, modules[name][0]), weight))
    try:
        merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except Exception as error:  # PEFT can raise anything
        raise CheckpointError(
            f"PEFT cannot merge the adapter: {type(error).__name__}: {error}. Check that its files belong to the base "
            "model."
        ) from None
    save_file({name: merged.get_submodule(name).weight.detach().contiguous() for name in modules}, folder / "merged")


def _module(kind: str, weight: "torch.Tensor") -> "torch.nn.Module":
    """Return a module of the ``kind`` with ``weight``."""
    import torch
    from transformers.pytorch_utils import Conv1D

    rows, columns = weight.shape
    made: Any = torch.nn.Embedding(rows, columns) if kind == "Embedding" else None
    made = made or (Conv1D(columns, rows) if kind == "Conv1D" else torch.nn.Linear(columns, rows, bias=False))
    made.weight.data = weight
    return made


def _kinds(config_folder: Path) -> dict[str, str]:
    """Return the kind of each module of the model; empty if transformers alone cannot build it."""
    import torch
    from transformers.pytorch_utils import Conv1D

    from shardmake.consolidate.loading import empty_model

    try:
        model = empty_model(config_folder)
    except Exception:  # its code may be elsewhere; the kind then follows from the shapes
        return {}
    kinds = {"Linear": torch.nn.Linear, "Conv1D": Conv1D, "Embedding": torch.nn.Embedding}
    return {name: k for name, module in model.named_modules() for k, cls in kinds.items() if isinstance(module, cls)}
