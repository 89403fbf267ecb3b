"""Verify a merged model: its tensors, values, ties, types, index and checksums, in one pass over every byte."""

import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats import huggingface
from shardmake.checkpoint.formats.contents import Contents
from shardmake.checkpoint.formats.dtypes import CONVERTIBLE, torch_name
from shardmake.checkpoint.formats.hub_layout import in_hub_layout
from shardmake.checkpoint.formats.registry import read_model
from shardmake.consolidate.aux_files import config_folder, read_object, widest
from shardmake.consolidate.blocks import Block
from shardmake.consolidate.layout import PlannedShard, PlannedTensor, plan_jobs
from shardmake.consolidate.loading import LoadingReport, check_loading, layout_of
from shardmake.consolidate.merge_plan import resolve_ties
from shardmake.consolidate.peft_check import compare_with_peft, merge_with_peft
from shardmake.consolidate.scan import ModelScan, scan
from shardmake.consolidate.stream import StreamTask, stream
from shardmake.core.atomic import sha256
from shardmake.core.errors import CheckpointError, ModelError, PushError
from shardmake.core.fingerprint import FileEntry
from shardmake.core.manifest import SUMS, parse_sums, read_named
from shardmake.run.paths import MODEL_CARD, MODEL_RECEIPT
from shardmake.run.receipts import MergeReceipt, Verification


def compare(
    model: Path,
    checkpoint: Path,
    loading: LoadingReport | None = None,
    *,
    base: Path | None = None,
    workers: int = 4,
    key: str | None = None,
) -> None:
    """Read both as `verify` does and compare every stored bit; a tied weight may be stored under either of its names.

    ``loading`` is what transformers reports of ``model``: its ties and the layout of its weights; None for neither.
    Raise `CheckpointError` if a tensor differs, or is in only one of them.
    """
    loading = loading or LoadingReport()
    receipt = MergeReceipt.read_if_exists(model / MODEL_RECEIPT)
    key = key or (receipt.key if receipt else None)
    trained = read_model(checkpoint, base=base, key=key, layout=layout_of, like=model)
    read = in_hub_layout(trained, loading.weights)
    untied = receipt.untied if receipt else {}
    expected, _ = resolve_ties(read, [*loading.ties_in_files, *untied.items()], untie=bool(untied))
    merged = huggingface.read(model).tensors
    missing = sorted(merged.keys() - expected.tensors.keys() - set(loading.unloaded))
    left_out = expected.tensors.keys() - merged.keys()
    if missing or left_out:
        raise CheckpointError(
            f"{model} and {expected.folder} do not hold the same tensors: {[*missing, *sorted(left_out)]}. "
            "Merge the checkpoint again."
        )
    shards = [_as_shard(model / name, expected) for name in huggingface.shard_names(model)]
    different = _different(shards, model, workers)
    if different:
        lines = (f"  {name} differs." for name in sorted(different))
        raise CheckpointError("\n".join([f"{model} does not equal {expected.folder}:", *lines]))
    compare_with_peft(merge_with_peft(expected, base), merged)


def _as_shard(path: Path, expected: Contents) -> PlannedShard:
    """Return a file of the model as the plan that would have written it."""
    planned = []
    for merged in huggingface.read_file(path):
        source = expected.tensors.get(merged.name)
        if source is not None and merged.shape != source.shape:
            raise CheckpointError(
                f"{merged.name} is {list(merged.shape)} in {path}, but {list(source.shape)} in the checkpoint. "
                "Merge the checkpoint again."
            )
        if source is not None:
            planned.append(PlannedTensor(source, merged.dtype, merged.offset))
    return PlannedShard(path.name, b"", tuple(planned), path.stat().st_size)


def _different(shards: list[PlannedShard], model: Path, workers: int) -> set[str]:
    found: set[str] = set()
    for shard, jobs in zip(shards, plan_jobs(shards), strict=True):
        with (model / shard.name).open("rb") as file:

            def put(rows: Block, offset: int, stride: int, target: PlannedTensor) -> None:
                places = ((row, offset + index * stride) for index, row in enumerate(rows))
                if any(os.pread(file.fileno(), len(row), at) != row.tobytes() for row, at in places):
                    found.add(target.tensor.name)

            stream([StreamTask(job, put) for job in jobs], workers)
    return found


