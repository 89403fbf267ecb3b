"""Contradictions between Trainer, DeepSpeed and Accelerate: what the comparison predicts, and what the engine does.

`tests/unit/render/test_comparison.py` checks the predictions, `tests/workflow/test_engine_truth.py` the engine.
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmake.render.comparison import Settings

AUTO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {"per_device_train_batch_size": 4, "learning_rate": 1e-4, "max_steps": 2}
ACCELERATE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 2}
STOPS = "stops"
SWAPPED = str(Path(tempfile.gettempdir()) / "swapped")
"""Folder for offload to NVMe."""
RANKS = 2


@dataclass(frozen=True)
class Planted:
    """One fault, and a twin of the same settings without it.

    ``setting`` is a row of the comparison, or the key of a problem. ``runs`` is the value that the comparison predicts,
    or ``STOPS``. ``engine`` holds what the engine's record must have, or the class of its error. DeepSpeed ``compiles``
    an extension for some, for minutes. If a fault ``has_no_effect``, the engine is that of its twin.
    """

    name: str
    setting: str
    runs: Any
    engine: dict[str, Any] | str
    trainer: dict[str, Any] = field(default_factory=dict)
    deepspeed: dict[str, Any] | None = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    twin: dict[str, Any] = field(default_factory=dict)
    twin_trainer: dict[str, Any] = field(default_factory=dict)
    accelerate: dict[str, Any] | None = None
    twin_accelerate: dict[str, Any] | None = None
    flags: tuple[str, ...] = ()
    compiles: bool = False
    has_no_effect: bool = False

    @property
    def fault(self) -> Settings:
        kept = {key: value for key, value in AUTO.items() if key not in self.dropped}
        file = None if self.deepspeed is None else kept | self.deepspeed
        return self._settings(ARGUMENTS | self.trainer, file, self.accelerate)

    @property
    def corrected(self) -> Settings:
        file = None if self.deepspeed is None else AUTO | self.twin
        return self._settings(ARGUMENTS | self.trainer | self.twin_trainer, file, self.twin_accelerate)

    def _settings(
        self, trainer: dict[str, Any], file: dict[str, Any] | None, accelerate: dict[str, Any] | None
    ) -> Settings:
        return Settings(trainer, file, accelerate, list(self.flags) if accelerate is self.accelerate else [], RANKS)


def adamw(**parameters: Any) -> dict[str, Any]:
    """Return an optimizer section with torch's AdamW, which DeepSpeed does not compile."""
    return {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, **parameters}}}


def schedule(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": parameters}}


def zero(stage: int | str, **section: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **section}}


ALL_AUTO = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
WARMUP = schedule("WarmupLR", warmup_max_lr="auto", warmup_num_steps="auto")
WARMUP_DECAY = schedule("WarmupDecayLR", total_num_steps="auto", warmup_num_steps="auto", warmup_max_lr="auto")
SGD: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}
ON_CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": SWAPPED}
KEEPS_OPTIMIZER = {"zero_force_ds_cpu_optimizer": False}

