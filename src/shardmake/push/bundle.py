"""Files of a push: the verified model, its card, and their checksums."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardmake.config.models import Run
from shardmake.core.atomic import write_bytes
from shardmake.core.errors import PushError
from shardmake.core.fingerprint import FileEntry
from shardmake.core.manifest import (
    SUMS,
    FileRecord,
    Manifest,
    differences,
    format_sums,
    read_files,
    record,
    record_twice,
)
from shardmake.core.secrets import find_secrets, redact
from shardmake.report.card import card_plots, render_card
from shardmake.run.paths import MODEL_CARD, MODEL_RECEIPT, RunDir
from shardmake.run.receipts import MergeReceipt

_TEXTS = (".json", ".txt", ".jinja", ".py", ".md", ".yaml")
LOADED_FIRST = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "config.json")
"""Loaders read these first, so on storage without commits they leave before the weights and arrive after them."""
_LAST = (*LOADED_FIRST, SUMS)


@dataclass(frozen=True)
class Bundle:
    """Files to push, by their name at the destination, in the order in which they may appear there.

    ``model`` has the files of the merged model as its receipt lists them.
    """

    paths: dict[str, Path]
    manifest: Manifest
    model: Mapping[str, FileEntry]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(entry.size for entry in self.manifest.values())


def make_bundle(run: Run, rundir: RunDir) -> Bundle:
    """Check the model against its receipt and add card and checksums.

    Raises `PushError` if the model was not verified or differs from what was verified.
    """
    model, manifest = _verified_model(rundir)
    paths = {name: rundir.model / name for name in manifest}
    folder = rundir.push_receipt.parent
    if leaking := find_leaking(paths.values()):  # small files come from the base model and from training libraries
        raise PushError(
            f"Nothing was pushed: {', '.join(path.name for path in leaking)} in the model contains what looks like a "
            "token or password. Remove it from the source of the file, usually the base model's folder, and "
            "consolidate again."
        )
    for name, content in {MODEL_CARD: redact(render_card(run, rundir)).encode(), **card_plots(run, rundir)}.items():
        _add(paths, manifest, folder, name, content)
    _add(paths, manifest, folder, SUMS, format_sums(manifest).encode())
    order = sorted(paths, key=lambda name: (_LAST.index(name) + 1 if name in _LAST else 0, name))
    return Bundle({name: paths[name] for name in order}, {name: manifest[name] for name in order}, model)


def _add(paths: dict[str, Path], manifest: dict[str, FileRecord], folder: Path, name: str, content: bytes) -> None:
    write_bytes(folder / name, content)
    paths[name], manifest[name] = folder / name, record(folder / name)


def find_leaking(paths: Iterable[Path]) -> list[Path]:
    """Return the text files among ``paths`` that contain what looks like a secret."""
    texts = (path for path in paths if path.suffix in _TEXTS)
    return [path for path in texts if find_secrets(path.read_text(errors="replace"))]


def _verified_model(rundir: RunDir) -> tuple[dict[str, FileEntry], dict[str, FileRecord]]:
    """Return the files of the model in its receipt and their manifest, after comparing them.

    Hidden files are ignored, and the report's card, because a push writes its own. Every byte is read once, for the
    CRC-32 of the receipt and the SHA-256 of the manifest.
    """
    again = f"Merge the model again: shardmake consolidate {rundir.name}"
    expected = MergeReceipt.read(rundir.model_receipt).verification.files
    files = {
        name: both
        for name, both in read_files(rundir.model, record_twice).items()
        if not name.startswith(".") and name not in (MODEL_RECEIPT, MODEL_CARD)
    }
    found = {name: entry for name, (_, entry) in files.items()}
    wrong = differences(expected, found) + [f"{name} is not in the receipt" for name in sorted(found.keys() - expected)]
    if wrong:
        raise PushError(f"Nothing was pushed: {rundir.model} differs from its receipt: {'; '.join(wrong)}.\n{again}")
    return found, {name: strong for name, (strong, _) in files.items()}
