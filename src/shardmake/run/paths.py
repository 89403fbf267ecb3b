"""Every path of a run in one place. The run's folder is the data flow between the stages."""

from dataclasses import dataclass
from pathlib import Path

DATA_RECEIPT = "receipt.json"
"""Name of the receipt in the data folder."""

MODEL_RECEIPT = "receipt.json"
"""Name of the receipt in the folder of a merged model."""

RUNS = Path("runs")
"""Folder of all runs, unless ``--runs`` names another one."""


@dataclass(frozen=True)
class RunDir:
    """The folder ``runs/NAME`` of one run."""

    root: Path

    @classmethod
    def pattern(cls) -> "RunDir":
        """Return the folder with Snakemake's wildcard ``{run}`` as its name, from which rules take their files."""
        return cls(RUNS / "{run}")

    @property
    def name(self) -> str:
        """The run's name."""
        return self.root.name

    @property
    def sources(self) -> Path:
        """Commits, sizes and checksums of what was fetched (`shardmake.run.sources.Sources`)."""
        return self.root / "sources.json"

    @property
    def fetched(self) -> Path:
        """Folder of fetched examples, one Parquet file a split."""
        return self.root / "fetched"

    @property
    def weights_receipt(self) -> Path:
        """Sizes and checksums of the base model's weights, written once they are here."""
        return self.fetched / "weights.json"

    @property
    def plan_folder(self) -> Path:
        """Folder of the plan and the rendered files."""
        return self.root / "plan"

    @property
    def memory(self) -> Path:
        """Every candidate with its bytes, term by term."""
        return self.plan_folder / "memory.json"

    @property
    def memory_figure(self) -> Path:
        """A bar per candidate, drawn from it."""
        return self.plan_folder / "memory.svg"

    @property
    def plan(self) -> Path:
        """The choice, the reason, the fallbacks (`shardmake.run.plan.Plan`)."""
        return self.plan_folder / "plan.json"

    @property
    def accelerate(self) -> Path:
        """Rendered Accelerate file."""
        return self.plan_folder / "accelerate.yaml"

    @property
    def deepspeed(self) -> Path:
        """Rendered DeepSpeed file; an empty object where the strategy is not DeepSpeed's."""
        return self.plan_folder / "deepspeed.json"

    @property
    def training(self) -> Path:
        """Rendered training arguments and what the ranks need beside them."""
        return self.plan_folder / "training.json"

    @property
    def rendered(self) -> Path:
        """Mark that all files are rendered and checked (`shardmake.run.plan.RenderReceipt`)."""
        return self.plan_folder / "rendered.json"

    @property
    def fallbacks(self) -> Path:
        """Folder of the rendered files of each fallback, in a folder with its number."""
        return self.plan_folder / "fallbacks"

    def rendered_files(self, fallback: int) -> Path:
        """Return the folder of the rendered files of ``fallback``; 0 is the plan's choice."""
        return self.fallbacks / str(fallback) if fallback else self.plan_folder

    @property
    def data(self) -> Path:
        """Folder of the tokenized, packed, memory-mapped examples."""
        return self.root / "data"

    @property
    def data_receipt(self) -> Path:
        """Counts, source and digest of the data (`shardmake.run.receipts.DataReceipt`)."""
        return self.data / DATA_RECEIPT

    @property
    def train(self) -> Path:
        """Folder of everything that training writes."""
        return self.root / "train"

    @property
    def job(self) -> Path:
        """The job that owns this run, for adoption."""
        return self.train / "job.json"

    @property
    def attempts(self) -> Path:
        """One folder per attempt: settings, logs, exit record per node."""
        return self.train / "attempts"

    @property
    def attempt_history(self) -> Path:
        """Every attempt that has ended, and what follows from it (`shardmake.run.attempt_history.AttemptHistory`)."""
        return self.attempts / "index.json"

    @property
    def checkpoints(self) -> Path:
        """Sharded checkpoints; never a declared output, because Snakemake deletes outputs of failed rules."""
        return self.train / "checkpoints"

    @property
    def script_output(self) -> Path:
        """Folder in which a user's script writes its final model."""
        return self.train / "output"

    @property
    def metrics(self) -> Path:
        """One JSON object a line: loss, learning rate, tokens/s, memory, by step."""
        return self.train / "metrics.jsonl"

    @property
    def resharded(self) -> Path:
        """Folder of the checkpoint that was converted for another strategy or number of ranks."""
        return self.train / "resharded"

    @property
    def stop_file(self) -> Path:
        """Training saves and stops when a user creates this file."""
        return self.train / "STOP"

    @property
    def train_receipt(self) -> Path:
        """Written last; the only proof that training finished."""
        return self.train / "receipt.json"

    @property
    def model(self) -> Path:
        """The final model as a Hugging Face folder."""
        return self.root / "model"

    @property
    def model_receipt(self) -> Path:
        """Origin and checks of the model; not pushed with it."""
        return self.model / MODEL_RECEIPT

    @property
    def evaluation(self) -> Path:
        """Losses and samples of the base and the tuned model."""
        return self.root / "evaluation.json"

    @property
    def push_receipt(self) -> Path:
        """Destinations that were read back and compared."""
        return self.root / "push" / "receipt.json"

    @property
    def figures(self) -> Path:
        """Folder of the report's figures, for `snakemake --report`."""
        return self.root / "figures"

    def figure(self, name: str) -> Path:
        """Return the path of one of the report's figures."""
        return self.figures / f"{name}.svg"

    @property
    def report(self) -> Path:
        """The run on one page."""
        return self.root / "report.html"
