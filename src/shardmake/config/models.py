"""The models of ``config/config.yaml`` and of the cluster files.

The JSON schemas and ``config/README.md`` are generated from these models (`python -m tools.config_reference`), so every
field has a description. These models check values before anything is queued. Checks that need the model or the data
are part of the stages.
"""

import os
import re
from collections.abc import Iterator, Mapping
from math import ceil, inf
from pathlib import PurePath
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from shardmake.config import values
from shardmake.config.accelerators import find_accelerator
from shardmake.config.attention import Attention
from shardmake.config.choices import (
    DpoLoss,
    EvaluationBackend,
    Format,
    GradientDtype,
    Loss,
    Method,
    Objective,
    Optimizer,
    Precision,
    Schedule,
    Strategy,
    Tracker,
)
from shardmake.config.formats import FORMATS, RAW
from shardmake.config.methods import DEFAULT_METHOD, METHODS, MethodSpec, describe_methods
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.optimizers import DEFAULT_OPTIMIZER, describe_optimizers
from shardmake.config.schema import describe_keys
from shardmake.config.script_file import SCRIPT_VARIABLES, SERVICE_VARIABLES, VARIABLE_KEYS, variable_problems
from shardmake.config.slurm_options import clashes, find_option, why_refused, why_refused_of_step
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core.environment import unset_variable

STRATEGIES: tuple[Strategy, ...] = tuple(STRATEGY_SPECS)
FREE_TEXT: Final = ("script_args",)
"""Lists of text in which an empty entry has a meaning."""
SEVERAL_LINES: Final = ("command", "prompts", "setup")
"""Keys whose text may have line breaks."""


class Section(BaseModel):
    """A part of a configuration file; it rejects unknown keys and wrong types. Each key has a description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, json_schema_extra=describe_keys
    )

    @field_validator("*")
    @classmethod
    def _check_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse text without a visible character, and control characters in a single line of text."""
        for text in [value] if isinstance(value, str) else value if isinstance(value, list) else []:
            if isinstance(text, str) and info.field_name not in FREE_TEXT:
                values.check_text(text, several_lines=info.field_name in SEVERAL_LINES)
        return value

    def _problems(self) -> Iterator[str]:
        """Yield what is wrong with keys that are right by themselves; the first is reported."""
        yield from ()

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self


class Columns(Section):
    """Names of the columns, if they differ from those that `format` reads."""

    messages: str | None = None
    """List of messages. Without it, `messages` for chat and `conversations` for sharegpt, or the other."""
    role: str | None = Field(None, description="Key of a message's role. Without it, `role`, and `from` for sharegpt.")
    content: str | None = None
    """Key of a message's text. Without it, `content`, and `value` for sharegpt."""
    tools: str | None = Field(None, description="List of tools for the chat template, also as JSON text.")
    template_arguments: str | None = None
    """Arguments of the chat template for one row. Without it, `chat_template_kwargs`."""
    system: str | None = Field(None, description="Text of the system message, for chat, sharegpt and alpaca.")
    prompt: str | None = Field(None, description="Prompt, for prompt-completion, preference and unpaired-preference.")
    completion: str | None = Field(None, description="Completion, for prompt-completion and unpaired-preference.")
    label: str | None = Field(None, description="If the completion is desirable, for unpaired-preference.")
    text: str | None = Field(None, description="Text, for text.")
    chosen: str | None = Field(None, description="Preferred answer, for preference.")
    rejected: str | None = Field(None, description="Other answer, for preference.")
    instruction: str | None = Field(None, description="Instruction, for alpaca.")
    input: str | None = Field(None, description="Input to the instruction, for alpaca.")
    output: str | None = Field(None, description="Answer, for alpaca.")

    @property
    def named(self) -> dict[str, str]:
        """Return the columns that have a name here."""
        return self.model_dump(exclude_none=True)


class EvalSource(Section):
    """One of several sources of evaluation examples."""

    source: values.PathText = Field(description="A file, a folder, a hub data set or a URL, as for a single `train`.")
    name: values.SourceName | None = None
    """Name in the report and in losses by source. Without it, that of the file, folder or data set."""
    format: Literal["auto"] | Format | None = Field(None, description="Without it, `data.format`.")
    columns: Columns | None = Field(None, description="Without it, `data.columns`.")
    subset: str | None = Field(None, description="Subset (configuration) of a hub data set.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub data set.")

    @property
    def label(self) -> str:
        """Return the name in reports: ``name``, or the last part of the source without the suffix of a file."""
        last = self.source.rstrip("/").rpartition("/")[2]
        return self.name or re.sub(r"\.(jsonl?|csv|tsv|parquet)(\.\w+)?$", "", last)


class TrainSource(EvalSource):
    """One of several sources of training examples."""

    weight: Annotated[float, Field(gt=0, le=10**6), values.AsNumber] | None = None
    """Share of the examples, relative to the other sources; all need a weight, or none. Examples are drawn until every
    source was read once, so some repeat. Without weights, every example is used once."""
    repeat: Annotated[int, Field(ge=1, le=1000)] = Field(1, description="Number of times that each example is used.")
    limit: values.Steps | None = None
    """Maximum number of training examples, chosen at random by `seed`."""


