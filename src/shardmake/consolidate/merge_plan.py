"""The plan of a merge: the checkpoint, the base model, and the output files."""

import logging
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypedDict

from shardmake.checkpoint.formats import huggingface, lora
from shardmake.checkpoint.formats.contents import Contents, StoredTensor, are_apart, have_same_bytes
from shardmake.checkpoint.formats.dtypes import Target, check_target
from shardmake.checkpoint.formats.hub_layout import in_hub_layout
from shardmake.checkpoint.formats.huggingface import ADAPTER, MODEL, WeightFiles
from shardmake.checkpoint.formats.registry import read_checkpoint, read_model
from shardmake.consolidate.aux_files import config_folder, copy_aux_files, read_object
from shardmake.consolidate.destination import check_destination, checkpoint_folders
from shardmake.consolidate.layout import PlannedShard, index_json, plan_shards
from shardmake.consolidate.loading import LoadingReport, check_loading, layout_of
from shardmake.consolidate.source_checks import Allowed, SourceReport, check_source, parse_allowed
from shardmake.core.atomic import write_json
from shardmake.core.errors import CheckpointError, ConfigError
from shardmake.core.run_folder import make_folder, open_file, remove
from shardmake.core.units import parse_size, plural
from shardmake.run.model_class import OLD_HEAD, ModelClass

_SHARED = ".embed_tokens.weight"
"""End of the alias if encoder and decoder share their embedding, as in T5; other aliases are heads."""


def resolve_ties(
    contents: Contents, ties: Iterable[tuple[str, str]], *, untie: bool
) -> tuple[Contents, dict[str, str]]:
    """Return the tensors to write, each tied weight once, and the ties that do not hold.

    ``ties`` has the name of each tied weight and of the weight that it shares. With ``untie``, both weights of a tie
    that does not hold are kept; otherwise raise `CheckpointError`, because dropping one would lose it.
    """
    found = {name: tensor for name, tensor in contents.tensors.items() if name not in contents.aliases}
    untied, trained, same = {}, contents.trained, set[str]()
    for pair in ties:
        alias, owner = pair
        held = [found[name] for name in pair if name in found and alias != owner]
        apart = [name for name in pair if name in trained]
        if len(held) == 2 and have_same_bytes(*held) and _have_same_change(*held, is_apart=bool(apart)):
            del found[alias]
            same |= {*pair}
        elif len(held) == 2 or (held and apart):
            untied[alias] = owner
            before = {name: trained[name] if name in trained else found.get(name) for name in pair}
            for name, other in (pair, pair[::-1]):
                value, base = found.get(name), before[other]
                if base is not None and (value is None or not value.pieces):
                    found[name] = replace(base, name=name, update=value.update if value else None)
            if {*pair} <= found.keys():
                found[alias] = _with_rows(found[alias], found[owner])
    always = {alias: owner for alias, owner in untied.items() if alias.endswith(_SHARED)}
    if always or (untied and not untie):
        alias, owner = next(iter((always or untied).items()))
        alone = " and ".join(name for name in (alias, owner) if name in trained)
        advice = "To write both, with tie_word_embeddings: false in the config.json, add --allow untied."
        if always:
            use = ": use the adapter with PEFT" if alone else ""
            advice = f"The class shares them in any case, so that no model can hold both{use}."
        raise CheckpointError(
            f"The model's config ties {alias} to {owner}, but the checkpoint holds different values for them"
            f"{f': the adapter trained {alone}' if alone else ''}. {advice}"
        )
    _refuse_misfits(found.values())
    left = {name: tensor for name, tensor in trained.items() if name not in same}  # ties are resolved once more
    return replace(contents, tensors=found, aliases={}, trained=left), untied


