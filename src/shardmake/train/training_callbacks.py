"""Create the callbacks and the checkpoint saver of one attempt."""

from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from shardmake.checkpoint.retention import Retention
from shardmake.train.async_saver import ScratchFolder, share_of_node
from shardmake.train.callbacks.heartbeat import HeartbeatCallback
from shardmake.train.callbacks.metrics import MetricsCallback
from shardmake.train.callbacks.non_finite import NonFiniteCheck
from shardmake.train.callbacks.save_scheduler import SaveScheduler
from shardmake.train.callbacks.stop_on_request import StopOnRequest
from shardmake.train.checkpoint_saver import Saver
from shardmake.train.rank_context import RankContext


@dataclass(frozen=True)
class TrainingCallbacks:
    """The callbacks in the order in which they are called, two of them by name, and the checkpoint saver."""

    callbacks: list[TrainerCallback]
    stop: StopOnRequest
    non_finite: NonFiniteCheck
    saver: Saver


def make_callbacks(context: RankContext, heartbeat: HeartbeatCallback) -> TrainingCallbacks:
    """Return the callbacks of one attempt on this rank."""
    attempt, plan, settings = context.attempt, context.plan, context.settings
    rundir, global_batch_size = attempt.rundir, plan.choice.global_batch_size
    tokens_per_step = global_batch_size * plan.workload.sequence_length

    def describe(step: int) -> dict[str, Any]:
        return {
            "tokens": step * tokens_per_step,
            "samples": step * global_batch_size,
            "data_seed": settings.arguments["data_seed"],
            "world_size": attempt.world_size,
            "strategy": plan.choice.strategy,
            "attempt": attempt.number,
            "settings_digest": attempt.settings_digest,
        }

    non_finite, stop = NonFiniteCheck(context.rank), StopOnRequest([rundir.stop_file, context.folder.stop_file])
    metrics = MetricsCallback(rundir.metrics, tokens_per_step, attempt.number)
    checkpoints = settings.checkpoints
    retention = Retention(**dict(checkpoints.retention))
    scratch = _scratch_folder(context) if checkpoints.asynchronous else None
    saver = Saver(rundir.checkpoints, describe, retention, attempt.checkpoint_bytes, scratch)
    scheduler = SaveScheduler(saver, checkpoints.mtbf_seconds)
    return TrainingCallbacks([non_finite, metrics, stop, scheduler, heartbeat], stop, non_finite, saver)


def _scratch_folder(context: RankContext) -> ScratchFolder:
    """Return the scratch folder of this rank's node; in tests, several nodes share one machine."""
    attempt = context.attempt
    node = context.rank // attempt.processes_per_node
    share = share_of_node(context.plan.choice, node)
    return ScratchFolder(attempt.saves / f"node-{node}", context.folder.root, node, attempt.nodes, share)
