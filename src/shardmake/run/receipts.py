"""Receipts: each marks a finished stage and describes what the stage wrote."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from shardmake.config.formats import FORMATS, DataFormat
from shardmake.core.fingerprint import FileEntry
from shardmake.core.manifest import FileRecord
from shardmake.core.units import plural
from shardmake.run.engine import Engine, LearningSettings
from shardmake.run.record import RunFile, RunRecord, optional


class WeightsReceipt(RunFile):
    """``fetched/weights.json``: the base model's weights are complete."""

    made_by: ClassVar[str] = "shardmake fetch NAME"
    files: dict[str, FileRecord] = Field(
        description="Files that came from the hub or a URL, or the weights of another run or a local folder."
    )
    changed_at: dict[str, int] = optional(
        {}, "Time of the last change of each weight file of a local folder, by path: Unix time (ctime) in nanoseconds."
    )
    merged: str | None = optional(
        None, "SHA-256 of the other run's `model/receipt.json`; None for a model that is not a run's."
    )
    adapter: dict[str, FileRecord] = optional({}, "Files of the adapter whose training continues.")
    adapter_of: str | None = optional(
        None, "Path from which that adapter was taken, or SHA-256 of the other run's `model/receipt.json`."
    )


class DataFile(RunRecord):
    """One Arrow file of the data."""

    path: str = Field(description="Path below the data folder.")
    bytes: int = Field(description="Size.")
    sha256: str = Field(description="Hex digest of the content.")


class DataSettings(RunRecord):
    """The settings that the data depends on."""

    format: str = Field(description="Format in the configuration; may be auto.")
    columns: dict[str, str] = Field(description="Names of columns in the configuration.")
    loss_on: str = Field(description="Tokens with loss, in the configuration.")
    eval_fraction: float = Field(description="Part of the training data that is split off for evaluation.")
    order: str = Field(description="Order of the training examples.")
    sequence_length: int = Field(description="Tokens per sequence.")
    packing: bool = Field(description="Sequences hold several examples.")
    seed: int = Field(description="Seed of the order.")
    template_arguments: dict[str, Any] = optional({}, "Arguments of the chat template.")
    turns: str = optional("auto", "Examples of a conversation with several turns.")
    on_bad_row: str = optional("stop", "What happens at a row that cannot be learned.")
    stops: list[str] = optional([], "Tokens at which generation stops, by the model's files.")
    day: str | None = optional(None, "Day that a chat template which reads the clock writes.")
    objective: str | None = optional(None, "Objective other than sft, which reads other formats.")
    mix: list[dict[str, Any]] = optional([], "Weight, repeat, limit and format of each of several sources.")
    evaluated: list[dict[str, Any]] = optional([], "Name and format of each of several sources of evaluation examples.")


class SourceShare(RunRecord):
    """The part of one of several sources in a split."""

    name: str = Field(description="Name of the source.")
    format: str = Field(description="Format of its examples, with the columns.")
    examples: int = Field(description="Examples in the split; repeated ones count each time.")
    tokens: int = Field(description="Their tokens.")
    loss_tokens: int = Field(description="Those of them that are learned.")
    share: float = Field(description="Their part of the split's loss tokens, from 0 to 1.")
    sequences: int | None = Field(
        None, description="Sequences of the evaluation split, which has them source by source; None for training."
    )

    def describe(self) -> str:
        """Return examples and share for readers."""
        return f"{plural(self.examples, 'example')}, {self.share:.1%} of the loss tokens"