def _with_rows(alias: StoredTensor, owner: StoredTensor) -> StoredTensor:
    """Return ``alias`` with the trained rows of ``owner``, which PEFT gives it unless it has some itself."""
    if not isinstance(owner.update, lora.TokenUpdate) or isinstance(alias.update, lora.TokenUpdate):
        return alias
    if alias.update is not None:
        raise CheckpointError(
            f"Cannot merge the adapter: it changes {alias.name}, which also gets the trained rows of {owner.name}, "
            "because the config ties them. PEFT's own merge loses these rows: load base model and adapter with PEFT."
        )
    return replace(alias, update=replace(owner.update, module=alias.name.removesuffix(".weight")))


def _refuse_misfits(tensors: Iterable[StoredTensor]) -> None:
    """Raise `CheckpointError` for an update of a weight that the base model does not have."""
    for tensor in tensors:
        if tensor.update and not tensor.pieces:
            raise CheckpointError(f"Cannot merge the adapter: {tensor.update.misfit(None)}")


def _have_same_change(alias: StoredTensor, owner: StoredTensor, *, is_apart: bool) -> bool:
    """Return True if the merge changes both sides of a tie in the same way; ``is_apart`` if PEFT trained one alone.

    PEFT gives trained rows of the owner, the input embedding, to the alias as well, but not those of the alias back.
    """
    rows = [tensor.update.rows for tensor in (alias, owner) if isinstance(tensor.update, lora.TokenUpdate)]
    if (not rows and not is_apart) or (alias.update is None and rows):
        return True
    mine, its = (tensor.update.parts if tensor.update else {} for tensor in (alias, owner))
    same_parts = mine.keys() == its.keys() and all(have_same_bytes(mine[part], its[part]) for part in mine)
    return same_parts and rows[:1] == rows[1:]


logger = logging.getLogger(__name__)
_MAX_LINES = 20