class Data(Section):
    """The source of the examples and their format."""

    train: values.PathText | list[TrainSource]
    """A file, a folder of files of one kind, or a hub data set: `org/name` (its split `train`) or `org/name:split`.
    Files: `.jsonl`, `.json` (an array, which memory must hold, or one object per line), `.csv`, `.tsv`, also compressed
    (`.gz`, `.bz2`, `.xz`, `.zst`); `.parquet`, `.arrow` (of `save_to_disk`). Or a URL (`s3://`, `gs://`, `https://`,
    any protocol of fsspec), whose files are copied. Or a list of sources, which are mixed."""
    eval: values.PathText | list[EvalSource] | None = None
    """Evaluation examples, as for `train` (of a hub data set, its `validation` or `test` split); the losses of several
    sources are also measured one by one. Without it, a part of each source of `train` is held out. `format: raw` needs
    them, in another format."""
    eval_fraction: Annotated[float, Field(gt=0, lt=0.5), values.AsNumber] = 0.02
    """Fraction of `train` that is held out without `eval`."""
    format: Literal["auto", "raw"] | Format = "auto"
    """Each is shown in docs/reference/models-and-data.md. `auto`: the only one that the objective learns from and the
    columns fit. `preference` is for the objectives `dpo` and `reward`, `unpaired-preference` for `kto`. `raw`, for a
    `script`: any files, which it reads from the folder in `SHARDMAKE_RAW_DATA`."""
    columns: Columns = Field(Columns(), description="Names of the columns, if they differ.")
    loss_on: Literal["auto", "assistant", "all"] = "auto"
    """Tokens with loss: the assistant's (or the completion's), or all. `auto`: `all` for text, else `assistant`."""
    order: Literal["shuffled", "length", "given"] = "shuffled"
    """Order of the training examples. `shuffled`: another in each epoch, from `seed`; `length`: from short to long, a
    curriculum; `given`: that of the source. The last two, and all with `objective: kto`, repeat in each epoch. The last
    two exclude `packing`."""
    chat_template: values.PathText | None = Field(None, examples=["config/chatml.jinja"])
    """File with a Jinja chat template that replaces the tokenizer's in data, evaluation prompts and final model."""
    template_arguments: dict[str, bool | str] = Field({}, examples=[{"enable_thinking": False}])
    """Arguments of the chat template, in data and evaluation prompts, unless a row has its own
    (`chat_template_kwargs`)."""
    turns: Literal["auto", "together", "apart"] = "auto"
    """Examples of a conversation with several turns of the assistant. `together`: one, refused where the template
    renders a turn differently once others follow; `apart`: one for each turn, with its context at inference; `auto`:
    together where all turns share one rendering."""
    on_bad_row: Literal["stop", "drop"] = Field(
        "stop",
        description="At a row that cannot be read or learned, such as one with a role that the chat template does not "
        "render. `drop` counts such rows by cause, and stops if they are more than 5 % of a source.",
    )
    subset: str | None = Field(None, description="Subset (configuration) of a hub data set.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub data set.")

    @property
    def sources(self) -> list[TrainSource]:
        """Return the sources of the training examples, one if ``train`` is a name."""
        if isinstance(self.train, str):
            return [TrainSource(source=self.train, subset=self.subset, revision=self.revision)]
        return self.train

    @property
    def eval_sources(self) -> list[EvalSource]:
        """Return the sources of the evaluation examples; none if these are held out."""
        if isinstance(self.eval, str):
            return [EvalSource(source=self.eval, subset=self.subset, revision=self.revision)]
        return self.eval or []

    @property
    def is_raw(self) -> bool:
        """Return whether a script reads the training data by itself."""
        return self.format == RAW

    @property
    def names(self) -> str:
        """Return the names of all training sources for a message."""
        return ", ".join(one.source for one in self.sources)

    def only(self, one: EvalSource) -> "Data":
        """Return these settings with ``one`` as the only source of examples."""
        own = {"format": one.format, "columns": one.columns}
        settings = {key: value for key, value in own.items() if value is not None}
        hub = {"subset": one.subset, "revision": one.revision}
        return self.model_copy(update={"train": one.source, **hub, **settings})

    def _problems(self) -> Iterator[str]:
        for one in (*self.sources, *self.eval_sources):
            data = self.only(one)
            named = data.columns.named
            formats = FORMATS if data.format == "auto" or data.format == RAW else {data.format: FORMATS[data.format]}
            if not any(named.keys() <= spec.columns.keys() for spec in formats.values()):
                reads = "; ".join(f"{name} reads {', '.join(spec.columns)}" for name, spec in formats.items())
                yield f"columns: no format reads {' and '.join(named)}. {reads}"
        if self.is_raw and not isinstance(self.train, str):
            yield "train: format 'raw' takes one source, which the script reads. Name a file or a folder"
        if self.is_raw and self.eval is None:
            yield (
                "eval: format 'raw' needs evaluation examples in another format, by which the base and the tuned model "
                "are compared. Name a file, a folder or a hub data set"
            )
        if self.is_raw and (self.subset is not None or ":" in str(self.train).rpartition("://")[2]):
            yield "train: format 'raw' is all files of a data set. Remove subset and the name of the split"
        for key, found in (("train", self.train), ("eval", self.eval)):
            labels = [one.label for one in found] if isinstance(found, list) else []
            if found == []:
                yield f"{key}: the list has no source. Name at least one"
            if repeated := sorted({label for label in labels if labels.count(label) > 1}):
                yield f"{key}: several sources are called {repeated[0]!r}. Give each a `name` of its own"
        if isinstance(self.train, str):
            return
        if self.subset is not None or self.revision is not None:
            yield "subset and revision belong to one source. Write them into the entries of train"
        weighted = [one for one in self.train if one.weight is not None]
        if weighted and len(weighted) < len(self.train):
            missing = next(one.label for one in self.train if one.weight is None)
            yield f"train: {missing!r} has no weight, others have one. Give every source a weight, or none"
        if any(one.repeat > 1 for one in weighted):
            yield "train: a source has both weight and repeat, and both say how often. Remove one of them"


class Lora(Section):
    """Low-rank adapters, for each `method` that trains them."""

    rank: values.Count = Field(16, description="Rank of the adapters.")
    alpha: values.Count = Field(32, description="Scale: updates are multiplied by alpha / rank.")
    dropout: Annotated[float, Field(ge=0, lt=1), values.AsNumber] = 0.0
    """Dropout on the adapters' input."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Layers and fused experts that get adapters, such as `[q_proj, v_proj]`."""
    adapter: values.PathText | None = None
    """LoRA adapter whose training continues: a folder or a checkpoint with adapter_config.json, or `run:NAME`, which is
    trained first. It sets rank, alpha and targets. Optimizer, schedule and step begin anew."""
    train_tokens: list[str] = []
    """Tokens whose rows in the embedding and the head are trained in full, such as those of `shardmake fetch
    --add-tokens`."""


