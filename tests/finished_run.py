"""The folder of a run that is ready to be pushed, without a training: files with known content and their receipts."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardmake.config.load import parse_config
from shardmake.config.models import Run
from shardmake.core.fingerprint import fingerprint
from shardmake.core.manifest import read_files
from shardmake.run import evaluation, plan, training_settings
from shardmake.run.attempt import Attempt, AttemptDir, GpuUse, Heartbeat, NodeExit, NodeHeartbeats
from shardmake.run.attempt_history import AttemptRecord, save_history
from shardmake.run.engine import Engine
from shardmake.run.metrics import MeanRewards, MetricsLine, Rewards
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from shardmake.run.receipts import DataReceipt, DataSettings, MergeReceipt, SplitReceipt, TrainingReceipt, Verification
from shardmake.run.training_settings import TrainingSettings
from tests.unit import plans

WEIGHTS = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 200_000 for n in (1, 2)}
MODEL = {
    "config.json": b'{"model_type": "llama"}\n', "model.safetensors.index.json": b'{"weight_map": {}}\n',
    "tokenizer.json": b"{}\n", **WEIGHTS,
}  # fmt: skip
PLOTS = {f"plots/{name}.png" for name in ("loss", "optimizer", "speed", "by-length")}
"""Those of a run on CPUs, where memory is not measured."""
DRAWN = dict.fromkeys(sorted(PLOTS), b"\x89PNG")
"""Stands for the plots where only what becomes of files is tested: drawing them takes longer than all the rest."""
_PLAN = plans.make_plan("zero2", micro_batch_size=4, nodes=1)
BUCKETS = [
    evaluation.LengthScore(up_to=128, loss=2.6, perplexity=13.5, tokens=1024, exact=0.0),
    evaluation.LengthScore(up_to=None, loss=2.4, perplexity=11.0, tokens=3072, exact=0.0),
]
SCORES = evaluation.ModelScore(loss=2.5, perplexity=12.18, tokens=4096, exact=0.0, by_length=BUCKETS)


def make_run(**changes: Any) -> Run:
    """A run's settings; ``changes`` go over them."""
    values = {
        "model": "lab/base", "data": {"train": "resources/demo/train.jsonl"}, "sequence_length": 256,
        "global_batch_size": 16, "max_steps": 60, "learning_rate": 5e-4,
    }  # fmt: skip
    return parse_config({"cluster": "c.yaml", "runs": {"chat": values | changes}}, "test").runs["chat"]


def make_rundir(root: Path, files: dict[str, bytes] = MODEL) -> RunDir:
    """The folder of a run that was trained, consolidated and evaluated."""
    rundir = RunDir(root / "runs" / "chat")
    write_model(rundir, files)
    make_plan().write(rundir.plan)
    MEMORY.write(rundir.memory)
    SETTINGS.write(rundir.training)
    make_data_receipt("d").write(rundir.data_receipt)
    TRAINED.write(rundir.train_receipt)
    EVALUATED.write(rundir.evaluation)
    write_history(rundir, [(0, 900, range(1, 31), "interrupted"), (1200, 2100, range(31, 61), "finished")])
    return rundir


def write_history(rundir: RunDir, attempts: list[tuple[float, float, range, str]], accelerator: str = "cpu") -> None:
    """Attempts with start and end (seconds), the steps that stayed, and why they ended; a step every 20 seconds."""
    shutil.rmtree(rundir.attempts, ignore_errors=True)
    lines: list[MetricsLine] = []
    for number, (started, ended, steps, _) in enumerate(attempts, 1):
        folder = AttemptDir(rundir.attempts / f"{number:03d}")
        make_attempt(number, rundir, accelerator).write(folder.settings)
        make_plan().write(folder.plan)
        make_exit(host="n1", started=started, ended=ended).write(folder.exit_record(0))
        lines += [
            MetricsLine(
                step=step, time=started + 60 + 20 * index, attempt=number, loss=9.0 / step, learning_rate=5e-4,
                grad_norm=1.0, tokens=4096 * step, tokens_per_second=204.8,
            )
            for index, step in enumerate(steps)
        ]  # fmt: skip
    history = [
        make_record(
            attempt=number, job=str(number), submitted=started, ended=ended, end=end,
            checkpoint_step=steps[-1] if steps else 0,
        )
        for number, (started, ended, steps, end) in enumerate(attempts, 1)
    ]  # fmt: skip
    save_history(rundir.attempt_history, history)
    rundir.metrics.write_text("".join(line.as_text() for line in lines))