@dataclass(frozen=True)
class MergePlan:
    """The checkpoint to merge, the base model's folder, and the output files."""

    contents: Contents
    base: Path | None
    dtype: Target
    files: WeightFiles
    max_shard_size: int
    raw: bool
    source: SourceReport
    allow: tuple[Allowed, ...]
    key: str | None
    untied: dict[str, str] = field(default_factory=dict)
    """The ties of the config that do not hold, so that the model stores both weights."""

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """The tensors to write, by name: all that are not an alias."""
        contents = self.contents
        return {name: tensor for name, tensor in contents.tensors.items() if name not in contents.aliases}

    @cached_property
    def shards(self) -> list[PlannedShard]:
        """The output files; one for an adapter, as PEFT reads it."""
        size = sys.maxsize if self.is_adapter else self.max_shard_size
        return plan_shards(self.stored.values(), self.dtype, size, self.files)

    @property
    def is_adapter(self) -> bool:
        """True if an adapter is written alone."""
        return self.files == ADAPTER

    def fitted(self, loading: LoadingReport) -> "MergePlan":
        """Return the plan of the weights that the model's files hold.

        They are in the layout of the base model's files, with those of its weights that its class does not load. An
        adapter is added to the base model's own weights: if a sequence classifier replaces their head over the
        vocabulary, that is left out.
        """
        contents = in_hub_layout(self.contents, loading.weights)
        tensors = dict(contents.tensors)
        missing = [name for name in loading.unloaded if name not in tensors]
        if missing and not self.is_adapter and self.base_weights is not None:
            held = huggingface.read(self.base_weights).tensors
            tensors |= {name: held[name] for name in missing}
        head = tensors.get(OLD_HEAD) if loading.architecture.endswith("ForSequenceClassification") else None
        is_of_base = head and all(piece.record.path.parent == self.base for piece in head.pieces)
        if is_of_base and OLD_HEAD in loading.unexpected:
            del tensors[OLD_HEAD]
        if contents is self.contents and tensors.keys() == contents.tensors.keys():
            return self
        return replace(self, contents=contents.with_tensors(tensors.values()))

    @property
    def base_weights(self) -> Path | None:
        """The base model's folder if its weights are there."""
        return self.base if self.base is not None and huggingface.recognise(self.base) else None

    def matches_base(self) -> bool:
        """Return True if the base model's files hold the same tensors, so that no tied weight is stored twice.

        Copying can then start before transformers, which takes seconds, has confirmed it.
        """
        if self.base is None or self.is_adapter or huggingface.find_weight_files(self.base) != MODEL:
            return False
        if not huggingface.is_complete(self.base):
            return False  # only the small files were fetched
        config = read_object(config_folder([*checkpoint_folders(self.contents), self.base]) / "config.json")
        if OLD_HEAD in self.stored and config.get("tie_word_embeddings") is not False:
            return False  # both sides of a tie may be in the files
        base = {name: tensor.shape for name, tensor in huggingface.read(self.base).tensors.items()}
        return base == {name: tensor.shape for name, tensor in self.stored.items()}

    def check_skeleton(self, skeleton: Path, trust_remote_code: bool, model_class: ModelClass | None) -> LoadingReport:
        """Load files with the headers of the merged model and without its bytes, and report what transformers finds.

        This detects a checkpoint of another model before any weight is copied. The verification at the end sees the
        same headers and need not load them again.
        """
        if self.raw:
            return LoadingReport(ties=tuple(sorted(self.contents.aliases.items())))
        remove(skeleton)
        try:
            self.write_small_files(skeleton, trust_remote_code)
            for shard in self.shards:
                with open_file(skeleton / shard.name, "wb") as file:
                    file.truncate(shard.size)
                    file.write(shard.header)
            base = config_folder([*checkpoint_folders(self.contents), self.base]) if self.is_adapter else None
            return check_loading(skeleton, trust_remote_code, base, self.base_weights, model_class)
        finally:
            remove(skeleton)

    def check(self, loading: LoadingReport) -> "MergePlan":
        """Return the plan that stores each tied weight once; raise `CheckpointError` for what transformers reports."""
        _refuse_misfits(self.contents.tensors[name] for name in loading.unexpected if name in self.contents.tensors)
        problems = loading.problems(self.accepted(loading))
        if problems:
            advice = self._advice(loading)
            rest = len(problems) - _MAX_LINES
            more = [f"... and {rest} more"] if rest > 0 else []
            lines = (f"  {line}." for line in [*advice, *problems[:_MAX_LINES], *more])
            headline = f"{self.contents.folder} does not fit the model's config.json:"
            raise CheckpointError("\n".join([headline, *lines]))
        ties = loading.ties_in_files
        untie = "untied" in self.allow or self._base_unties(ties)
        contents, untied = resolve_ties(self.contents, ties, untie=untie)
        return replace(self, contents=contents, untied={**self.untied, **untied})

    def _base_unties(self, ties: Iterable[tuple[str, str]]) -> bool:
        """Return True if the base's files hold different values for two tied weights: transformers unties them."""
        if self.base is None or not huggingface.is_complete(self.base):
            return False
        held = huggingface.read(self.base).tensors
        return any(are_apart(held[alias], held[owner]) for alias, owner in ties if {alias, owner} <= held.keys())

    def _advice(self, loading: LoadingReport) -> list[str]:
        """Return what to do about the problems, where that is known."""
        if loading.mismatched and all(ours[1:] == theirs[1:] for _, ours, theirs in loading.mismatched):
            rows = loading.mismatched[0][1][0]
            return [
                "If the vocabulary was resized before training, name a --base that was saved after the resize: its "
                f"config.json has vocab_size {rows}"
            ]
        for first in loading.missing[:1]:
            for level in (name.removesuffix(f".{first}") for name in loading.unexpected if name.endswith(f".{first}")):
                if {f"{level}.{name}" for name in loading.missing} <= {*loading.unexpected}:
                    return [f"The model's tensors are those below {level}. To merge it alone, add --key {level}"]
        is_adapter = self.contents.format == "PEFT adapter"  # what is left over of it was trained
        if loading.unexpected and not (is_adapter or loading.missing or loading.mismatched or loading.error):
            return ["To keep tensors that the class does not have, add --allow unexpected"]
        return []

    def doubts(self, loading: LoadingReport) -> list[str]:
        """Return one sentence for each doubt about the merged weights."""
        left = lora.unadapted(self.contents, loading.unloaded)
        return [
            f"target_modules in {lora.CONFIG} chooses {plural(len(left), 'weight')} that the adapter does not change, "
            f"such as {left[0]}: the model has the base model's. If they were trained, copy the adapter again."
        ] if left else []  # fmt: skip

    def accepted(self, loading: LoadingReport) -> Collection[str]:
        """Return the tensors that are kept although the model's class does not have them."""
        return loading.unexpected if "unexpected" in self.allow else ()

    def write_small_files(self, folder: Path, code: bool) -> list[str]:
        """Write config, tokenizer, index and the like, with ``code`` the base model's code; return the changes."""
        make_folder(folder)
        if len(self.shards) > 1:
            write_json(folder / self.files.index, index_json(self.shards))
        if self.raw:
            return []
        dtypes = {planned.dtype for shard in self.shards for planned in shard.tensors}
        adapter = lora.config_file(self.contents.folder) if self.is_adapter else None
        trained = checkpoint_folders(self.contents)
        return copy_aux_files(self.base, trained, folder, dtypes, adapter=adapter, code=code, untie=bool(self.untied))

    def check_destination(self, out: Path, *, overwrite: bool) -> None:
        """Raise `ConfigError` if ``out`` must not be replaced; see `destination.check_destination`."""
        protected = dict.fromkeys(checkpoint_folders(self.contents), "the checkpoint")
        if self.base is not None:
            protected[self.base] = "the base model"
        check_destination(out, protected, overwrite=overwrite)


