"""Apply the decision that follows an attempt's outcome: prepare the next attempt, or stop."""

import logging

from shardmake.checkpoint.reshard.convert import Route, route
from shardmake.core.errors import ShardmakeError
from shardmake.launch.messages import failure_message
from shardmake.launch.outcome import Action, Outcome, RetryState, decide
from shardmake.launch.training import Training
from shardmake.run.attempt_history import (
    EndReason,
    failing_nodes,
    hung_before,
    idle_attempts,
    may_rewind,
    next_fallback,
)

IDLE_ATTEMPTS = 3
logger = logging.getLogger(__name__)


def apply_decision(training: Training, outcome: Outcome) -> None:
    """Record what the next attempt changes.

    Raises:
        ShardmakeError: the training stops here.
    """
    current = next_fallback(training.attempts, training.plan_digest)
    fallback = _find_fallback(training, current, outcome.end)
    action = decide(outcome, _retry_state(training, outcome, fallback), cap=IDLE_ATTEMPTS)
    logger.info("%s -> %s", outcome.message, action.value)
    if action in (Action.STOP, Action.GIVE_UP):
        folder, idle = training.attempt_dir(training.last_attempt()), idle_attempts(training.attempts)
        raise ShardmakeError(failure_message(training.rundir.name, folder, outcome, action, idle))
    decided = {
        "next_fallback": fallback if action is Action.NEXT_FALLBACK else current,
        "all_memory": action is Action.MORE_MEMORY,
        "excluded": outcome.host if action is Action.EXCLUDE_AND_RESUME else None,
    }
    training.save_attempts([*training.attempts[:-1], training.attempts[-1].model_copy(update=decided)])


def _retry_state(training: Training, outcome: Outcome, fallback: int | None) -> RetryState:
    requested = training.current_plan().resources["train"].memory_gib
    return RetryState(
        idle_attempts=idle_attempts(training.attempts),
        has_fallback=fallback is not None,
        has_other_nodes=training.uses_slurm,
        has_memory=training.uses_slurm and not outcome.error and requested < training.node_memory_gib,
        host_hung_before=hung_before(training.attempts),
        failing_nodes=failing_nodes(training.attempts),
        may_rewind=training.run.non_finite == "rewind" and may_rewind(training.attempts),
    )


def _find_fallback(training: Training, current: int, end: EndReason) -> int | None:
    """Return the next fallback that needs less of the memory that ran out and can resume the newest checkpoint."""
    if end not in (EndReason.GPU_OUT_OF_MEMORY, EndReason.HOST_OUT_OF_MEMORY):
        return None
    newest = training.newest_checkpoint()
    for number in training.plan.fallbacks_below(current, host=end is EndReason.HOST_OUT_OF_MEMORY):
        choice = training.plan.at(number).choice
        if newest is None:
            return number
        record, checkpoint = newest
        found = route(record.strategy, record.world_size, choice.strategy, choice.world_size)
        if isinstance(found, Route):
            return number
        logger.info("Skipping fallback %d (%s) for %s: %s.", number, choice.strategy, checkpoint.name, found)
    return None