def verify(
    model: Path,
    against: Path | None = None,
    *,
    base: Path | None = None,
    workers: int = 4,
    trust_remote_code: bool = False,
    key: str | None = None,
) -> Verification:
    """Verify the model in the folder ``model``.

    The folder must hold exactly the tensors of its config, with their shapes and types. All values must be finite,
    except in rows of -inf. Ties and index must be correct. transformers must load the folder with no missing key, and
    with no unexpected key but those that the receipt lists. Files must match the checksums in the receipt of a merge or
    in the SHA256SUMS of a push, if there are any. Tensors that are all zero and rows of -inf are in the result.

    Args:
        model: A Hugging Face folder, of a model or of an adapter.
        against: A checkpoint to compare with: bit for bit, or after rounding to the model's type.
        base: The base model's folder, if ``model`` or ``against`` is an adapter.
        workers: Threads; each holds a few MiB.
        trust_remote_code: Allow code in the folder to run.
        key: Of several models in ``against``, the one to compare with. Default: the one in the folder's receipt.

    Raises:
        ShardmakeError: The model has problems; the message has one line for each.
    """
    receipt = MergeReceipt.read_if_exists(model / MODEL_RECEIPT)
    merged = receipt.verification if receipt else None
    if merged and not merged.architecture and not (model / "config.json").exists():  # the result of a raw merge
        loading = LoadingReport(ties=tuple(merged.ties.items()))
    else:
        adapter_base = config_folder([base]) if huggingface.recognise_adapter(model) else None
        loading = check_loading(model, trust_remote_code, adapter_base, None if adapter_base else model)
    accepted, recorded = (merged.unexpected, merged.files) if merged else ((), None)
    verification = verify_loaded(model, loading, scan(model, workers), accepted, recorded)
    if against is None:
        return verification
    compare(model, against, loading, base=base, workers=workers, key=key)
    return verification.model_copy(update={"compared_with": str(against)})


def checksums_of(model: Path) -> str | None:
    """Return the file in the folder ``model`` that has the checksums of the others; None without one."""
    return next((name for name in (MODEL_RECEIPT, SUMS) if (model / name).is_file()), None)


def verify_loaded(
    model: Path,
    loading: LoadingReport,
    found: ModelScan,
    accepted: Collection[str] = (),
    recorded: Mapping[str, FileEntry] | None = None,
) -> Verification:
    """Do the checks of `verify` with the report of transformers on files with the same headers, and with `scan`.

    ``accepted`` are the tensors that the class may lack, ``recorded`` the files in the receipt.
    """
    stored, used = found.contents.tensors, set(huggingface.shard_names(model))
    weights = {path.name for suffix in ("safetensors", "bin") for path in model.glob(f"*.{suffix}")}
    merged = {name: entry for name, entry in found.files.items() if name != MODEL_CARD}
    config = read_object(model / "config.json") if (model / "config.json").is_file() else {}  # an adapter has none
    declared = str(config.get("dtype") or config.get("torch_dtype") or "")
    held = {torch_name(it.dtype) for it in stored.values() if it.dtype in CONVERTIBLE}
    misdeclared = declared and held and declared not in held
    problems = [
        *loading.problems(accepted),
        *(
            f"{alias} is stored, although the model ties it to {owner}"
            for alias, owner in loading.ties
            if alias in stored and owner in stored
        ),
        *([f"config.json declares {declared}, the tensors are {', '.join(sorted(held))}"] if misdeclared else []),
        *found.problems,
        *(f"{name} is not part of the model" for name in sorted(weights - used - {"training_args.bin"})),
        *(_differences("the receipt", recorded, merged) if recorded is not None else ()),
        *_sums_problems(model, found.files),
    ]
    if problems:
        raise ModelError("\n".join([f"{model} is not valid:", *(f"  {problem}." for problem in problems)]))
    elements = Counter[str]()
    for tensor in stored.values():
        elements[torch_name(tensor.dtype)] += tensor.numel
    return Verification(
        architecture=loading.architecture,
        tensors=len(stored),
        parameters=elements.total(),
        bytes=sum(tensor.nbytes for tensor in stored.values()),
        dtype=declared or torch_name(widest(tensor.dtype for tensor in stored.values())),
        dtypes=dict(elements),
        ties=dict(loading.ties),
        zero=found.zero,
        zero_matrices=found.zero_matrices,
        infinite_rows=found.infinite_rows,
        unexpected=list(loading.unexpected),
        files=found.files,
        compared_with=None,
    )


def _sums_problems(model: Path, files: Collection[str]) -> list[str]:
    if not (model / SUMS).is_file():
        return []
    try:
        expected = parse_sums((model / SUMS).read_text(errors="replace"))
    except PushError:
        return [f"{SUMS} was not written by Shardmake: compare the files with it by other means, and move it away"]
    found = read_named(model, [name for name in files if name in expected], sha256)
    return _differences(SUMS, expected, {name: found.get(name) for name in files if name != SUMS})


def _differences(source: str, recorded: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each file that is not as ``source`` records it."""
    gone = [f"{name} is in {source}, but not in the folder" for name in recorded if name not in found]
    changed = [f"{name} differs from {source}" for name in found if found[name] != recorded.get(name, found[name])]
    return gone + changed + [f"{name} is not in {source}" for name in found if name not in recorded]