def with_arguments(settings: TrainingSettings, **changes: Any) -> TrainingSettings:
    """Return ``settings`` with other training arguments."""
    return settings.model_copy(update={"arguments": settings.arguments | changes})


def make_record(**changes: Any) -> AttemptRecord:
    """The record of an attempt; ``changes`` go over its values."""
    values = {
        "attempt": 1, "job": "1", "plan": "p", "strategy": "zero2", "fallback": 0, "submitted": 0, "ended": 9,
        "end": "finished", "message": "", "host": None, "checkpoint_step": 0,
    }  # fmt: skip
    return AttemptRecord.model_validate(values | changes)


def make_exit(rank: int = 0, **changes: Any) -> NodeExit:
    """The record of a node whose ranks ended with status 0; ``changes`` go over its values."""
    values = {"node_rank": rank, "host": f"c{rank + 1}", "started": 0, "ended": 9, "phase": "training", "returncode": 0}
    return NodeExit.model_validate(values | {"stop_signal": None} | changes)


def make_attempt(number: int, rundir: RunDir, accelerator: str) -> Attempt:
    return Attempt(
        number=number, run_folder=str(rundir.root), nodes=1, processes_per_node=2, cpus_per_node=2,
        accelerator=accelerator, network_interface=None, scratch="/tmp", offline=True, resume_from=None,
        settings_digest="r", versions={},
    )  # fmt: skip


def write_model(rundir: RunDir, files: dict[str, bytes]) -> None:
    """Replace the run's model and its receipt."""
    rundir.model.mkdir(parents=True, exist_ok=True)
    for old in rundir.model.iterdir():
        old.unlink()
    for name, content in files.items():
        (rundir.model / name).write_bytes(content)
    verification = Verification(
        architecture="LlamaForCausalLM", tensors=2, parameters=2, bytes=4, dtype="bfloat16", ties={}, zero=[],
        files=read_files(rundir.model, fingerprint),
    )  # fmt: skip
    MergeReceipt(
        checkpoint="train/checkpoints/checkpoint-60", written_by="zero2", step=60, world_size=2, dtype="keep",
        source_bytes_checked=4, output_bytes_compared=4, versions={}, verification=verification,
    ).write(rundir.model_receipt)  # fmt: skip


def make_plan() -> Plan:
    update = {
        "run": "chat", "workload": _PLAN.workload.model_copy(update={"model": "lab/base", "sequence_length": 256}),
        "reason": "zero2, no checkpointing, micro batch 4, 1 node: the fastest of 2 candidates that fit (11 of 40 GiB).",
        "rejected": {"ddp": "needs 52 GiB"},
        "fallbacks": [plan.Fallback(choice=_PLAN.choice, host_memory=4 << 30, memory_gib=5)],
        "resources": {"train": plan.Resources(memory_gib=8, cpus=2)},
    }  # fmt: skip
    return _PLAN.model_copy(update=update)