class SplitReceipt(RunRecord):
    """One split of the data; the outcomes are parts of ``examples``."""

    examples: int = Field(description="Examples read.")
    truncated: int = Field(description="Examples cut to the sequence length.")
    split: int = Field(description="Examples split into several pieces.")
    dropped_without_loss: int = Field(description="Examples without a token to learn.")
    dropped_loss_truncated: int = Field(description="Examples without a token to learn before the cut.")
    dropped_too_long: int = optional(0, "Pairs that are too long for an objective that needs whole answers.")
    dropped_bad: int = optional(0, "Rows that could not be read or learned, with `data.on_bad_row: drop`.")
    bad: dict[str, int] = optional({}, "These rows by cause.")
    apart: int = optional(0, "Conversations of which each turn is an example.")
    first_dropped: list[str] = Field(description="The first dropped examples, each with its file and line.")
    sequences: int = Field(description="Sequences written.")
    tokens: int = Field(description="Tokens written, without padding.")
    loss_tokens: int = Field(description="Tokens that are learned.")
    files: list[DataFile] = Field(description="Arrow files.")
    sources: list[SourceShare] = optional([], "Share of each source, if there are several.")


class DataReceipt(RunFile):
    """``data/receipt.json``: the tokenized data is complete."""

    made_by: ClassVar[str] = "shardmake data NAME"
    digest: str = Field(description="Digest of the training data.")
    layout: int = Field(description="Version of the files' layout.")
    encoding: int = optional(0, "Version of the encoding rules; other runs take only files of their own version.")
    tokenizer: str = Field(description="Digest of the tokenizer.")
    sources: dict[str, dict[str, Any]] = Field(description="Identity of the source of each split.")
    settings: DataSettings = Field(description="Settings that the data depends on.")
    pad_token_id: int = Field(description="Token id of padding.")
    data_format: DataFormat = Field(description="Format of the examples.")
    columns: dict[str, str] = Field(description="Columns that this format reads, by their usual names.")
    loss_on_assistant: bool = Field(description="Only the assistant's tokens have loss.")
    marks_agree: bool | None = optional(
        None, "The template's `{% generation %}` marks say the same learned tokens in the first rows; if not, they are "
        "not followed. Null without marks.",
    )  # fmt: skip
    repeated: int = Field(description="Evaluation examples with the same tokens as a training example.")
    train: SplitReceipt = Field(description="Training sequences.")
    eval: SplitReceipt = Field(description="Evaluation sequences.")
    shown: list[str] = optional([], "The first examples as text, with the learned tokens in [[ ]].")

    def describe_format(self) -> str:
        """Return format, columns and learned tokens for readers."""
        spec = FORMATS[self.data_format]
        columns = ", ".join(dict.fromkeys(self.columns[column] for column in spec.required))
        learned = spec.learned or ("the assistant's tokens" if self.loss_on_assistant else "all tokens")
        several = "; ".join(dict.fromkeys(source.format for source in self.train.sources))
        return f"{several or f'{self.data_format} ({columns})'}, loss on {learned}"


def content_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``inputs`` of a data receipt without the folders of the source files."""
    sources = {
        split: {**source, "files": [{**file, "path": Path(file["path"]).name} for file in source["files"]]}
        for split, source in inputs["sources"].items()
        if "files" in source
    }
    return {**inputs, "sources": {**inputs["sources"], **sources}}


class TrainingReceipt(RunFile):
    """``train/receipt.json``: training finished. What only a user's script could know may be None."""

    steps: int | None = Field(description="Optimizer steps.")
    tokens: int | None = Field(
        description="Tokens of the sequences that were used, without padding and as often as they were used; of pairs, "
        "those with the preferred answer. Of a script what it logged."
    )
    loss: float | None = Field(description="Last training loss.")
    checkpoint: str = Field(description="Final checkpoint, or a script's output, relative to the run's folder.")
    strategy: str = Field(description="Strategy of the last attempt.")
    world_size: int = Field(description="Ranks of the last attempt.")
    settings_digest: str = Field(description="Digest of the settings that define the result.")
    attempts: int = Field(description="Attempts.")
    versions: dict[str, str] = Field(description="Versions of the libraries.")
    finished_at: float = Field(description="Unix time.")
    learning: LearningSettings | None = optional(None, "What the last attempt learned with; None for a user's script.")
    trained: Engine | None = optional(None, "What a user's script trained with; None if it built no engine.")


