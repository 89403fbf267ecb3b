"""Write the inputs of ``examples``: conversations in two spellings, and pairs of answers that prefer one.

The conversations answer a request with the options of sbatch, at random in long (``--nodes=2``) or short spelling
(``-N2``). Both answers of a pair are right, and the chosen one is short.
"""

import logging
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardmake.core.atomic import write_text
from shardmake.demo.inputs import Conversation, as_jsonl, make_base
from shardmake.demo.requests import Request, make_requests

logger = logging.getLogger(__name__)
CONVERSATIONS, PAIRS, EVALUATION = 4000, 800, 100
"""Examples; `EVALUATION` conversations and as many pairs are held out."""


def make_preferences(folder: Path = Path("resources/preferences"), seed: int = 0) -> None:
    """Write ``train.jsonl``, ``eval.jsonl``, ``pairs.jsonl``, ``held-out-pairs.jsonl`` and ``base`` into ``folder``.

    No request is in two of these files. ``held-out-answers.jsonl`` has the chosen answers of the held-out
    pairs. The files are equal as those of `shardmake.demo.inputs.make_inputs`.
    """
    rng = random.Random(seed)
    requests = iter(make_requests(CONVERSATIONS + PAIRS + 2 * EVALUATION, rng))

    def take(count: int) -> Iterable[Request]:
        return (next(requests) for _ in range(count))

    def conversations(count: int) -> list[Conversation]:
        spellings = ((request, rng.choice([request.options(), request.short_options()])) for request in take(count))
        return [request.conversation(rng, answer) for request, answer in spellings]

    train = conversations(CONVERSATIONS)
    write_text(folder / "train.jsonl", as_jsonl(train))
    write_text(folder / "eval.jsonl", as_jsonl(conversations(EVALUATION)))
    write_text(folder / "pairs.jsonl", as_jsonl(_pair(request, rng) for request in take(PAIRS)))
    held_out = [_pair(request, rng) for request in take(EVALUATION)]
    write_text(folder / "held-out-pairs.jsonl", as_jsonl(held_out))
    answers = ({"messages": [*pair["prompt"], *pair["chosen"]]} for pair in held_out)
    write_text(folder / "held-out-answers.jsonl", as_jsonl(answers))
    logger.info(f"demo: {CONVERSATIONS:,} conversations and {PAIRS:,} pairs in {folder}")
    make_base(folder / "base", train, seed)


def _pair(request: Request, rng: random.Random) -> dict[str, Any]:
    prompt, chosen = request.conversation(rng, request.short_options())["messages"]
    return {"prompt": [prompt], "chosen": [chosen], "rejected": [{**chosen, "content": request.options()}]}