class ObjectiveSection(Section):
    """The settings of an objective."""

    def describe(self) -> str:
        """Return the settings as a part of a sentence, after "with"."""
        raise NotImplementedError

    def trl_arguments(self) -> dict[str, Any]:
        """Return the settings as keyword arguments of TRL's class of training arguments."""
        return self.model_dump()


class Referenced(ObjectiveSection):
    """An objective that compares the trained model with a reference."""

    beta: Annotated[float, Field(gt=0, le=1000), values.AsNumber] = 0.1
    """Strength with which the model is held near the reference, the model before the first step."""
    reference: Literal["model", "precomputed"] = "model"
    """`model`: every step also runs the base model. `precomputed`: it runs once before the first step, and a file keeps
    its log-probabilities; training then holds no second model."""

    @property
    def is_precomputed(self) -> bool:
        """Return whether the reference runs once, before the first step."""
        return self.reference == "precomputed"

    def describe_reference(self) -> str:
        """Return the reference as a clause."""
        once = ", which ran once" if self.is_precomputed else ""
        return f"the reference is the model before the first step{once}"

    def trl_arguments(self) -> dict[str, Any]:
        """Return the arguments of TRL's class; it has a switch for the reference."""
        return {**self.model_dump(exclude={"reference"}), "precompute_ref_log_probs": self.is_precomputed}


class Dpo(Referenced):
    """Direct preference optimization, for `objective: dpo`, with the names and defaults of TRL's `DPOConfig`."""

    loss_type: Annotated[list[DpoLoss], Field(min_length=1)] = ["sigmoid"]
    """Losses that are added up: those of TRL's that are a mean over pairs, whatever the micro batch."""

    def describe(self) -> str:
        """Return beta, loss and reference."""
        return f"beta {self.beta:g} and the loss {' + '.join(self.loss_type)}; {self.describe_reference()}"


class Kto(Referenced):
    """Kahneman-Tversky optimization, for `objective: kto`, with the names and defaults of TRL's `KTOConfig`."""

    desirable_weight: Annotated[float, Field(gt=0, le=1000), values.AsNumber] = 1.0
    """Factor of the loss of desirable completions."""
    undesirable_weight: Annotated[float, Field(gt=0, le=1000), values.AsNumber] = 1.0
    """Factor of the loss of undesirable completions. KTO's authors recommend factors with which all desirable
    completions weigh 1 to 4/3 times as much as the undesirable ones."""

    def describe(self) -> str:
        """Return beta, weights and reference."""
        return (
            f"beta {self.beta:g}, desirable weight {self.desirable_weight:g} and undesirable weight "
            f"{self.undesirable_weight:g}; {self.describe_reference()}"
        )


class Reward(ObjectiveSection):
    """Reward modelling, for `objective: reward`, with the names and defaults of TRL's `RewardConfig`."""

    center_rewards_coefficient: Annotated[float, Field(gt=0, le=1000), values.AsNumber] | None = None
    """Weight of the squared mean of a pair's rewards in the loss, which keeps rewards near zero. TRL recommends
    0.01."""

    def describe(self) -> str:
        """Return what the loss has beside the difference of the rewards."""
        weight = self.center_rewards_coefficient
        return (
            "rewards that are not centered" if weight is None else f"rewards centered with the coefficient {weight:g}"
        )


OBJECTIVE_SECTIONS: Final[dict[str, type[ObjectiveSection]]] = {"dpo": Dpo, "kto": Kto, "reward": Reward}
"""The section of each objective that has settings."""


class Checkpoints(Section):
    """When training saves checkpoints, and which ones it keeps."""

    every_steps: values.Steps | Literal["auto"] | None = None
    """Optimizer steps between checkpoints. `auto`: the interval that loses the least time, from the measured duration
    of a save and `node_mtbf_hours`. Without it, about ten checkpoints per run."""
    keep: values.Count = Field(2, description="Number of newest checkpoints to keep.")
    keep_best: bool = False
    """Also keep the checkpoint with the lowest evaluation loss. Every saved step is then evaluated."""
    keep_every_steps: values.Steps | None = None
    """Also keep, permanently, the first checkpoint at or after every multiple of so many steps."""
    early_stopping: values.Count | None = None
    """End the training after so many evaluations in a row without a lower loss."""
    asynchronous: bool = False
    """Save to the cluster's node-local `scratch`, and copy to the run's folder while training continues. The last save,
    and the one before a stop, go to the run's folder directly."""

    def most(self, steps: int | None) -> int:
        """Return the largest number of checkpoints kept at once; ``steps`` is None if the length is not known yet."""
        for_good = steps // self.keep_every_steps if steps and self.keep_every_steps else 0
        saved = ceil(steps / self.every_steps) if steps and isinstance(self.every_steps, int) else inf
        return int(min(self.keep + self.keep_best + for_good, saved))


class Service(Section):
    """A program that serves the training script, such as a server of vLLM, on the `service_nodes`."""

    command: str = Field(
        description="Shell command that starts the service in the foreground, with the script's variables, and listens "
        "at `$SHARDMAKE_SERVICE_HOST` and `$SHARDMAKE_SERVICE_PORT`.",
        examples=["vllm serve $SHARDMAKE_BASE --host $SHARDMAKE_SERVICE_HOST --port $SHARDMAKE_SERVICE_PORT"],
    )
    health: values.HealthPath | None = Field(None, examples=["/health"])
    """Path that answers with status 200 over HTTP once the service is ready. Without it, its port must accept
    connections."""
    start_seconds: values.Seconds = Field(1800, validate_default=True)
    """Time limit of its start, after which the job fails."""


