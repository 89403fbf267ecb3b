"""Tasks of EleutherAI's evaluation harness (``lm_eval``), if its package is installed."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shardmake.config.models import Evaluation
from shardmake.core.errors import ConfigError, DataError, nearest
from shardmake.evaluate.scores import smaller_after_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LENGTH = 2048  # tokens; few texts of a task are longer


def prepare_tasks(evaluation: Evaluation) -> None:
    """Load the configured tasks, which downloads their data if there is internet access.

    Raises `ConfigError` or `DataError` if the package is not installed, a task is unknown, or its data is missing.
    """
    if not evaluation.lm_eval:
        return
    manager = _manager(evaluation)
    for name in evaluation.lm_eval:
        if name not in manager.all_tasks:
            raise ConfigError(f"evaluation.lm_eval: unknown task {name!r}.{nearest(name, manager.all_tasks)}")
    try:
        manager.load(list(evaluation.lm_eval))
    except (OSError, ValueError) as error:  # datasets raises these for data that is neither cached nor reachable
        raise DataError(
            f"Cannot read the data of the lm_eval tasks {', '.join(evaluation.lm_eval)}: {error}\n"
            "Run `shardmake fetch` for this run on a machine with internet access."
        ) from error


def _manager(evaluation: Evaluation) -> Any:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ConfigError(
            "evaluation.lm_eval names tasks, but the package lm_eval is not installed. "
            "Install it (pip install lm_eval), or remove the key."
        ) from None
    return TaskManager(include_path=evaluation.lm_eval_path)


def measure_tasks(
    network: "PreTrainedModel", tokenizer: Path, evaluation: Evaluation, batch_tokens: int
) -> dict[tuple[str, str], float | None]:
    """Return the results of the configured tasks by lm_eval's task and metric names, without standard errors.

    A result that is not a finite number, such as the perplexity of a loss above 709 nats, is None.
    lm_eval takes a number of sequences for a pass: as many as have ``batch_tokens`` tokens, if most are short.
    """
    if not evaluation.lm_eval:
        return {}
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    sequences = max(1, batch_tokens // _LENGTH)
    language_model = HFLM(pretrained=network, tokenizer=AutoTokenizer.from_pretrained(tokenizer), batch_size=sequences)
    with smaller_after_out_of_memory(sequences, _LENGTH), _overflow_to_infinity():
        found = simple_evaluate(
            model=language_model,
            tasks=list(evaluation.lm_eval),
            task_manager=_manager(evaluation),
            limit=evaluation.lm_eval_limit,
            bootstrap_iters=0,
            log_samples=False,
        )
    return {
        (task, metric.removesuffix(",none")): float(value) if math.isfinite(value) else None
        for task, metrics in found["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and "stderr" not in metric and metric != "sample_len"
    }


@contextmanager
def _overflow_to_infinity() -> Iterator[None]:
    """Let lm_eval's perplexities be infinite if they overflow; its `math.exp` would end the evaluation."""
    from lm_eval.api import metrics

    def exp(value: float) -> float:
        try:
            return math.exp(value)
        except OverflowError:
            return math.inf

    metrics.math = SimpleNamespace(**{**vars(math), "exp": exp})
    try:
        yield
    finally:
        metrics.math = math