PLANTED = [
    Planted("clipping in the arguments only", "gradient clipping", 1.0, {"gradient clipping": 1.0},
            {"max_grad_norm": 0.5}, dropped=("gradient_clipping",)),
    Planted("accumulation in the arguments only", "accumulation steps", 1, {"accumulation steps": 1, "batch": 8},
            {"gradient_accumulation_steps": 4}, dropped=("gradient_accumulation_steps",)),
    Planted("two schedules", "schedule", "WarmupLR", {"schedule": "WarmupLR"},
            {"lr_scheduler_type": "cosine"}, WARMUP),
    Planted("two optimizers", "optimizer", "adamw", {"optimizer": "AdamW"},
            {"optim": "adafactor"}, adamw(**ALL_AUTO)),
    Planted("a total batch that the rest does not make", "total batch", STOPS, "ValueError",
            {}, {"train_batch_size": 64}, twin={"train_batch_size": "auto"}),
    Planted("two lengths of the warm-up", "warm-up steps", STOPS, "ValueError",
            {"warmup_steps": 10, "max_steps": 20}, schedule("WarmupLR", warmup_num_steps=500), twin=schedule("WarmupLR", warmup_num_steps="auto")),
    Planted("two lengths of the training", "total steps", STOPS, "ValueError",
            {}, schedule("WarmupDecayLR", total_num_steps=1000, warmup_num_steps="auto", warmup_max_lr="auto"), twin=WARMUP_DECAY),
    Planted("betas against a default", "betas", STOPS, "ValueError",
            {}, adamw(**ALL_AUTO | {"betas": [0.9, 0.95]}), twin=adamw(**ALL_AUTO)),
    Planted("a total batch alone", "total batch", STOPS, "ValueError",
            {"per_device_train_batch_size": 8}, {"train_batch_size": 8},
            ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), {"train_batch_size": 16}),
    Planted("no batch size", "batch per rank", STOPS, "AssertionError",
            dropped=("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")),
    Planted("parameter offload with stage 2", "parameter offload", "none", {"ZeRO stage": 2, "zero_init": False},
            {}, zero(2, offload_param=ON_CPU), has_no_effect=True),
    Planted("a stage as text", "zero_optimization.stage", STOPS, {"ZeRO stage": 3, "partitions_at_load": False},
            {}, zero("3"), twin=zero(3)),
    Planted("a boolean in place of a section", "zero_optimization", STOPS, "AttributeError",
            {}, {"zero_optimization": True}),
    Planted("NVMe without a folder", "zero_optimization.offload_optimizer.nvme_path", STOPS, "TypeError",
            {}, zero(3, offload_optimizer={"device": "nvme"}), twin=zero(3, offload_optimizer=NVME), compiles=True),
    Planted("an optimizer that ZeRO was not tested with", "optimizer.type", STOPS, "AssertionError",
            {}, SGD, twin=SGD | {"zero_allow_untested_optimizer": True}),
    Planted("accumulation and clipping for the launcher", "accumulation steps", STOPS, "ValueError",
            {"gradient_accumulation_steps": 2}, None,
            accelerate=ACCELERATE | {"deepspeed_config": {"gradient_accumulation_steps": 8, "gradient_clipping": 0.5}},
            twin_accelerate=ACCELERATE | {"deepspeed_config": {"gradient_accumulation_steps": 2, "zero_stage": 2}}),
    # Of the same kinds:
    Planted("an optimizer without a learning rate", "learning rate", 1e-3, {"initial_rate": 1e-3},
            {}, adamw(betas="auto", eps="auto", weight_decay="auto"), twin=adamw(**ALL_AUTO)),
    Planted("an optimizer without a weight decay", "weight decay", 0.01, {"weight decay": 0.01},
            {"weight_decay": 0.1}, adamw(lr="auto", betas="auto", eps="auto"), twin=adamw(**ALL_AUTO)),
    Planted("an optimizer without an epsilon", "epsilon", 1e-8, {"epsilon": 1e-8},
            {"adam_epsilon": 1e-6}, adamw(lr="auto", betas="auto", weight_decay="auto"), twin=adamw(**ALL_AUTO)),
    Planted("a schedule without a peak", "learning rate", 0.001, {"learning rate": 0.001},
            {}, schedule("WarmupDecayLR", total_num_steps="auto", warmup_num_steps="auto"), twin=WARMUP_DECAY),
    Planted("a schedule without a warm-up", "warm-up steps", 1000, {"warm-up steps": 1000},
            {"warmup_steps": 10}, schedule("WarmupLR", warmup_max_lr="auto"), twin=WARMUP),
    Planted("half precision for the launcher only", "precision", "fp32", {"precision": "fp32"},
            {}, {"bf16": {"enabled": False}}, flags=("--use_deepspeed", "--num_processes", "2", "--mixed_precision", "bf16"),
            accelerate=ACCELERATE, has_no_effect=True),
    Planted("two half precisions", "precision", STOPS, "ValueError",
            {"bf16": True}, {"fp16": {"enabled": True}}, twin={"bf16": {"enabled": "auto"}}),
    Planted("autocast in the file only", "precision", "bfloat16 autocast", {"precision": "bfloat16 autocast"},
            {"bf16": False}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    Planted("a number as text", "gradient_clipping", STOPS, "ValueError",
            {"max_grad_norm": 0.5}, {"gradient_clipping": "0.5"}, twin={"gradient_clipping": 0.5}),
    Planted("optimizer offload without ZeRO", "optimizer offload", "none", {"ZeRO stage": 0, "zero_optimizer": "AdamW"},
            {}, zero(0, offload_optimizer=ON_CPU) | KEEPS_OPTIMIZER),
    Planted("a schedule without a length", "scheduler.params.total_num_steps", STOPS, "TypeError",
            {}, schedule("WarmupDecayLR", warmup_num_steps="auto", warmup_max_lr="auto"), twin=WARMUP_DECAY),
    Planted("DeepSpeed and FSDP", "engine", STOPS, "ValueError",
            {"fsdp": True}, twin_trainer={"fsdp": None}),
    Planted("an optimizer that offload replaces", "optimizer", "Adam (DeepSpeedCPUAdam, L2 weight decay)", {"optimizer": "DeepSpeedCPUAdam"},
            {"optim": "sgd"}, zero(2, offload_optimizer=ON_CPU), twin=zero(2, offload_optimizer=ON_CPU) | KEEPS_OPTIMIZER,
            compiles=True),
]  # fmt: skip
