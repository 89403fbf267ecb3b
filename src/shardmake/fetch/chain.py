"""Take the model of another run as a base model (``model: run:NAME``).

Config and tokenizer are those of the base model from which the other run starts, because they are known before it is
trained. Once its model is merged and verified, its weights are linked beside them.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shardmake.config.models import Run
from shardmake.core.atomic import sha256, write_bytes
from shardmake.core.errors import ModelError
from shardmake.core.fingerprint import FileEntry, fingerprint
from shardmake.core.manifest import differences, read_files, record_twice
from shardmake.core.run_folder import make_link, unlink
from shardmake.fetch.model import choose_files, is_description
from shardmake.run.paths import RunDir
from shardmake.run.receipts import MergeReceipt, WeightsReceipt
from shardmake.run.sources import PinnedSource, read_sources

_CONFIG: Final = "config.json"


def description_of(before: RunDir) -> PinnedSource:
    """Return the model from which the run ``before`` starts; raise `ModelError` if that model was not fetched."""
    sources = read_sources(before)
    if sources is None:
        raise ModelError(
            f"The model of run {before.name} is not known yet: {before.sources} does not exist. Fetch it first: "
            f"shardmake fetch {before.name} --part description"
        )
    return sources.model


def copy_description(origin: Path, folder: Path) -> None:
    """Copy config, tokenizer and code of the model in ``origin`` to ``folder``."""
    names = [name for name in choose_files(path.name for path in origin.iterdir()) if is_description(name)]
    for path in folder.iterdir() if folder.is_dir() else ():
        if is_description(path.name) and path.name not in names:  # of an earlier model
            unlink(path)
    for name in names:
        write_bytes(folder / name, (origin / name).read_bytes())


def link_weights(before: RunDir, folder: Path, run: Run) -> WeightsReceipt:
    """Link the weights of the finished model of the run ``before`` into ``folder``; return their digests.

    Raises `ModelError` if there is no finished model, a file of it is damaged, or it is not the model that
    `copy_description` described.
    """
    merged = MergeReceipt.read_if_exists(before.model_receipt)
    if merged is None:
        raise ModelError(
            f"Run {before.name} has no finished model yet: {before.model_receipt} does not exist. Finish it first: "
            f"snakemake {before.model_receipt}"
        )
    files = merged.verification.files
    found = read_files(before.model, record_twice)
    if damaged := differences(files, {name: weak for name, (_, weak) in found.items()}):
        raise ModelError(
            f"The model of run {before.name} is not the one that was verified: {damaged[0]} in {before.model}. "
            f"Merge it again: shardmake consolidate {before.name}"
        )
    _check_description(before, folder, run, files)
    for path in [path for path in folder.iterdir() if not is_description(path.name)]:
        unlink(path)
    weights = [name for name in files if not is_description(name)]
    for name in weights:
        make_link(folder / name, os.path.relpath(before.model.resolve() / name, folder.resolve()))
    return WeightsReceipt(files={name: found[name][0] for name in weights}, merged=sha256(before.model_receipt))


def _check_description(before: RunDir, folder: Path, run: Run, files: Mapping[str, FileEntry]) -> None:
    """Raise `ModelError` if the model of ``before`` has another tokenizer or other sizes than those in ``folder``."""
    own = (_CONFIG, "chat_template.jinja") if run.data.chat_template else (_CONFIG,)
    compared = [name for name in files if is_description(name) and "/" not in name and name not in own]
    present = {name: fingerprint(folder / name) for name in compared if (folder / name).is_file()}
    problems = [name for name in compared if present.get(name) != files[name]]
    problems += _other_values(before.model / _CONFIG, folder / _CONFIG)
    if problems:
        raise ModelError(
            f"The model of run {before.name} has another config or tokenizer than its base model, by which this run "
            f"was planned and its data tokenized ({', '.join(problems)}). Keep both in {before.name}, or name the "
            f"finished folder, model: {before.model}."
        )


def _other_values(trained: Path, planned: Path) -> list[str]:
    """Return a sentence for each size, and for the class, that differs in the config files; token ids are not sizes."""
    ours, theirs = (json.loads(path.read_bytes()) for path in (trained, planned))
    return [
        f"{name} is {ours[name]} instead of {theirs[name]}"
        for name in sorted(ours.keys() & theirs.keys())
        if name == "architectures" or (type(ours[name]) is type(theirs[name]) is int and not name.endswith("_token_id"))
        if ours[name] != theirs[name]
    ]