_NOTHING = plan.PlaceEstimate(total=0, terms={})
_CANDIDATE = plan.CandidateEstimate(
    name="zero2", choice=_PLAN.choice, host=_NOTHING, nvme=_NOTHING,
    gpu=plan.GpuEstimate(allocated=9 << 30, reserved=10 << 30, wanted=10 << 30, device=11 << 30, phase="backward",
        terms={"weights": 4 << 30, "activations": 5 << 30}),
    disk=plan.PlaceEstimate(total=30 << 30, terms={"checkpoints": 20 << 30, "model": 10 << 30}), fits=True,
    reason="It fits.", step_seconds=1.0, method="closed form",
)  # fmt: skip
MEMORY = plan.MemoryEstimates(
    model="LlamaForCausalLM", parameters=8_000_000_000, trainable=8_000_000_000, gpu_memory=40 << 30,
    host_memory=64 << 30, candidates=[_CANDIDATE],
)  # fmt: skip
SETTINGS = TrainingSettings(
    model=training_settings.BaseModelSettings(
        path="base", revision=None, trust_remote_code=False, model_class=_PLAN.workload.model_class, dtype="bfloat16",
        attention="sdpa", gradient_checkpointing=False, on_gpu=False,
    ),
    objective="sft", method=training_settings.FullMethod(),
    arguments={
        "max_steps": 60, "learning_rate": 5e-4, "lr_scheduler_type": "cosine", "warmup_steps": 3,
        "optim": "adamw_torch", "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.01,
        "max_grad_norm": 1.0, "seed": 42,
    },
    optimizer=None,
    expected=Engine(
        engine="deepspeed", zero_stage=2, world_size=2, dtype="bfloat16", offload_optimizer=None, offload_param=None,
    ),
    loss="plain",
    checkpoints=training_settings.CheckpointSettings(retention=training_settings.Retention(), mtbf_seconds=None),
    program=training_settings.TrainerProgram(),
)  # fmt: skip
TRAINED = TrainingReceipt(
    steps=60, tokens=245760, loss=2.41, checkpoint="train/checkpoints/checkpoint-60", strategy="zero2", world_size=2,
    settings_digest="r", attempts=2, versions={"torch": "2.13.0", "transformers": "5.23.0"}, finished_at=1_700_001_800.0,
)  # fmt: skip
EVALUATED = evaluation.EvaluationResult(
    sequences=32, tokens=4096, backend="whole", ranks=1, tuned=SCORES,
    base=SCORES.model_copy(update={"loss": 9.0, "perplexity": 8103.1}),
    samples=[evaluation.Sample(prompt="What does len do?", base="```", tuned="It returns the number of items.")],
    tasks=[evaluation.TaskScore(task="sums", metric="acc", base=0.25, tuned=0.75)],
)  # fmt: skip
_REWARDS = Rewards(chosen=0.25, rejected=-1.0, margins=1.25, accuracies=0.875)
PREFERENCES = evaluation.PreferenceScore(pairs=1200, base_accuracy=0.5, tuned_accuracy=0.75, rewards=_REWARDS)
REWARD_MODEL = evaluation.RewardModelScore(
    pairs=1200, accuracy=0.875, margin=1.25, chosen=0.75, rejected=-0.5, smallest=-3.0, largest=4.0
)
_RATED: dict[str, Any] = {"base": None, "tuned": None, "reward_model": REWARD_MODEL, "samples": [], "tasks": []}
RATED = EVALUATED.model_copy(update=_RATED)
COMPLETIONS = evaluation.CompletionScore(
    desirable=700, undesirable=500, rewards=MeanRewards(chosen=0.25, rejected=-1.0, margins=1.25), accuracy=0.875
)


def make_data_receipt(digest: str) -> DataReceipt:
    split = SplitReceipt(
        examples=1, truncated=0, split=0, dropped_without_loss=0, dropped_loss_truncated=0, first_dropped=[],
        sequences=1, tokens=1, loss_tokens=1, files=[],
    )  # fmt: skip
    settings = DataSettings(
        format="auto", columns={}, loss_on="auto", eval_fraction=0.1, order="shuffled", sequence_length=32, packing=True, seed=42
    )  # fmt: skip
    return DataReceipt(
        digest=digest, layout=1, tokenizer="t", sources={}, settings=settings, pad_token_id=0, data_format="text",
        columns={"text": "text"}, loss_on_assistant=False, repeated=0, train=split, eval=split,
    )  # fmt: skip


def publish_heartbeat(folder: AttemptDir, phase: str, step: int, gpus: Sequence[GpuUse] = (), **times: Any) -> None:
    """Write the copy of the heartbeats of ranks 0 and 1 as the worker of their node does; rank 1 computes 1.6 times."""
    beat = Heartbeat(rank=0, host="c1", pid=1, phase=phase, step=step, time=time.time(), **times)
    slow = beat.model_copy(update={"rank": 1, "compute_seconds": [1.6 * one for one in beat.compute_seconds]})
    NodeHeartbeats(beats=[beat, slow], gpus=list(gpus)).write(folder.node_heartbeats(0))