class MergeOptions(TypedDict, total=False):
    """The options of `plan_merge` and their types."""

    base: Path | None
    dtype: Target
    adapter: bool
    max_shard_size: str
    raw: bool
    allow: Collection[Allowed]
    key: str | None


def plan_merge(
    checkpoint: Path,
    base: Path | None = None,
    dtype: Target = "keep",
    *,
    adapter: bool = False,
    max_shard_size: str = "5GB",
    raw: bool = False,
    allow: Collection[Allowed] = (),
    key: str | None = None,
) -> MergePlan:
    """Read the checkpoint and plan the merge that `consolidate` does with these arguments.

    Args:
        checkpoint: As for `consolidate`.
        base: The base model's folder, for the tokenizer and other small files, for the config if the checkpoint has
            none, and for the weights that a LoRA adapter is added to.
        dtype: Type of the weights; ``keep`` keeps the checkpoint's master weights unchanged.
        adapter: Write a LoRA adapter alone, as PEFT saves it, instead of the base model with the adapter.
        max_shard_size: Largest output file, such as ``5GB``.
        raw: Write the weights alone, under the checkpoint's own names. Nothing else than the weights is checked.
        allow: What is merged although it may be a mistake; see `Allowed`.
        key: Of several models in a checkpoint of DCP, the one to merge: the levels above its weights, joined by dots.

    Raises:
        ShardmakeError: The checkpoint cannot be merged, or the arguments contradict each other.
    """
    check_target(dtype)
    size, allowed = parse_size(max_shard_size), parse_allowed(allow)
    if raw and (base is not None or adapter):
        raise ConfigError("A raw merge writes the checkpoint's own weights. Leave out --base and --adapter, or --raw.")
    options = (checkpoint, dtype, base, adapter, key, layout_of)
    contents = read_checkpoint(checkpoint, dtype, key) if raw else read_model(*options)
    for note in contents.notes:
        logger.warning("Skipped a newer checkpoint: %s", note)
    source = check_source(contents, allowed)
    contents = replace(contents, step=source.step if contents.step is None else contents.step)
    step = "" if contents.step is None else f", step {contents.step}"
    logger.info("Merging %s: %s%s, %d tensors.", contents.folder, contents.format, step, len(contents.tensors))
    for warning in source.warnings:
        logger.warning(warning)
    if base is None and not raw:
        logger.warning(
            "No base model is named: the model gets no tokenizer, generation config or licence. Name one with --base."
        )
    return MergePlan(contents, base, dtype, ADAPTER if adapter else MODEL, size, raw, source, allowed, key)
