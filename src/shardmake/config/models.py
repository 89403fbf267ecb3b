"""What a user may write: the models of ``config/config.yaml`` and of the cluster files.

The JSON schemas and ``config/README.md`` are generated from these models (`python -m tools.config_reference`), so every
field carries a description. Values are checked here, at once, before anything is queued; the checks that need the
model or the data come with the stages.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from shardmake.config.objectives import OBJECTIVES
from shardmake.config.strategies import PARTITIONED_INFERENCE, STRATEGY_SPECS

if TYPE_CHECKING:
    Strategy = str
    EvaluationBackend = str
    Objective = str
else:
    Strategy = Literal[tuple(STRATEGY_SPECS)]
    EvaluationBackend = Literal["whole", "device-map", *PARTITIONED_INFERENCE]
    Objective = Literal[tuple(OBJECTIVES)]
STRATEGIES: tuple[Strategy, ...] = tuple(STRATEGY_SPECS)
Precision = Literal["bf16", "fp16", "fp32"]
Attention = Literal["flash", "sdpa", "eager"]
Optimizer = Literal["adamw", "adamw8bit", "adafactor", "sgd"]
Method = Literal["full", "lora", "qlora"]
Loss = Literal["plain", "fused"]


def _number(value: Any) -> Any:
    """YAML 1.1 reads ``5e-4`` as text; the intention is clear, so take it as the number it spells."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", value):
        return float(value)
    return value


