"""Try the schedule of the learning rate with its arguments; `check_schedule` runs this module as a process."""

from collections.abc import Mapping
from typing import Any, Final

from shardmake.config.models import Run
from shardmake.core.errors import ConfigError
from shardmake.memory.cache import cached_helper
from shardmake.run.length import planned_rates, warmup_steps

_NEED_ARGUMENTS: Final = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay")
_STEPS: Final = 1000
"""Steps that are assumed if nothing is known of the data."""


def check_schedule(run: Run, steps: int = _STEPS) -> str | None:
    """Return a line with the first, the largest and the last rate of a schedule with arguments; None for the others.

    ``steps`` are estimated for a run with ``epochs``. Raises `ConfigError` if transformers does not build it, a rate
    exceeds the peak, or ``max_steps`` end before the peak.
    """
    rate = run.learning_rate
    if run.script or rate is None or not (run.scheduler_arguments or run.scheduler in _NEED_ARGUMENTS):
        return None
    steps = run.max_steps or steps
    given = ", ".join(f"{name}: {value}" for name, value in run.scheduler_arguments.items())
    request: dict[str, Any] = {"schedule": run.scheduler, "arguments": run.scheduler_arguments, "steps": steps}
    request |= {"rate": rate, "warmup": warmup_steps(run, steps)}
    refused = f"scheduler: {run.scheduler} with scheduler_arguments {{{given}}} cannot train {steps:,} steps: "
    if error := (found := cached_helper(__name__, request, f"Trying scheduler: {run.scheduler}"))["error"]:
        raise ConfigError(f"{refused}{error}. Correct scheduler_arguments.")
    first, peak, last = found["rates"]
    about = "" if run.max_steps else "about "
    shown = f"learning rate {first:.3g} at the first step, {peak:.3g} at most, {last:.3g} at the last of {about}"
    ratio = peak / rate
    if ratio > 1.01 or (run.max_steps and ratio < 0.99):
        way = "above learning_rate" if ratio > 1 else "so it never reaches learning_rate"
        raise ConfigError(f"{refused}{shown}these, {way}. Correct scheduler_arguments.")
    return f"scheduler {run.scheduler} ({given}): {shown}{steps:,} steps"


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first, the largest and the last rate, or the error if transformers does not build the schedule."""
    name, rate, warmup, steps = (request[key] for key in ("schedule", "rate", "warmup", "steps"))
    try:
        rates = planned_rates(name, rate, warmup, steps, request["arguments"], range(steps))
    except Exception as error:  # a schedule's function may raise anything
        return {"error": str(error)}
    return {"error": "", "rates": [rates[0], max(rates), rates[-1]]}