class Evaluation(Section):
    """The evaluate stage, which measures the base and the tuned model."""

    batch_tokens: values.Tokens = 16384
    """Tokens per forward pass: as many sequences of similar length as fit, and at least one; after CUDA's out-of-memory
    error, half of them."""
    prompts: list[str] = Field(default_factory=list)
    """Prompts for both models. The report and the model card show the answers."""
    max_new_tokens: values.Tokens = Field(64, description="Maximum length of a generated answer, in tokens.")
    backend: Literal["auto"] | EvaluationBackend = "auto"
    """Placement of the model. `whole`: a copy on every GPU. `zero3`: partitioned over all GPUs, with `-offload` in host
    memory, with `-nvme` on `nvme_path`. `device-map`: one process, layer by layer over GPUs, host memory and files.
    `auto`: the first of these that fits."""
    processes: values.Ranks | None = None
    """Ranks that share the sequences. Without it, one per GPU of a node, or one on CPUs."""
    lm_eval: list[str] = Field(default_factory=list)
    """Tasks of the `lm_eval` package for both models, such as `[piqa]`."""
    lm_eval_path: values.PathText | None = Field(None, description="Folder with your own `lm_eval` task files.")
    lm_eval_limit: values.Steps | None = Field(None, description="Examples per `lm_eval` task. Without it, all.")
    losses: bool = False
    """Also write `evaluation.csv`: for each held-out example its sequence in `data/eval`, its first token there, its
    tokens with loss, and under both models its mean loss and whether greedy decoding answers it word for word."""


class Push(Section):
    """The destination of the final model."""

    to: str | list[str] = Field(examples=["file:published/{run}", "hub:our-lab/docs-chat", "s3://our-bucket/docs-chat"])
    """`file:FOLDER`, `hub:ORG/NAME`, a URL for fsspec (`s3://BUCKET/PREFIX`), or a list of these, of this run alone.
    `{run}` stands for its name."""
    private: bool = Field(True, description="Create a hub repository as private.")
    samples: bool = False
    """Show answers to the first evaluation examples, with these, in the pushed model card, beside those to
    `evaluation.prompts`."""
    revision: str | None = Field(None, description="Branch of the hub repository. Without it, the main branch.")
    pull_request: bool = Field(False, description="Open a pull request on the hub instead of committing to the branch.")

    @property
    def destinations(self) -> list[str]:
        """Return `to` as a list."""
        return [self.to] if isinstance(self.to, str) else self.to

    @field_validator("to")
    @classmethod
    def _check_destinations(cls, to: str | list[str]) -> str | list[str]:
        return values.check_destination(to) if isinstance(to, str) else [values.check_destination(one) for one in to]


class Notify(Section):
    """Notification that a run is done, was stopped, or needs a person."""

    command: str = Field(examples=['echo "$SHARDMAKE_MESSAGE" | mail -s "$SHARDMAKE_RUN $SHARDMAKE_EVENT" ada@lab.org'])
    """Shell command, run when the report is written (`done`), when the training was stopped on request (`stopped`),
    when Slurm keeps its job pending until a person acts (`held`), and when a stage fails (`failed`); never when an
    attempt is resumed. It has `SHARDMAKE_RUN`, `SHARDMAKE_EVENT`, `SHARDMAKE_STAGE`, `SHARDMAKE_MESSAGE`, and 60
    seconds."""


class Profile(Section):
    """Optimizer steps that torch's profiler records on rank 0."""

    first_step: values.Steps = Field(5, description="First of them; those before it warm up.")
    steps: Annotated[int, Field(ge=1, le=20)] = Field(2, description="Number of steps.")