AsNumber = BeforeValidator(_number)
PositiveNumber = Annotated[float, Field(gt=0), AsNumber]
PositiveInt = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """A part of a configuration file: unknown keys and wrong types are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Data(Section):
    """Where the examples come from and how they are read."""

    train: str = Field(
        description="JSONL or Parquet file, a folder of such files, or a hub data set: `org/name` (its split `train`) "
        "or `org/name:split`."
    )
    eval: str | None = Field(
        None,
        description="Evaluation examples, as for `train` (of a hub data set, its `validation` or `test` split). "
        "Without it, a part of `train` is set aside.",
    )
    eval_fraction: Annotated[float, Field(gt=0, lt=0.5), AsNumber] = Field(
        0.02, description="Part of `train` set aside for evaluation where `eval` is not given."
    )
    format: Literal["auto", "chat", "prompt-completion", "text"] = Field(
        "auto",
        description="`chat`: a `messages` column; `prompt-completion`: `prompt` and `completion`; `text`: a `text` "
        "column; `auto`: by the columns found.",
    )
    loss_on: Literal["auto", "assistant", "all"] = Field(
        "auto",
        description="Tokens that carry loss: the assistant's (or completion's) words only, or all. `auto`: "
        "`assistant` for chat and prompt-completion, `all` for text.",
    )
    subset: str | None = Field(None, description="Subset (configuration) of a hub data set that has several.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub data set.")


class Lora(Section):
    """Low-rank adapters, for `method: lora` and `method: qlora`."""

    rank: PositiveInt = Field(16, description="Rank of the adapters.")
    alpha: PositiveInt = Field(32, description="Scale: the update is multiplied by alpha / rank.")
    dropout: Annotated[float, Field(ge=0, lt=1), AsNumber] = Field(0.0, description="Dropout on the adapters' input.")
    targets: list[str] | Literal["all-linear"] = Field(
        "all-linear", description="Names of the layers that get adapters, such as `[q_proj, v_proj]`, or `all-linear`."
    )


class Checkpoints(Section):
    """How often training saves, and what it keeps."""

    every_steps: PositiveInt | Literal["auto"] | None = Field(
        None,
        description="Optimizer steps between checkpoints; `auto`: what loses least time, from the measured time of a "
        "save and the cluster's `node_mtbf_hours`. Without it, about ten over the run.",
    )
    keep: Annotated[int, Field(ge=1)] = Field(2, description="Newest checkpoints that are kept.")
    keep_best: bool = Field(
        False,
        description="Keep the checkpoint with the lowest evaluation loss besides; every saved step is evaluated then.",
    )
    keep_every_steps: PositiveInt | None = Field(
        None, description="Keep the first checkpoint at or after every multiple of these steps besides, for good."
    )
    asynchronous: bool = Field(
        False,
        description="Training waits only until a checkpoint lies in the cluster's node-local `scratch`, and goes on "
        "while it is copied to the run's folder; the last save and the one before a stop go there at once.",
    )

    def most(self, steps: int | None) -> int:
        """Most checkpoints that are kept at once, of a run of ``steps`` steps; None where that is not known yet."""
        for_good = steps // self.keep_every_steps if steps and self.keep_every_steps else 0
        return self.keep + self.keep_best + for_good


class Evaluation(Section):
    """What the evaluate stage does with the base and the tuned model."""

    batch_size: PositiveInt = Field(8, description="Sequences per forward pass.")
    prompts: list[str] = Field(
        default_factory=list, description="Questions put to both models; the answers stand in the report and the card."
    )
    max_new_tokens: PositiveInt = Field(64, description="Length of a generated answer, in tokens.")
    backend: Literal["auto"] | EvaluationBackend = Field(
        "auto",
        description="How a model is spread. `whole`: on every GPU; `zero3`: partitioned over all GPUs, with `-offload` "
        "in host memory, with `-nvme` on the cluster's `nvme_path`; `device-map`: layer by layer over GPUs, host "
        "memory and, behind those, the model's files, in one process. `auto`: the first of these that the model fits.",
    )
    processes: PositiveInt | None = Field(
        None, description="Ranks that share the sequences; without it, one for each GPU of a node, or one on CPUs."
    )
    lm_eval: list[str] = Field(
        default_factory=list, description="Tasks of the `lm_eval` package to measure both models on, such as `[piqa]`."
    )
    lm_eval_path: str | None = Field(None, description="Folder with `lm_eval` task files of your own.")
    lm_eval_limit: PositiveInt | None = Field(None, description="Examples per `lm_eval` task; all without it.")


class Push(Section):
    """Where the final model goes."""

    to: str | list[str] = Field(
        description="`file:FOLDER`, `hub:ORG/NAME`, a URL that fsspec knows (`s3://BUCKET/PREFIX`), or a list of them.",
        examples=["file:published/docs-chat", "hub:our-lab/docs-chat", "s3://our-bucket/docs-chat"],
    )
    private: bool = Field(True, description="Create a hub repository as private.")
    revision: str | None = Field(None, description="Branch of the hub repository; without it, its main branch.")
    pull_request: bool = Field(False, description="Open a pull request on the hub instead of committing to the branch.")

    @property
    def destinations(self) -> list[str]:
        """`to`, always as a list."""
        return [self.to] if isinstance(self.to, str) else self.to

    @field_validator("to")
    @classmethod
    def _check_destinations(cls, to: str | list[str]) -> str | list[str]:
        for destination in [to] if isinstance(to, str) else to:
            kind, _, rest = destination.partition(":")
            if not rest or (kind not in ("file", "hub") and not re.fullmatch(r"//[^/].*", rest)):
                raise ValueError(
                    f"{destination!r} is no destination; write file:FOLDER, hub:ORG/NAME or s3://BUCKET/PREFIX"
                )
            if kind == "hub" and not re.fullmatch(r"[\w.-]+/[\w.-]+", rest):
                raise ValueError(f"{destination!r} is no hub repository; write hub:ORG/NAME")
        return to


class Run(Section):
    """One fine-tune: a model, data, how to train, where to push."""

    model: str = Field(description="Base model: a hub id (`org/name`) or a folder with config.json and weights.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    trust_remote_code: bool = Field(False, description="Run model code that comes with the model. Read it first.")
    data: Data = Field(description="The examples.")
    sequence_length: PositiveInt = Field(
        description="Tokens per training sequence. Longer conversations are cut off, longer texts are split."
    )
    packing: bool = Field(True, description="Put several examples into one sequence; they do not see each other.")
    global_batch_size: PositiveInt = Field(
        description="Sequences per optimizer step over all ranks; kept whatever the number of GPUs."
    )
    micro_batch_size: PositiveInt | Literal["auto"] = Field(
        "auto", description="Sequences per rank and forward pass. The rest of the global batch is accumulated."
    )
    max_steps: PositiveInt | None = Field(None, description="Optimizer steps. Give this or `epochs`.")
    epochs: PositiveNumber | None = Field(None, description="Passes over the data.")
    learning_rate: PositiveNumber = Field(description="Peak learning rate.")
    scheduler: Literal["cosine", "linear", "constant", "constant_with_warmup"] = Field(
        "cosine", description="Course of the learning rate after the warm-up."
    )
    warmup_ratio: Annotated[float, Field(ge=0, le=1), AsNumber] = Field(
        0.05, description="Part of the steps spent warming up."
    )
    weight_decay: Annotated[float, Field(ge=0), AsNumber] = Field(0.0, description="Decoupled weight decay.")
    max_grad_norm: PositiveNumber = Field(1.0, description="Gradients are clipped to this norm.")
    optimizer: Optimizer = Field(
        "adamw",
        description="Optimizer; `adamw8bit` needs bitsandbytes and a GPU; `adafactor` is not for FSDP2.",
    )
    precision: Precision | Literal["auto"] = Field(
        "auto", description="`auto`: bf16 on Ampere and later, fp16 before, fp32 on CPU."
    )
    attention: Attention | Literal["auto"] = Field(
        "auto", description="Attention kernel; `auto`: flash where the GPU and the package have it, else sdpa."
    )
    gradient_checkpointing: bool | Literal["auto"] = Field(
        "auto", description="Recompute activations in the backward pass; `auto`: only where memory asks for it."
    )
    loss: Loss = Field("plain", description="`fused`: Liger's fused linear cross entropy, where it is installed.")
    objective: Objective = Field("sft", description="What training optimizes; `sft`: supervised fine-tuning.")
    method: Method = Field("full", description="Train all weights, low-rank adapters, or adapters on a 4-bit base.")
    lora: Lora = Field(Lora(), description="Settings of the adapters.")
    strategy: Strategy | Literal["auto"] = Field(
        "auto", description="How states are sharded; `auto`: the fastest that fits."
    )
    tensor_parallel: PositiveInt = Field(
        1,
        description="Ranks that share each layer's matrices, within a node (docs/how-to/tensor-parallel.md); with "
        "`strategy: zero1` or `zero2`, or `fsdp` and a script of your own.",
    )
    nodes: PositiveInt | None = Field(None, description="Nodes for training; without it, as few as the model fits on.")
    fsdp_version: Literal[1, 2] = Field(2, description="Which FSDP runs the `fsdp` strategies.")
    engine: Literal["trainer", "loop"] = Field(
        "trainer",
        description="What trains: Hugging Face's Trainer, or a plain loop over Accelerate; both give the same.",
    )
    script: str | None = Field(
        None,
        description="A training program of your own for `accelerate launch`, started in place of ours "
        "(docs/how-to/user-script.md).",
    )
    script_args: list[str] = Field(
        default_factory=list,
        description="Its arguments, as texts; `$SHARDMAKE_...` in them is replaced (docs/how-to/user-script.md).",
    )
    deepspeed_values: Literal["explicit", "auto"] = Field(
        "explicit",
        description='`auto`: deepspeed.json says "auto" wherever Trainer fills in its own value; both give the same.',
    )
    deepspeed_config: str | None = Field(
        None, description="A DeepSpeed file of your own; what it sets beyond the plan is kept, contradictions refused."
    )
    accelerate_config: str | None = Field(
        None, description="An Accelerate file of your own; merged and checked as `deepspeed_config`."
    )
    torch_compile: bool = Field(False, description="Compile the model with torch.compile.")
    non_finite: Literal["stop", "rewind"] = Field(
        "stop",
        description="After a loss or gradient norm that is not finite: stop, or resume from the newest checkpoint, "
        "unless it comes again at a step where it came before.",
    )
    seed: int = Field(42, description="Seed of data order, initialisation of adapters and dropout.")
    checkpoints: Checkpoints = Field(Checkpoints(), description="Saving during training.")
    eval_every_steps: PositiveInt | None = Field(
        None, description="Optimizer steps between evaluations during training; none without it."
    )
    report_to: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(
        default_factory=list,
        description="Trackers that are told loss, learning rate and speed while training runs. Their files lie in "
        "`train/` of the run's folder unless the environment names a server (`MLFLOW_TRACKING_URI`, ...).",
    )
    dtype: Literal["keep", "bf16", "fp16", "fp32"] = Field(
        "bf16", description="Data type of the final model's weights; `keep`: the training's master weights."
    )
    max_shard_size: str = Field("5GB", description="Largest file of the final model.")
    evaluation: Evaluation = Field(Evaluation(), description="The evaluate stage.")
    push: Push | None = Field(None, description="Where the final model goes; without it, it stays in the run's folder.")

    @model_validator(mode="after")
    def _check_length(self) -> "Run":
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("give either max_steps or epochs, not both and not neither")
        return self

    @model_validator(mode="after")
    def _check_objective(self) -> "Run":
        formats = OBJECTIVES[self.objective].data_formats
        if self.data.format not in ("auto", *formats):
            raise ValueError(
                f"objective {self.objective!r} cannot learn from data.format {self.data.format!r}. "
                f"Use {' or '.join(formats)}"
            )
        return self

    @model_validator(mode="after")
    def _check_script(self) -> "Run":
        if self.script is None and self.script_args:
            raise ValueError("script_args are given, but no script to hand them to")
        if self.script is not None and self.engine == "loop":
            raise ValueError("engine: loop and script exclude each other; the script brings its own loop")
        if self.script is not None and self.checkpoints.asynchronous:
            raise ValueError("checkpoints.asynchronous is not for a script, which saves by itself; leave it out")
        return self


class Slurm(Section):
    """What Slurm is asked for. Sizes that follow from the plan (nodes, memory, CPUs) are not repeated here."""

    partition: str | None = Field(None, description="Partition; without it, Slurm's default.")
    account: str | None = Field(None, description="Account to charge.")
    qos: str | None = Field(None, description="Quality of service.")
    time_limit: str = Field("24:00:00", description="Time limit of one training job, `[D-]HH:MM:SS`.")
    gpu_request: Literal["gres", "gpus-per-node", "none"] = Field(
        "gres", description="How this cluster wants GPUs asked for."
    )
    gpu_type: str | None = Field(None, description="GPU type in the request, as in `gres=gpu:a100:4`.")
    signal_seconds: PositiveInt = Field(
        120,
        description="How long before the time limit a job is told to save and stop, in seconds. Once a save was "
        "measured, it is more where two saves and a minute take longer; never more than a quarter of the limit.",
    )
    wckey: str | None = Field(None, description="Workload characterization key, where the site wants one.")
    constraint: str | None = Field(None, description="Node features.")
    exclude: str | None = Field(None, description="Nodes never to use, in Slurm's notation.")
    setup: list[str] = Field(
        default_factory=list, description="Shell lines before the job's step, such as `module load cuda`."
    )
    extra: dict[str, str | int | bool] = Field(
        default_factory=dict, description="Further #SBATCH parameters, by their long names."
    )

    @property
    def time_limit_minutes(self) -> int:
        """`time_limit` in minutes, rounded up."""
        days, _, clock = self.time_limit.rpartition("-")
        hours, minutes, seconds = (int(part) for part in clock.split(":"))
        return int(days or 0) * 1440 + hours * 60 + minutes + (seconds > 0)

    @field_validator("time_limit")
    @classmethod
    def _check_time_limit(cls, time_limit: str) -> str:
        if not re.fullmatch(r"(\d+-)?\d+:[0-5]\d:[0-5]\d", time_limit):
            raise ValueError(f"{time_limit!r} is not a time limit; write [D-]HH:MM:SS in quotes, such as '24:00:00'")
        return time_limit


class Cluster(Section):
    """One machine or cluster: what a node has, how jobs are started, how nodes talk."""

    executor: Literal["local", "slurm"] = Field(description="Start training here, or as one Slurm job.")
    accelerator: str = Field(
        "cpu", description="GPU model as in `shardmake estimate --list-gpus` (a100-80gb, h100, ...), or `cpu`."
    )
    gpu_memory_gib: PositiveNumber | None = Field(
        None, description="Memory of one GPU in GiB, where it differs from the model's usual."
    )
    max_nodes: PositiveInt = Field(1, description="Most nodes one run may take.")
    processes_per_node: PositiveInt = Field(description="Ranks per node; on a GPU node, the number of its GPUs.")
    cpus_per_node: PositiveInt = Field(description="Cores that a job may use on a node.")
    memory_gib_per_node: PositiveNumber = Field(description="Host RAM that a job may use on a node, GiB.")
    nvme_path: str | None = Field(None, description="Folder on node-local NVMe for offload.")
    nvme_gib_per_node: PositiveNumber | None = Field(None, description="Free NVMe space per node, GiB.")
    intra_node_gbps: PositiveNumber | None = Field(
        None, description="Bandwidth between two GPUs of a node, GB/s each way; without it, by the GPU model."
    )
    inter_node_gbps: PositiveNumber = Field(
        12.5, description="Bandwidth between two nodes, GB/s each way (100 Gbit/s is 12.5)."
    )
    network_interface: str | None = Field(
        None, description="Interface that carries training traffic, such as `ib0`; without it, the default route's."
    )
    internet_on_compute_nodes: bool = Field(False, description="Whether jobs reach the internet.")
    shared: bool = Field(
        False, description="A lab shares the runs: everything written is readable and writable for the folder's group."
    )
    hang_seconds: PositiveNumber = Field(
        600,
        description="Silence after which a training step counts as hung, in seconds, or five usual steps if that is "
        "longer; loading, saves and evaluations may take six times as long. Stacks are kept and training resumes.",
    )
    node_mtbf_hours: PositiveNumber = Field(
        3700,
        description="Mean time between failures of one node, hours, preemptions included; for "
        "`checkpoints.every_steps: auto`. The default is what 6.5 failures per 1000 node-days make (arXiv 2410.21680).",
    )
    trainings_per_user: PositiveInt = Field(
        2,
        description="Fair use: most trainings that one user has in Slurm's queue at once, waiting or running, over all "
        "runs and checkouts; further ones wait for their turn.",
    )
    cache: str | None = Field(
        None, description="Folder of the hub's cache, which a lab may share; without it, where HF_HOME says."
    )
    scratch: str = Field(
        "/tmp",
        description="Node-local folder for what must not lie on a network file system: caches, and the newest "
        "checkpoint where saving is asynchronous (below `/dev/shm` it counts as host RAM).",
    )
    slurm: Slurm = Field(Slurm(), description="What Slurm is asked for; for `executor: slurm`.")

    @property
    def is_cpu(self) -> bool:
        """Whether the ranks run without a GPU."""
        return self.accelerator == "cpu"

    @property
    def scratch_in_memory(self) -> bool:
        """Whether `scratch` lies in host RAM, as far as its name tells."""
        return Path(self.scratch).is_relative_to("/dev/shm")


class Config(Section):
    """`config/config.yaml`: a cluster and the runs."""

    cluster: str = Field(description="The cluster file, relative to the folder Snakemake is started in.")
    runs: dict[str, Run] = Field(description="The runs, by name; a run's folder is `runs/NAME`.")

    @field_validator("runs")
    @classmethod
    def _check_names(cls, runs: dict[str, Run]) -> dict[str, Run]:
        if not runs:
            raise ValueError("give at least one run")
        for name in runs:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                raise ValueError(f"{name!r} cannot name a run's folder; use letters, digits, '.', '_' and '-'")
        return runs
