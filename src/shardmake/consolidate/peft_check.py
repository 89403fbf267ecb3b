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

from shardmake.checkpoint.formats import lora
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
    """Rows ``[begin, begin + len(before))`` of the merged weight ``name``: the values before, and PEFT's result."""

    name: str
    begin: int
    before: Block
    module: str
    merged: Block


Part = tuple[StoredTensor, int, int]
"""Rows ``[begin, end)`` of a tensor."""


def merge_with_peft(contents: Contents, base: Path | None) -> list[PeftSample]:
    """Let PEFT merge one module of each shape and kind of a plan with an adapter, of a mixture with all its experts.

    The modules have the classes of the model's own, if transformers can build it from the config of the checkpoint or
    of the folder ``base``. Raise `CheckpointError` with PEFT's reason if PEFT cannot merge the adapter.
    """
    weights: dict[str, list[StoredTensor]] = {}
    kinds: dict[Any, str] = {}
    for tensor in contents.tensors.values():
        if update := tensor.update:
            scale = update.scale if isinstance(update, LoraUpdate) else 1.0
            weights.setdefault(update.module, []).append(tensor)
            shapes = tuple((part, held.shape) for part, held in update.parts.items())
            kind = re.sub(r"\.\d+(?=\.)", "", update.module), scale, shapes
            kinds.setdefault((tensor.dtype, *kind, update.shape), update.module)
    roots = dict.fromkeys(map(lora.outermost, kinds.values()))
    chosen = [[held for module, held in weights.items() if lora.outermost(module) == root] for root in roots]
    chosen.sort(key=lambda group: not isinstance(group[0][0].update, TokenUpdate))
    first = [held[0] for group in chosen for held in group]
    of_base = {piece.record.path.parent for tensor in first for piece in tensor.pieces[:1]}
    places = [*checkpoint_folders(contents), *of_base, *([base] if base else [])] if chosen else []
    config = next((str(place.absolute()) for place in places if (place / "config.json").is_file()), None)
    with one_library_process():
        batches = (chosen[at : at + _AT_ONCE] for at in range(0, len(chosen), _AT_ONCE))
        libraries = ("peft",) * (len(chosen) > _AT_ONCE)
        elements = _ELEMENTS // max(1, len(first))
        return [
            sample
            for batch in batches
            for sample in _merge([held for group in batch for held in group], elements, config, libraries)
        ]


