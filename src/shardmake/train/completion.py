"""Record how a training ended."""

import time

from transformers import TrainerState

from shardmake.checkpoint import store
from shardmake.checkpoint.training_receipt import write_training_receipt
from shardmake.core.atomic import write_json
from shardmake.train.rank_context import RankContext


def record_completion(context: RankContext, state: TrainerState, *, stopped: bool) -> None:
    """Write the receipt if the last step is committed; after a requested stop, write the stop note instead."""
    rundir = context.attempt.rundir
    newest = next(store.committed(rundir.checkpoints), None)
    step = newest[0].step if newest else 0
    if state.global_step < state.max_steps:
        assert stopped, f"training ended at step {state.global_step} of {state.max_steps}, but no stop was requested"
        write_json(context.folder.stopped, {"step": step, "time": time.time()})
        return
    if newest is None or step != state.global_step:
        raise RuntimeError(f"The last step {state.global_step} was not saved. The newest checkpoint is of step {step}.")
    write_training_receipt(rundir, *newest)
