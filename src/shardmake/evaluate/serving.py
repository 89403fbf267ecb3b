"""A smoke test of serving: vLLM loads the final model and answers the prompts.

vLLM runs in a process of its own, which frees the GPUs when it ends. Greedy answers of vLLM and transformers may differ
after some tokens, because their kernels round differently; so equal answers are counted and not demanded.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardmake.config.models import Evaluation, Run
from shardmake.core.errors import ConfigError, ModelError
from shardmake.core.library_process import run_module
from shardmake.core.process import NEUTRAL_FOLDER
from shardmake.evaluate.backends import Machine, weights_size
from shardmake.run.evaluation import Served

_SHARE_OF_GPU = 0.6
"""Largest part of a GPU's memory that the weights take before vLLM divides the model over all GPUs of the node."""


def check_serving(evaluation: Evaluation) -> None:
    """Raise a `ConfigError` if the package that is to serve the model is not installed."""
    if evaluation.serve and find_spec(evaluation.serve) is None:
        raise ConfigError(
            f"evaluation.serve: the package {evaluation.serve} is not installed in Shardmake's environment. Install it "
            "there, with the version of torch that it needs, or remove the key."
        )


def serve(run: Run, model: Path, prompts: Sequence[Sequence[int]], machine: Machine) -> list[list[int]]:
    """Return vLLM's greedy answers to ``prompts``, both as token ids.

    Raises `ModelError` with the end of vLLM's output if it cannot load the model or does not answer.
    """
    fits_one = not machine.gpus or weights_size(model) < _SHARE_OF_GPU * machine.gpu_memory
    request = {
        "model": str(model.absolute()),
        "trust_remote_code": run.trust_remote_code,
        "gpus": 1 if fits_one else machine.gpus,
        "prompts": [list(prompt) for prompt in prompts],
        "max_new_tokens": run.evaluation.max_new_tokens,
    }
    try:
        answers: list[list[int]] = run_module(__name__, request, os.environ, NEUTRAL_FOLDER)
    except RuntimeError as error:
        raise ModelError(
            f"The final model cannot be served: {error}\nIt was merged and verified, so it is complete. Install a "
            "version of vllm that knows it, or remove evaluation.serve."
        ) from None
    if silent := sum(not answer for answer in answers):
        raise ModelError(
            f"vllm loads the final model, but answers {silent} of {len(answers)} prompts with nothing. Compare its "
            "version with the model's needs, or remove evaluation.serve."
        )
    return answers


def as_record(engine: str, answers: Sequence[Sequence[int]], of_transformers: Sequence[Sequence[int]]) -> Served:
    """Return how many answers equal those of transformers."""
    equal = sum(list(one) == list(other) for one, other in zip(answers, of_transformers, strict=True))
    return Served(engine=engine, prompts=len(answers), equal=equal)


def answer(request: dict[str, Any]) -> list[list[int]]:
    """Return vLLM's greedy answers to the request's prompts."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=request["model"],
        trust_remote_code=request["trust_remote_code"],
        tensor_parallel_size=request["gpus"],
        seed=0,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    found = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=request["max_new_tokens"]))
    return [list(output.outputs[0].token_ids) for output in found]