def _rows(weights: Sequence[StoredTensor], update: Update, count: int, elements: int) -> tuple[list[int], list[Part]]:
    """Return the rows of each of ``count`` matrices that PEFT merges, and the parts of the weights that hold them."""
    is_tokens = isinstance(update, TokenUpdate)
    height, width = (weights[0].shape if is_tokens else update.shape)[-2:]
    begin = min(update.rows) if isinstance(update, TokenUpdate) else 0
    most = max(1, elements // (count * width))
    rows = list(range(begin, min(height, begin + most)))
    if count > 1 and most < height:  # the parts of a matrix may be separate weights
        half = max(1, most // 2)
        rows = sorted({*range(half), *range(height - half, height)})
    parts = []
    for tensor in sorted(weights, key=lambda tensor: tensor.update.start if tensor.update else 0):
        first = tensor.update.start // width if tensor.update else 0
        held = [n * height + row - first for n in range(count) for row in rows]
        inside = np.array([row for row in held if 0 <= row < tensor.numel // width])
        runs = np.split(inside, np.flatnonzero(np.diff(inside) != 1) + 1)
        parts += [(tensor, int(run[0]), int(run[-1]) + 1) for run in runs if run.size]
    return rows, parts


def _merge(
    batch: Sequence[Sequence[StoredTensor]], elements: int, config: str | None, libraries: Sequence[str]
) -> Iterator[PeftSample]:
    samples: dict[str, list[tuple[str, int, Block]]] = {}
    modules: dict[str, tuple[str, list[int]]] = {}
    base, adapter = dict[str, Block](), dict[str, Block]()
    for weights in batch:
        update = weights[0].update
        assert update is not None
        settings = update.settings.model_dump(exclude_defaults=True)
        name, count = f"{update.module}.weight", 1
        if isinstance(update, LoraUpdate):
            name, count = update.parameter or name, update.count
        rows, parts = _rows(weights, update, count, elements)
        samples[name] = [(tensor.name, begin, read_array(tensor.rows(begin, end))) for tensor, begin, end in parts]
        values = np.concatenate([held.reshape(-1, held.shape[-1]) for *_, held in samples[name]])
        base[name] = values if count == 1 else values.reshape(count, len(rows), -1)
        adapter |= {f"{PREFIX}{update.module}.{part}": held for part, held in update.part(read_array, rows).items()}
        is_embedding = isinstance(update, EmbeddingUpdate | TokenUpdate)
        is_transposed = isinstance(update, LoraUpdate) and update.transposed
        layer = "Embedding" if is_embedding else "Conv1D" if is_transposed else "Linear"
        trained = update.rows if isinstance(update, TokenUpdate) else []
        modules[name] = (layer, [row - rows[0] for row in trained if row in rows])
    with temporary_folder("peft") as folder:
        save_file(base, folder / "base")
        save_file({n: np.ascontiguousarray(held) for n, held in adapter.items()}, folder / "adapter_model.safetensors")
        (folder / CONFIG).write_text(json.dumps({**settings, **_WHOLE}))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        request = {"folder": str(folder), "modules": modules, "config": config}
        try:
            run_module(__name__, request, environment, NEUTRAL_FOLDER, libraries)
        except RuntimeError as error:
            raise CheckpointError(f"The merge of an adapter's modules with PEFT failed: {error}") from None
        merged = load_file(folder / "merged")
    for weight, found in samples.items():
        ends = np.cumsum([len(before) for *_, before in found])
        results = np.split(merged[weight].reshape(-1, merged[weight].shape[-1]), ends[:-1])
        yield from (PeftSample(*sample, weight, result) for sample, result in zip(found, results, strict=True))


def compare_with_peft(samples: list[PeftSample], written: Mapping[str, StoredTensor]) -> int:
    """Return the number of modules whose ``written`` tensors are PEFT's, rounded; raise `CheckpointError` else."""
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
    return len({sample.module for sample in samples})


def _rounded(values: Block, dtype: str) -> Block:
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
        config["target_modules"] = [name.removesuffix(".weight") for name, (_, rows) in modules.items() if not rows]
    tokens = {name.removesuffix(".weight"): rows for name, (_, rows) in modules.items() if rows}
    config["trainable_token_indices"] = tokens or None
    path.write_text(json.dumps(config))
    model, like = torch.nn.Module(), _model_like(request["config"])
    order = {} if like is None else {name: n for n, name in enumerate(like.state_dict())}  # PEFT follows it
    for name, weight in sorted(load_file(folder / "base").items(), key=lambda held: order.get(held[0], 0)):
        owner, _, parameter = name.rpartition(".")
        above, _, last = owner.rpartition(".")
        is_matrix = weight.dim() == 2 and parameter == "weight"
        place: Any = model
        for level in filter(None, (above if is_matrix else owner).split(".")):
            if not hasattr(place, level):
                place.add_module(level, torch.nn.Module())
            place = getattr(place, level)
        if is_matrix:
            place.add_module(last, _module(like, owner, modules[name][0], weight))
            continue
        if like is None:
            raise CheckpointError(
                "The merge of fused experts cannot be proved: transformers cannot build the model from the config.json "
                "of the checkpoint or the base model. Name the base model's folder with --base."
            )
        place.register_parameter(parameter, torch.nn.Parameter(weight))
        place.is_transposed = getattr(like.get_submodule(owner), "is_transposed", False)
    try:
        merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except Exception as error:  # PEFT can raise anything
        raise CheckpointError(
            f"PEFT cannot merge the adapter: {type(error).__name__}: {error}. Check that its files belong to the base "
            "model."
        ) from None
    save_file({name: merged.get_parameter(name).detach().contiguous() for name in modules}, folder / "merged")


def _module(like: Any, path: str, kind: str, weight: "torch.Tensor") -> "torch.nn.Module":
    """Return a module with ``weight``, of the kind of the model's own at ``path``, or of another module of ``kind``."""
    import torch
    from transformers.pytorch_utils import Conv1D

    rows, columns = weight.shape
    kinds: dict[str, tuple[type[torch.nn.Module], tuple[int, ...]]] = {
        "Linear": (torch.nn.Linear, (columns, rows, False)), "Conv1D": (Conv1D, (columns, rows)),
        "Embedding": (torch.nn.Embedding, (rows, columns)),
    }  # fmt: skip
    found = None if like is None else dict(like.named_modules()).get(path)
    known, sizes = next((one for one in kinds.values() if isinstance(found, one[0])), kinds[kind])
    made: Any = known(*sizes)
    made.weight.data = weight
    return made


def _model_like(config_folder: str | None) -> Any:
    """Return the model on the meta device; None if transformers alone cannot build it."""
    from shardmake.consolidate.loading import empty_model

    try:
        return empty_model(Path(config_folder)) if config_folder else None
    except Exception:  # its code may be elsewhere; the kinds of modules then follow from the shapes
        return None
