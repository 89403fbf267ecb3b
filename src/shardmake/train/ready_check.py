"""The checks of one rank between loading and the first step."""

from typing import Any

from shardmake.data.dataset import Collator, check_isolation
from shardmake.run.attempt import rank_report
from shardmake.train.engine_check import check_engine, describe_engine, environment_report
from shardmake.train.rank_context import RankContext


def check_ready(context: RankContext, model: Any, precision: str, collator: Collator, device: Any) -> None:
    """Write this rank's report before the first step, and raise if the engine or the data isolation is not as planned.

    ``model`` is already wrapped by its engine; ``precision`` is Accelerate's name of the compute data type.
    """
    found = describe_engine(model, precision)
    rank_report(context.folder, context.rank, environment_report() | found)
    check_engine(found, context.settings.expected.as_json())
    check_isolation(model, collator, device)
