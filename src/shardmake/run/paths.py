"""Every path of a run in one place. The run's folder is the data flow between the stages."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmake.core.run_folder import protect, refuse_link

DATA_RECEIPT = "receipt.json"
"""Name of the receipt in the data folder."""

MODEL_RECEIPT = "receipt.json"
"""Name of the receipt in the folder of a merged model."""

MODEL_CARD = "README.md"
"""Name of the card there, which the report writes after the receipt. A push writes its own."""

RUNS = Path("runs")
"""Folder of all runs, unless ``--runs`` names another one."""


class BelowRoot:
    """A path below the ``root`` of the object that has this attribute."""

    def __init__(self, path: str, doc: str) -> None:
        self.path, self.__doc__ = path, doc

    def __get__(self, folder: Any, owner: type) -> Path:
        return Path(folder.root, self.path)


@dataclass(frozen=True)
class RunDir:
    """The folder ``runs/NAME`` of one run."""

    root: Path

    sources = BelowRoot("sources.json", "Commits, sizes and checksums of what was fetched (`Sources`).")
    fetched = BelowRoot("fetched", "Folder of fetched examples, one folder a split.")
    base_model = BelowRoot("fetched/model", "Model of a run or checkpoint: config, tokenizer, links to its weights.")
    adapter = BelowRoot("fetched/adapter", "Folder of the adapter whose training continues, as of PEFT.")
    weights_receipt = BelowRoot("fetched/weights.json", "Sizes and checksums of the weights, once they are here.")
    plan_folder = BelowRoot("plan", "Folder of the plan and the rendered files.")
    memory = BelowRoot("plan/memory.json", "Every candidate with its bytes, term by term.")
    memory_table = BelowRoot("plan/memory.html", "A row per candidate, from it.")
    plan = BelowRoot("plan/plan.json", "The choice, the reason, the fallbacks (`shardmake.run.plan.Plan`).")
    accelerate = BelowRoot("plan/accelerate.yaml", "Rendered Accelerate file.")
    deepspeed = BelowRoot("plan/deepspeed.json", "Rendered DeepSpeed file; an empty object under another library.")
    training = BelowRoot("plan/training.json", "Rendered training arguments and what the ranks need beside them.")
    rendered = BelowRoot("plan/rendered.json", "Mark that all files are rendered and checked (`RenderReceipt`).")
    fallbacks = BelowRoot("plan/fallbacks", "Folder of the rendered files of each fallback, by its number.")
    data = BelowRoot("data", "Folder of the tokenized, packed, memory-mapped examples.")
    raw_data = BelowRoot("data/raw", "Folder of links to the files of `format: raw`, which a script reads by itself.")
    data_receipt = BelowRoot("data/receipt.json", "Counts, source and digest of the data (`DataReceipt`).")
    train = BelowRoot("train", "Folder of everything that training writes.")
    job = BelowRoot("train/job.json", "The job that owns this run, for adoption.")
    attempts = BelowRoot("train/attempts", "One folder per attempt: settings, logs, exit record per node.")
    attempt_history = BelowRoot("train/attempts/index.json", "Every attempt that has ended, and what follows from it.")
    checkpoints = BelowRoot("train/checkpoints", "Sharded; not outputs of a rule, which Snakemake deletes if it fails.")
    script_output = BelowRoot("train/output", "Folder in which a user's script writes its final model.")
    metrics = BelowRoot("train/metrics.jsonl", "A JSON object a line: loss, learning rate, tokens/s, memory, by step.")
    profile = BelowRoot("train/profile", "Folder of the profiler's trace and of the snapshot of the GPU's memory.")
    resharded = BelowRoot("train/resharded", "The checkpoint, converted for another strategy or number of ranks.")
    stop_file = BelowRoot("train/STOP", "Training saves and stops when a user creates this file.")
    train_receipt = BelowRoot("train/receipt.json", "Written last; the only proof that training finished.")
    model = BelowRoot("model", "The final model as a Hugging Face folder.")
    model_receipt = BelowRoot("model/receipt.json", "Origin and checks of the model; not pushed with it.")
    evaluation = BelowRoot("evaluation.json", "Losses and samples of the base and the tuned model.")
    evaluation_losses = BelowRoot("evaluation.csv", "The loss of each held-out example, if `evaluation.losses` asks.")
    push_receipt = BelowRoot("push/receipt.json", "Destinations that were read back and compared.")
    settings = BelowRoot("settings", "Folder of the settings with which each stage last ran (`StageSettings`).")
    stage_lock = BelowRoot("settings/.lock", "Held by a stage while it runs, and by `clean` while it removes folders.")
    figures = BelowRoot("figures", "Folder of the report's figures, for `snakemake --report`.")
    report = BelowRoot("report.html", "The run on one page.")

    driver_lock = BelowRoot("train/driver.lock", "Held by the driver that watches the training.")
    staged_checkpoints = BelowRoot("train/checkpoints/.saving", "Folder of saves that are not finished.")

    def __post_init__(self) -> None:
        protect(self.root)

    def refuse_links(self) -> None:
        """Raise `ShardmakeError` if a path of the run is a link, before a stage has done anything."""
        names = [value.path for value in vars(type(self)).values() if isinstance(value, BelowRoot)]
        for path in (self.root, *(self.root / name for name in names)):
            refuse_link(path)

    @classmethod
    def pattern(cls) -> "RunDir":
        """Return the folder with Snakemake's wildcard ``{run}`` as its name, from which rules take their files."""
        return cls(RUNS / "{run}")

    @property
    def name(self) -> str:
        """The run's name."""
        return self.root.name

    def sibling(self, name: str) -> "RunDir":
        """Return the folder of another run of the same configuration."""
        return RunDir(self.root.parent / name)

    def rendered_files(self, fallback: int) -> Path:
        """Return the folder of the rendered files of ``fallback``; 0 is the plan's choice."""
        return self.fallbacks / str(fallback) if fallback else self.plan_folder

    def reference_log_probs(self, settings_digest: str) -> Path:
        """Return the path of the reference model's log-probabilities for the training with these settings."""
        return self.train / f"reference-{settings_digest}.safetensors"

    def stage_settings(self, stage: str) -> Path:
        """Return the path of the settings of a stage."""
        return self.settings / f"{stage}.json"

    def figure(self, name: str) -> Path:
        """Return the path of one of the report's figures."""
        return self.figures / f"{name}.svg"


def numbered_paths(folder: Path) -> dict[int, Path]:
    """Return what has a number as its name in ``folder``, in the order of the numbers; other names do not count."""
    found = {int(path.name): path for path in folder.glob("[0-9]*") if path.name.isdecimal()}
    return dict(sorted(found.items()))


def short_path(path: Path) -> str:
    """Return ``path`` relative to the working folder if it lies below it, else absolute."""
    resolved = path.resolve()
    return str(resolved.relative_to(Path.cwd())) if resolved.is_relative_to(Path.cwd()) else str(resolved)
