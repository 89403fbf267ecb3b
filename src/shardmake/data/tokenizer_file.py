"""The tokenizer that transformers makes, compared with the file tokenizer.json from which it makes it."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.data.sources import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def compare_with_file(tokenizer: "PreTrainedTokenizerBase", model: str, rows: Sequence[Row]) -> None:
    """Log a warning if a text of ``rows`` has other tokens by the file of ``model`` than by ``tokenizer``.

    For some types of models transformers replaces the file's rules. Servers that read the file then differ from the
    training, and so does the base model if its own training read the file.
    """
    from tokenizers import Tokenizer

    path = Path(model, "tokenizer.json")
    if not path.is_file():
        return
    file = Tokenizer.from_file(str(path))
    file.no_truncation()
    file.no_padding()
    for row in rows:
        for text in _texts(row.example):
            by_file = file.encode(text, add_special_tokens=False)
            loaded = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if by_file.ids != loaded:
                logger.warning(
                    f"The tokenizer of {model} is not that of its tokenizer.json. {row.place}: a text has "
                    f"{len(loaded):,} tokens as transformers loads it ({type(tokenizer).__name__}), and "
                    f"{len(by_file.ids):,} by the file. Training, evaluation and servers with transformers use the "
                    "former; llama.cpp and others read the file. If the base was trained with the former, save it "
                    "into a copy of the base (AutoTokenizer.from_pretrained, save_pretrained) and name the copy. "
                    "Otherwise take a base whose tokenizer transformers loads unchanged."
                )
                return


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in ``value``, without keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