class Run(Section):
    """One fine-tuning run: the model, the data, the training and the destination."""

    model: values.PathText
    """Base model: a hub id (`org/name`), a folder with config.json and weights, its URL (`s3://`, `gs://`, any protocol
    of fsspec), which is copied, or `run:NAME`, the model of another run, which is trained first."""
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    resume_from: values.PathText | None = None
    """Checkpoint of Trainer, Accelerate, DeepSpeed, FSDP or another run, with whose weights training of `model` starts.
    Optimizer, schedule and step begin anew."""
    trust_remote_code: bool = Field(False, description="Run model code that comes with the model. Read it first.")
    data: Data = Field(description="The examples.")
    sequence_length: values.Tokens
    """Tokens per training sequence. Longer conversations are truncated, longer texts are split."""
    packing: bool = True
    """Pack several examples into one sequence, without attention between them; refused for models that do not keep them
    apart (docs/reference/model-types.md). Without it, `false` for padded examples (`objective: dpo`, `kto`, `reward`)
    and a `data.order` of their own."""
    global_batch_size: values.Sequences
    """Sequences per optimizer step over all ranks, on any number of GPUs."""
    micro_batch_size: values.Sequences | Literal["auto"] = "auto"
    """Sequences per rank and forward pass. Gradient accumulation fills the global batch."""
    max_steps: values.Steps | None = None
    """Optimizer steps. Set this or `epochs`; a `script` may take neither."""
    epochs: values.Epochs | None = None
    """Passes over the data. What fills no batch is left out, other examples in turn."""
    learning_rate: values.LearningRate | None = None
    """Peak learning rate. Only a `script` may be without it."""
    learning_rates: dict[str, values.LearningRate] = Field(
        default_factory=dict,
        description="Peak learning rates of some weights, by patterns as in `freeze`; the last that names a weight "
        "counts, and the schedule scales all. With `method: lora` they name its matrices: `{'*.lora_B': 1.6e-3}` is "
        "LoRA+.",
        examples=[{"model.embed_tokens": 1e-5, "lm_head": 1e-5}],
    )
    scheduler: Schedule = Field("cosine", description="transformers' schedule of the learning rate.")
    scheduler_arguments: dict[str, values.SchedulerNumber | str] = Field(default_factory=dict)
    """Arguments of the schedule: `min_lr_rate: 0.1` of `cosine_with_min_lr`, `num_decay_steps: 200` of
    `warmup_stable_decay`, `power: 2` of `polynomial`, ..."""
    warmup_ratio: values.Fraction = Field(0.05, description="Fraction of the steps with a rising learning rate.")
    weight_decay: values.WeightDecay = Field(0.0, description="Decoupled weight decay.")
    max_grad_norm: values.GradientNorm = 1.0
    """Maximum norm of the gradients; larger ones are clipped."""
    optimizer: Optimizer = Field(DEFAULT_OPTIMIZER, description=f"Optimizer. {describe_optimizers()}")
    precision: Precision | Literal["auto"] = "auto"
    """`auto`: bf16 on Ampere and later, fp16 before, fp32 on CPU."""
    gradient_dtype: GradientDtype = "auto"
    """Data type in which gradients are accumulated and reduced. `auto`: fp32 if a step has several passes, else that of
    `precision`. DDP always takes fp32, ZeRO-1 that of `precision`."""
    tf32: bool = False
    """Compute matrix products of `precision: fp32` in TF32 (Ampere or later): 10 bits of mantissa, several times the
    speed."""
    attention: Attention | Literal["auto"] = "auto"
    """Attention kernel. `varlen`: PyTorch's FlashAttention of variable lengths. `flash`: the package flash-attn 2.
    `auto`: the first that GPU, precision, packages and the model's class support."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass. `auto`: only if memory requires it."""
    activation_offload: bool = False
    """Hold the inputs of layers, which gradient checkpointing keeps, in pinned host memory
    (docs/how-to/parallelism.md). For the Llama, Mistral, Qwen and Gemma families."""
    loss: Loss = "plain"
    """Cross entropy. `fused`: Liger's fused linear cross entropy (install it). `chunked`: torch's, which holds the
    logits of some tokens at a time; for the Llama, Mistral, Qwen and Gemma families."""
    objective: Objective = Field(
        "sft",
        description="`sft`: supervised fine-tuning; `dpo`, `kto`: preferences; `reward`: a reward model "
        "(docs/how-to/preferences.md).",
    )
    dpo: Dpo | None = Field(None, description="Settings of `objective: dpo`.")
    kto: Kto | None = Field(None, description="Settings of `objective: kto`.")
    reward: Reward | None = Field(None, description="Settings of `objective: reward`.")
    method: Method = Field(DEFAULT_METHOD, description=describe_methods())
    lora: Lora = Field(Lora(), description="Settings of the adapters.")
    freeze: list[values.PathText] = Field(default_factory=list, examples=[["model.embed_tokens", "model.layers.[0-7]"]])
    """Weights that full fine-tuning leaves as they are: names of parameters, or of modules with all theirs, with the
    wildcards of a shell; after `!`, exceptions. `[model.embed_tokens, *.mlp]`, or `[*, '!lm_head']` to train the head
    alone."""
    strategy: Strategy | Literal["auto"] = "auto"
    """Sharding of the training states. `auto`: the fastest strategy that fits."""
    tensor_parallel: values.Ranks = 1
    """Ranks of a node that share each layer's matrices (docs/how-to/parallelism.md). It needs `strategy: zero1`,
    `zero2` or `auto`, or `fsdp` and your own script."""
    sequence_parallel: values.Ranks = 1
    """Ranks of a node that share each sequence (Ulysses, docs/how-to/parallelism.md). It needs a strategy of ZeRO or
    FSDP other than `zero3-hpz`, `zero3-nvme` and `fsdp-hybrid`, or `auto`."""
    expert_parallel: values.Ranks = 1
    """Ranks of a node that share the experts of each layer; each has its own data (docs/how-to/parallelism.md). It
    needs `strategy: fsdp`, or `auto`."""
    nodes: values.Nodes | None = None
    """Nodes for training. Without it, the fewest on which the model fits, or more if these cost at least a tenth less
    GPU-time."""
    script: values.PathText | None = None
    """Your own training program for `accelerate launch`: a file, or a module as in `-m trl.scripts.sft`
    (docs/how-to/user-script.md)."""
    script_args: list[str] = Field(default_factory=list)
    """Arguments of the script. `$SHARDMAKE_...` in them is replaced (docs/how-to/user-script.md)."""
    service_nodes: values.Nodes | None = None
    """Nodes beside `nodes` that run `service` and no ranks. They count towards `max_nodes`."""
    service: Service | None = None
    """A program on these nodes that serves the script (docs/how-to/user-script.md)."""
    deepspeed_config: values.PathText | None = None
    """Your own DeepSpeed file (docs/how-to/own-files.md). Each key is taken and reported, or refused."""
    accelerate_config: values.PathText | None = None
    """Your own Accelerate file, by the same rule."""
    torch_compile: bool = Field(False, description="Compile the model with torch.compile, layer by layer.")
    non_finite: Literal["stop", "rewind"] = "stop"
    """At a loss or gradient norm that is not finite: stop, or resume from the newest checkpoint. `rewind` also stops if
    it occurs at the same step again."""
    seed: values.Seed = Field(42, description="Seed of the data order, the adapters' initialization and dropout.")
    checkpoints: Checkpoints = Field(Checkpoints(), description="Checkpoints during training.")
    eval_every_steps: values.Steps | Literal["auto", "never"] = "auto"
    """Optimizer steps between evaluations. `auto`: about ten evaluations per run; none with `sequence_parallel`."""
    report_to: list[Tracker] = Field(default_factory=list)
    """Trackers of loss, learning rate and speed. tensorboard, wandb, mlflow and trackio write to `train/` in the run's
    folder unless the environment names a server (`MLFLOW_TRACKING_URI`, ...). tensorboard, wandb and trackio have one
    chart for all attempts, all others one for each."""
    profile: Profile | None = None
    """Record steps with torch's profiler, into `train/profile/`; the report links the trace, which chrome://tracing and
    Perfetto open."""
    memory_snapshot: bool = False
    """Record every allocation on rank 0's GPU until the end of the second step, into `train/profile/`, for
    pytorch.org/memory_viz."""
    final_checkpoint: Literal["last", "best"] = "last"
    """Checkpoint that becomes the model. `best`: the one with the lowest evaluation loss; it needs
    `checkpoints.keep_best`."""
    dtype: Literal["keep", "bf16", "fp16", "fp32"] = "bf16"
    """Data type of the final model's weights. `keep`: that of the training's master weights."""
    max_shard_size: values.FileSize = "5GB"
    """Maximum size of one file of the model, from 1KB to 1000TB."""
    evaluation: Evaluation = Field(Evaluation(), description="Settings of the evaluate stage.")
    push: Push | None = None
    """Destination of the model. Without it, it stays in the run's folder."""
    notify: Notify | None = None
    """A command that notifies you."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Leave out sections that are null, which removes inherited ones, and pack unless the examples are padded."""
        if not isinstance(values, Mapping):
            return values
        sections = [key for key, field in cls.model_fields.items() if isinstance(field.default, Section)]
        values = {key: value for key, value in values.items() if value is not None or key not in sections}
        if "packing" in values:
            return values
        spec, data = OBJECTIVES.get(values.get("objective", "sft")), values.get("data")
        order = data.get("order") if isinstance(data, Mapping) else getattr(data, "order", None)
        pads = (spec is not None and spec.trl is not None) or order not in ("shuffled", None)
        return {**values, "packing": False} if pads else values

    def _problems(self) -> Iterator[str]:
        if (self.max_steps is None) == (self.epochs is None) and (self.script is None or self.epochs):
            yield "set exactly one of max_steps and epochs"
        if self.learning_rate is None and self.script is None:
            yield "set learning_rate, the peak learning rate"
        formats = OBJECTIVES[self.objective].data_formats
        for format in (self.data.only(one).format for one in self.data.sources):
            if format not in ("auto", RAW, *formats):
                known = " or ".join(formats)
                yield f"objective {self.objective!r} cannot learn from data.format {format!r}. Use {known}"
        order = self.data.order
        if order == "given" and len(self.data.sources) > 1:
            yield "data.order 'given' is not defined for several sources. Use shuffled or length"
        if order != "shuffled" and self.script is not None:
            yield f"data.order {order!r} has no effect with script, which reads its own data. Remove data.order"
        if order != "shuffled" and self.packing:
            yield (
                f"data.order {order!r} has no effect with packing, which fills each sequence with examples that fit. "
                "Set packing: false"
            )
        if self.data.is_raw and self.script is None:
            yield "data.format 'raw' is for a script, which reads the data itself. Set script, or take another format"
        if self.script is None and self.script_args:
            yield "script_args need a script. Set script, or remove script_args"
        service = SERVICE_VARIABLES if self.service else ()
        unset = [name for name, key in VARIABLE_KEYS.items() if getattr(self, key) is None]
        yield from variable_problems("script_args", self.script_args, (*SCRIPT_VARIABLES, *service), unset)
        if self.script is not None and self.checkpoints.asynchronous:
            yield "checkpoints.asynchronous cannot be combined with script, which saves its own checkpoints. Remove it"

    @property
    def method_spec(self) -> MethodSpec:
        """Return the row of the run's method."""
        return METHODS[self.method]

    @property
    def objective_settings(self) -> ObjectiveSection | None:
        """Return the section of the run's objective, with the defaults if it is left out; None if it has none."""
        kind = OBJECTIVE_SECTIONS.get(self.objective)
        return None if kind is None else getattr(self, self.objective) or kind()

    @property
    def keeps_order(self) -> bool:
        """Return if every epoch has the training examples in the same order."""
        return self.data.order != "shuffled" or OBJECTIVES[self.objective].compares_batch

    @property
    def reference(self) -> str | None:
        """Return how the log-probabilities of the reference model are obtained; None without one."""
        settings = self.objective_settings
        return settings.reference if isinstance(settings, Referenced) else None


