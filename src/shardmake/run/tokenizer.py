"""The tokenizer of a run's model, with what its files state beside it: tokens that stop generation, the vocabulary."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from shardmake.config.chat_template import read_template
from shardmake.config.models import Run
from shardmake.config.objectives import OBJECTIVES
from shardmake.core.atomic import digest
from shardmake.core.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)


def load_tokenizer(run: Run) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the run's model, with the run's chat template if it has one.

    Raises `ModelError` if the tokenizer cannot be loaded or lacks a token that the objective needs, and `ConfigError`
    if the template cannot be loaded.
    """
    named = {"revision": run.revision, "trust_remote_code": run.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(run.model, **named)
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot load the tokenizer of {run.model!r}: {error}") from None
    except Exception:
        load_config(run)  # transformers reads it first; its error has advice
        raise
    if OBJECTIVES[run.objective].new_head and tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ModelError(
            f"Cannot train {run.model!r} with objective: {run.objective}. A reward model finds the end of a sequence "
            "by its padding, and the tokenizer has neither a padding nor an end-of-sequence token. Set pad_token in "
            "tokenizer_config.json."
        )
    if run.data.chat_template is not None:
        tokenizer.chat_template = read_template(Path(run.data.chat_template))
    token_rows(tokenizer, run.lora.train_tokens)
    return tokenizer


def token_rows(tokenizer: Any, tokens: Sequence[str]) -> list[int]:
    """Return the id of each of ``tokens``; raise `ConfigError` for one that the tokenizer does not have."""
    known = tokenizer.get_vocab() if tokens else {}
    if missing := [token for token in tokens if token not in known]:
        raise ConfigError(
            f"lora.train_tokens: the tokenizer does not have {', '.join(map(repr, missing))}. Correct it, or add it to "
            "a copy of the base: shardmake fetch NAME --add-tokens FOLDER --token TOKEN, then set model: FOLDER."
        )
    return [known[token] for token in dict.fromkeys(tokens)]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of all that determines token ids: vocabulary and rules, special tokens, chat template."""
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.get_vocab()
    return digest({"rules": rules, "special": tokenizer.special_tokens_map, "template": tokenizer.chat_template})


def stop_ids(run: Run) -> set[int]:
    """Return the tokens at which generation with the run's model stops, as far as its files state them."""
    try:
        found = GenerationConfig.from_pretrained(run.model, revision=run.revision).eos_token_id
    except (OSError, ValueError) as error:  # many base models have no such file
        if Path(run.model, "generation_config.json").exists():
            raise ModelError(f"Cannot read generation_config.json of {run.model!r}: {error}") from None
        return set()
    return set(found) if isinstance(found, list) else {found}


def load_config(run: Run) -> Any:
    """Return the config of the run's model; raise `ModelError` if transformers rejects it."""
    try:
        return AutoConfig.from_pretrained(run.model, revision=run.revision, trust_remote_code=run.trust_remote_code)
    except OSError as error:
        raise ModelError(f"Cannot load the config.json of {run.model!r}: {error}") from None
    except Exception as error:  # a config class may raise anything for unusual values
        raise ModelError(
            f"transformers rejects the config.json of {run.model!r}: {' '.join(str(error).split())}. Use the "
            "config.json that came with the weights, or the version of transformers that wrote it."
        ) from None


def check_vocabulary(run: Run, largest: int) -> None:
    """Raise `ModelError` for token ids beyond the embedding: every rank would fail with an index error."""
    size = load_config(run).get_text_config().vocab_size
    if largest >= size:
        raise ModelError(
            f"The tokenizer of {run.model!r} produces token id {largest}, but the model's vocab_size is {size}. "
            "Tokenizer and model do not match, or the embedding was not resized for added tokens. Fix the model folder."
        )


def compare_with_file(tokenizer: PreTrainedTokenizerBase, model: str, texts: Iterable[tuple[str, str]]) -> None:
    """Log a warning if one of ``texts``, each after its place, has other tokens by the file of ``model``.

    For some types of models transformers replaces the file's rules. Servers that read the file then differ from the
    training, and so does the base model if its own training read the file.
    """
    path = Path(model, "tokenizer.json")
    if not path.is_file():
        return
    file = Tokenizer.from_file(str(path))
    file.no_truncation()
    file.no_padding()
    for place, text in texts:
        by_file = file.encode(text, add_special_tokens=False)
        loaded = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if by_file.ids != loaded:
            logger.warning(
                f"The tokenizer of {model} is not that of its tokenizer.json. {place}: a text has {len(loaded):,} "
                f"tokens as transformers loads it ({type(tokenizer).__name__}), and {len(by_file.ids):,} by the file. "
                "Training, evaluation and servers with transformers use the former; llama.cpp and others read the "
                "file. If the base was trained with the former, save it into a copy of the base "
                "(AutoTokenizer.from_pretrained, save_pretrained) and name the copy. Otherwise take a base whose "
                "tokenizer transformers loads unchanged."
            )
            return
