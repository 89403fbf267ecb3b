"""Tasks of EleutherAI's evaluation harness (``lm_eval``), where its package is installed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.config.models import Evaluation
from shardmake.core.errors import ShardmakeError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare_tasks(evaluation: Evaluation) -> None:
    """Load the configured tasks, which fetches their data where there is internet.

    Raises `ShardmakeError` where the package is not installed, a task is not known, or its data is not here.
    """
    if evaluation.lm_eval:
        _load(evaluation)


def _load(evaluation: Evaluation) -> dict[str, Any]:
    manager = _manager(evaluation)
    for name in evaluation.lm_eval:
        if name not in manager.all_tasks:
            raise ShardmakeError(f"lm_eval has no task {name!r}.{nearest(name, manager.all_tasks)}")
    from lm_eval.tasks import get_task_dict

    try:
        return dict(get_task_dict(list(evaluation.lm_eval), manager))
    except (OSError, ValueError) as error:  # what datasets raises for data that is neither here nor reachable
        raise ShardmakeError(
            f"The data of the lm_eval tasks {', '.join(evaluation.lm_eval)} cannot be read: {error}\n"
            "Run `shardmake fetch` for this run where there is internet."
        ) from error


def _manager(evaluation: Evaluation) -> Any:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ShardmakeError(
            "evaluation.lm_eval names tasks, and the package lm_eval is not installed. "
            "Install it (pip install lm_eval), or take the key out."
        ) from None
    return TaskManager(include_path=evaluation.lm_eval_path)


def measure_tasks(network: "PreTrainedModel", tokenizer: Path, evaluation: Evaluation) -> dict[tuple[str, str], float]:
    """Results of the configured tasks by task and metric, as lm_eval names them; standard errors are left out."""
    if not evaluation.lm_eval:
        return {}
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    language_model = HFLM(
        pretrained=network, tokenizer=AutoTokenizer.from_pretrained(tokenizer), batch_size=evaluation.batch_size
    )
    found = simple_evaluate(
        model=language_model,
        tasks=list(evaluation.lm_eval),
        task_manager=_manager(evaluation),
        limit=evaluation.lm_eval_limit,
        bootstrap_iters=0,
        log_samples=False,
    )
    return {
        (task, metric.removesuffix(",none")): float(value)
        for task, metrics in found["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and "stderr" not in metric and metric != "sample_len"
    }