class Verification(RunRecord):
    """The checks of a merged model."""

    architecture: str = Field(description="The transformers class that loads it with no missing or unexpected key.")
    tensors: int = Field(description="Tensors stored.")
    parameters: int = Field(description="Elements stored.")
    bytes: int = Field(description="Bytes of all tensors.")
    dtype: str = Field(description="Type in config.json: the widest floating type.")
    dtypes: dict[str, int] = Field(
        {}, description="Elements stored by type; frozen and trained parameters may have different ones."
    )
    ties: dict[str, str] = Field(description="Tied weights, by the name that is not stored.")
    zero: list[str] = Field(description="Vectors that are all zero, as biases may be.")
    zero_matrices: list[str] = Field([], description="Matrices that are all zero.")
    infinite_rows: dict[str, int] = Field({}, description="Rows of -inf by tensor, as for banned tokens.")
    unexpected: list[str] = Field([], description="Tensors that the class does not have, kept on request.")
    files: dict[str, FileEntry] = Field(description="Every file of the model.")
    compared_with: str | None = Field(None, description="The checkpoint that every bit was compared with.")

    def describe_types(self) -> str:
        """Return the types of the tensors, with their elements if there are several types."""
        if len(self.dtypes) < 2:
            return self.dtype
        return ", ".join(f"{name} ({count:,})" for name, count in sorted(self.dtypes.items(), key=lambda it: -it[1]))

    def remarks(self) -> list[str]:
        """Return one sentence for each value or tensor that is valid and unusual."""
        found = [f"{name} is all zero." for name in self.zero_matrices]
        found += [f"{rows} rows of {name} are -inf." for name, rows in self.infinite_rows.items()]
        return found + [f"{name} is not part of {self.architecture}." for name in self.unexpected]


class MergeReceipt(RunFile):
    """``model/receipt.json``: where the model comes from, and what was checked."""

    made_by: ClassVar[str] = "shardmake consolidate NAME"
    checkpoint: str = Field(description="The folder with the merged files.")
    written_by: str = Field(description="What wrote them.")
    step: int | None = Field(description="Training step, if the checkpoint names it.")
    world_size: int = Field(description="Ranks that wrote it.")
    dtype: str = Field(description="Requested type of the weights: keep, bf16, fp16 or fp32.")
    source_bytes_checked: int = Field(description="Source bytes whose CRC-32 was recomputed and agreed.")
    output_bytes_compared: int = Field(
        description="Bytes of the weight files that were read back and equal the checksums made while copying."
    )
    peft_modules: int | None = optional(
        None, "Modules of an adapter, one of each shape and kind, that PEFT merges to the same weights."
    )
    recorded_files: int | None = Field(
        None, description="Files of the checkpoint that equal Shardmake's record of the save; None without a record."
    )
    warnings: list[str] = Field([], description="What is doubtful about the checkpoint.")
    allowed: list[str] = Field([], description="Refusals that the user overrode.")
    untied: dict[str, str] = optional({}, "Weights that the base model ties, and that differ: the model stores both.")
    key: str | None = Field(None, description="Key of the model in the checkpoint, if the user named one of several.")
    versions: dict[str, str] = Field(description="What wrote the checkpoint, and what merged it.")
    verification: Verification = Field(description="What was checked in the result.")


class PushedTo(RunRecord):
    """One destination of a push."""

    to: str = Field(description="The destination in the configuration, without secrets.")
    url: str | None = optional(None, "Address on the hub.")
    commit: str | None = optional(None, "Commit on the hub.")
    versions: dict[str, str] | None = optional(None, "Version ids by file, if the object store keeps versions.")


class PushReceipt(RunFile):
    """``push/receipt.json``: every destination was read back and compared."""

    made_by: ClassVar[str] = "shardmake push NAME"
    destinations: list[PushedTo] = Field(description="In the order of the configuration.")
    files: dict[str, FileRecord] = Field(description="Pushed files.")
    model: dict[str, FileEntry] = Field(description="The files of the model in the receipt of the merge.")