class Container(Section):
    """The container in which the jobs of every stage and their checks run."""

    image: values.PathText
    """For Apptainer a file, the folder of a sandbox, or a reference such as `docker://NAME`; for pyxis a squashfs file
    with an absolute path, or `[REGISTRY#]NAME[:TAG]`."""
    kind: Literal["apptainer", "pyxis"] = "apptainer"
    """`apptainer exec`, or srun with the plugin pyxis."""
    binds: list[Annotated[values.PathText, AfterValidator(values.check_bind)]] = Field(default_factory=list)
    """Further folders of the node, `SOURCE[:TARGET[:ro]]`. The checkout, the runs, the files that a run names, the
    caches, `scratch` and `nvme_path` are bound without being listed."""
    python: values.PathText = "python3"
    """Python in the image, by name or path, with Shardmake's libraries in the login node's versions."""

    def _problems(self) -> Iterator[str]:
        if self.kind == "pyxis" and re.fullmatch(r"[^./].*\.(sqsh|squashfs|sif)", self.image):
            yield f"image: pyxis takes {self.image!r} for the name of an image in a registry. Write an absolute path"


class Slurm(Section):
    """Slurm parameters of the jobs. Nodes, memory and CPUs follow from the plan."""

    partition: str | None = Field(None, description="Partition. Without it, Slurm's default.")
    account: str | None = Field(None, description="Account.")
    qos: str | None = Field(None, description="Quality of service.")
    constraint: str | None = Field(None, description="Required node features.")
    cpu_partition: str | None = None
    """Partition of the jobs that need no GPU, data and consolidate. Without it, `partition`. With it, `constraint` and
    the `reservation` in `extra` hold for the other jobs only."""
    cpu_account: str | None = Field(None, description="Account of these jobs. Without it, `account`.")
    cpu_qos: str | None = Field(None, description="Quality of service of these jobs. Without it, `qos`.")
    cpu_constraint: str | None = Field(None, description="Required node features of these jobs.")
    time_limit: values.TimeLimit = "24:00:00"
    """Time limit of one training job, `[D-]HH:MM:SS`, at most a year."""
    stage_time_limit: values.TimeLimit | None = None
    """Time limit of data, consolidate and evaluate. Without it, `time_limit`."""
    driver: Literal["login", "job"] = "login"
    """Place of Snakemake and the drivers: the login node, or a small job, for sites that forbid long processes there.
    With `job`, `shardmake submit` starts it, and Snakemake on a login node refuses stages that need jobs."""
    driver_time_limit: values.TimeLimit | None = None
    """Time limit of the driver job, which submits itself again before. Without it, `time_limit`. A stage other than
    training must fit into it, with its time in the queue."""
    driver_memory_gib: values.HostMemory = Field(4, description="Memory of the driver job, GiB.")
    gpu_request: Literal["gres", "gpus-per-node", "gpus", "none"] = "gres"
    """Option with which this cluster requests GPUs."""
    memory: Literal["per_node", "per_cpu", "none"] = "per_node"
    """Request of host RAM: `--mem`; `--mem-per-cpu`, for sites that take no other; none, for sites that give whole
    nodes."""
    gpu_type: values.GpuType | None = None
    """GPU type in the request, as in `gres=gpu:a100:4`; also a MIG slice, such as `1g.10gb`."""
    signal_seconds: values.Count = 120
    """Seconds before the time limit at which a job gets the signal to save and stop; at least two measured saves and a
    minute, up to a quarter of the limit."""
    restart_in_place: bool = False
    """After a rank failed, start the ranks again inside the running job, as a new attempt, instead of submitting a new
    job. Failures that need other nodes, more memory or more time still lead to a new job. The next ranks import their
    libraries while the training runs: 0.75 GiB of host RAM for each rank of a node, and 0.4 GiB."""
    spare_nodes: values.Nodes | None = None
    """Nodes of the training's job beyond those of its ranks and `max_nodes`. With `restart_in_place`, the ranks start
    again on them instead of a node that failed or is excluded."""
    wckey: str | None = Field(None, description="Workload characterization key.")
    exclude: str | None = Field(None, description="Nodes to exclude, in Slurm's notation.")
    setup: list[values.ShellLine] = Field(default_factory=list)
    """Shell commands to run first in each job, such as `module load cuda`."""
    srun_extra: list[str] = Field(default_factory=list)
    """Further options of the training's srun, such as `--mpi=none`."""
    container: Container | None = None
    """Run the jobs in a container, not in the login node's environment."""
    extra: dict[str, str | values.SlurmNumber | bool] = Field(default_factory=dict)
    """Further #SBATCH parameters, by their names; false leaves one out, such as `comment`. Those that size a job
    (such as `mem` and `gres`) hold for the training only, `exclusive` for training and evaluate. With `requeue: true`,
    Slurm restarts a job that it preempted or whose node failed; a training resumes from its newest checkpoint."""

    @field_validator("srun_extra")
    @classmethod
    def _check_step(cls, words: list[str]) -> list[str]:
        for before, word in zip(["", *words], words, strict=False):
            if reason := why_refused_of_step(word, before):
                raise ValueError(f"{word!r} {reason}")
        return words

    @field_validator("extra")
    @classmethod
    def _check_extra(cls, extra: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        found: dict[str, str | int | bool] = {}
        for name, value in extra.items():
            reason = why_refused(name)
            if reason or (flag := find_option(name).flag) in found:
                raise ValueError(f"{name!r} {reason or 'is given twice. Remove one of them'}")
            found[flag] = value if isinstance(value, int) else values.check_text(value)
        return found

    @property
    def time_limit_minutes(self) -> int:
        """Return `time_limit` in minutes, rounded up."""
        return values.minutes(self.time_limit)


class Cluster(Section):
    """One machine or cluster: its nodes, its network and the way to start jobs."""

    executor: Literal["local", "slurm"] = Field(description="Train on this machine, or in one Slurm job.")
    accelerator: str = "cpu"
    """GPU model as in `shardmake estimate --list-gpus` (a100-80gb, h100, ...), or `cpu`."""
    gpu_memory_gib: values.GpuMemory | None = None
    """Memory of one GPU, GiB. Without it, that of the GPU model."""
    max_nodes: values.Nodes = Field(1, description="Maximum number of nodes for one run.")
    processes_per_node: values.Ranks = Field(description="Ranks per node: on a GPU node, its number of GPUs.")
    cpus_per_node: values.Count = Field(description="Cores that a job can use on a node.")
    memory_gib_per_node: values.HostMemory = Field(description="Host RAM that a job can use on a node, GiB.")
    nvme_path: values.PathText | None = None
    """Folder on node-local NVMe for offload. Its variables are expanded before the job."""
    nvme_gib_per_node: values.DiskSpace | None = Field(None, description="Free NVMe space per node, GiB.")
    intra_node_gbps: values.Bandwidth | None = None
    """Bandwidth between two GPUs of a node, GB/s each way. Without it, that of the GPU model."""
    inter_node_gbps: values.Bandwidth = 12.5
    """Bandwidth between two nodes, GB/s each way (100 Gbit/s is 12.5)."""
    network_interface: str | None = None
    """Such as `ib0`. Without it, that of the default route."""
    network_check_seconds: values.Seconds = 300
    """Time limit of the check before training, with the ranks' imports, which take minutes from a network file system
    on 64 or more nodes."""
    internet_on_compute_nodes: bool = Field(False, description="Jobs on compute nodes can reach the internet.")
    shared: bool = False
    """Share the runs in a lab: the folder's group can read and write every file."""
    hang_seconds: values.Seconds = 600
    """Seconds without progress, or five median steps if longer, after which a step counts as hung; six times as long
    for loading, saves and evaluations. Stacks are kept and training resumes."""
    node_mtbf_hours: values.Hours = 3700
    """Hours between failures of one node, with preemptions, for `checkpoints.every_steps: auto`. The default is 6.5
    failures per 1000 node-days (arXiv 2410.21680)."""
    trainings_per_user: values.Count = 2
    """Fair use: trainings of one user in Slurm's queue, over all runs and checkouts. Further ones wait."""
    login_memory_gib: values.HostMemory = 2
    """Memory of the login node for plans and renderings of one user at once, GiB. Further ones wait."""
    cache: values.PathText | None = None
    """Folder of the hub's cache, which a lab can share. Without it, `HF_HOME`."""
    scratch: values.PathInJob = "/tmp"
    """Node-local folder for caches and, if saving is asynchronous, for the newest checkpoint. Below `/dev/shm` it
    counts as host RAM. A job expands its variables on its nodes, as in `/local/$SLURM_JOB_ID` or `$TMPDIR`. Without the
    folder, a training is refused, and login nodes and other stages compile kernels in the temporary folder."""
    purge_days: values.Count | None = None
    """Days after which the site removes unchanged files of the folder of runs. `train` and `shardmake clean --config`
    warn a week before."""
    env: dict[values.Variable, values.LiteralText | values.SlurmNumber] = Field(default_factory=dict)
    """Environment variables of the ranks, such as `NCCL_IB_HCA`, which replace inherited ones and Shardmake's. `$NAME`
    in a value is refused. For secrets, use your shell: jobs inherit its variables."""
    environment: values.PathText | None = None
    """Python environment of the jobs (the folder above `bin/python`), with the login node's versions, if compute nodes
    have another one."""
    slurm: Slurm = Field(Slurm(), description="Slurm parameters, for `executor: slurm`.")

    @field_validator("accelerator")
    @classmethod
    def _check_accelerator(cls, accelerator: str) -> str:
        return find_accelerator(accelerator).name

    def _problems(self) -> Iterator[str]:
        if self.executor == "local" and self.slurm != Slurm():
            yield (
                "slurm: these parameters have no effect with `executor: local`. Remove the section, or write "
                "`executor: slurm`"
            )
        yield from clashes(self.slurm.extra, self.slurm.memory, self.slurm.gpu_request)
        if self.slurm.spare_nodes and not self.slurm.restart_in_place:
            yield "slurm.spare_nodes: they need slurm.restart_in_place: true. Write it, or remove this key"
        if self.slurm.spare_nodes and self.slurm.extra.get("requeue"):
            yield (
                "slurm.spare_nodes: it cannot be combined with slurm.extra.requeue, with which Slurm itself starts the "
                "job again after a node failed. Remove one of them"
            )
        if self.environment and (self.executor == "local" or self.slurm.container):
            other = "slurm.container, whose image has one" if self.slurm.container else "`executor: local`"
            yield f"environment: it has no effect with {other}. Remove the key"
        if self.environment and not self.environment.startswith("/"):
            yield f"environment: {self.environment!r} is not an absolute path. Write one"
        if self.executor == "local" and (unset := unset_variable(self.scratch)):
            yield f"scratch: {self.scratch!r}: the environment variable {unset} is not set. Set it, or write the path"
        if self.slurm.container and not self.scratch_above_variables:
            yield f"scratch: {self.scratch!r} cannot be bound into slurm.container. Begin it with the path of a folder"
        if self.slurm.container and "PYTHONPATH" in self.env:
            yield (
                "env: PYTHONPATH cannot be combined with slurm.container, which sets it so that the image's Python "
                "finds Shardmake. Install the packages in the image"
            )

    @property
    def is_cpu(self) -> bool:
        """Return whether the ranks run without a GPU."""
        return self.accelerator == "cpu"

    @property
    def profile(self) -> str:
        """Return the name of Snakemake's profile for this cluster."""
        return "slurm" if self.executor == "slurm" else "profiles/local"

    @property
    def variables(self) -> dict[str, str]:
        """Return `env` as text."""
        return {name: str(value) for name, value in self.env.items()}

    @property
    def scratch_above_variables(self) -> str:
        """Return `scratch`, up to the folder above its first variable; empty if it begins with one."""
        before, variable, _ = self.scratch.partition("$")
        return before.rpartition("/")[0] if variable else before

    @property
    def scratch_in_memory(self) -> bool:
        """Return whether `scratch` is in host RAM, judged by its path with the variables that are set here."""
        return PurePath(os.path.expandvars(self.scratch)).is_relative_to("/dev/shm")


class Config(Section):
    """`config/config.yaml`: a cluster and the runs."""

    cluster: values.PathText = Field(description="The cluster file, relative to the folder in which Snakemake runs.")
    runs: dict[str, Run] = Field(description="The runs by name. A run's folder is `runs/NAME`.")
    sweeps: SkipJsonSchema[dict[str, list[str]]] = Field(default_factory=dict)
    """The runs of each sweep, which the resolution of the file adds."""

    @field_validator("runs", mode="before")
    @classmethod
    def _name_destinations(cls, runs: Any) -> Any:
        return {name: values.with_run_name(name, run) for name, run in runs.items()} if isinstance(runs, dict) else runs

    @field_validator("runs")
    @classmethod
    def _check_names(cls, runs: dict[str, Run]) -> dict[str, Run]:
        if not runs:
            raise ValueError("add at least one run")
        for name in runs:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                raise ValueError(
                    f"{name!r} cannot be the name of a run's folder. Use letters, digits, '.', '_' and '-'"
                )
        return runs

    @field_validator("sweeps")
    @classmethod
    def _check_sweeps(cls, sweeps: dict[str, list[str]], info: ValidationInfo) -> dict[str, list[str]]:
        unknown = [run for runs in sweeps.values() for run in runs if run not in info.data.get("runs", {})]
        if "runs" in info.data and unknown:
            raise ValueError(f"{unknown[0]!r} is not a run. Write `sweep` in a run in place of this key")
        return sweeps
