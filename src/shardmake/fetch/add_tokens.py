"""Write a base model with new tokens: in its tokenizer, its input embedding, its output head and its config.

transformers' own `resize_token_embeddings` makes the rows, on a model of which these weights alone are in memory. The
rows are drawn around the mean of the others (``mean_resizing``), with the seed `SEED`. All else is copied as it is.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardmake.checkpoint.formats import huggingface
from shardmake.checkpoint.formats.contents import StoredTensor
from shardmake.checkpoint.formats.hub_layout import hub_weights, renamed
from shardmake.core.errors import ConfigError, ModelError
from shardmake.core.units import plural
from shardmake.fetch.copied_base import copy_small_files, new_model, reader, refuse_existing, write_weights
from shardmake.memory.parameter_inventory import build
from shardmake.memory.read_config import read_model
from shardmake.run.model_class import TIE

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
SEED: Final = 0


def add_tokens(
    source: Path, out: Path, tokens: Sequence[str], *, special: bool = False, trust_remote_code: bool = False
) -> None:
    """Write the model in the folder ``source`` to the new folder ``out`` with the ``tokens`` that it does not have.

    Rows that the embedding has beyond the tokenizer are taken first, with the values that they have.
    A `ModelError` is raised if the tokenizer does not keep the tokens, or transformers would resize further weights.
    """
    from transformers import AutoTokenizer

    refuse_existing(out)
    if huggingface.find_weight_files(source) is not huggingface.MODEL:
        raise _unknown(source, "its weights are not safetensors")
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    before = tokenizer.get_vocab()
    new = [token for token in dict.fromkeys(tokens) if token not in before]
    if known := [token for token in dict.fromkeys(tokens) if token in before]:
        logger.info("The tokenizer has %s already: %s.", plural(len(known), "token"), ", ".join(known))
    if not new:
        raise ConfigError(f"Nothing to add: the tokenizer of {source} has all these tokens. Use {source} as the model.")
    tokenizer.add_tokens(new, special_tokens=special)
    size = max(tokenizer.get_vocab().values()) + 1
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    if read_model(str(source), trust_remote_code=trust_remote_code).untied:
        config[TIE] = False  # transformers' resize would tie the head again
    tensors = huggingface.read(source).tensors
    made, changed = _resized(source, config, tensors, size, trust_remote_code)
    config |= {key: value for key, value in changed.items() if key in config}
    (config.get("text_config") or config).update(changed)
    largest = max((tensor.nbytes for tensor in made.values()), default=0)
    bytes_needed = sum(tensor.nbytes for tensor in tensors.values()) + sum(tensor.nbytes for tensor in made.values())
    with new_model(out, bytes_needed, largest) as staging, reader(tensors) as read:
        tokenizer.save_pretrained(staging)
        write_weights(staging, [((name, made[name] if name in made else read(name)) for name in tensors)])
        copy_small_files(source, staging, config)
        _check(staging, source, tokenizer.get_vocab(), new, size if made else None, trust_remote_code)
    rows = f"{size:,} rows of {', '.join(made)}" if made else "no new rows: those of padding stay as they are"
    logger.info("Wrote %s: %s with %s, and %s.", out, source, plural(len(new), "new token"), rows)


def _check(
    folder: Path, source: Path, vocabulary: Mapping[str, int], new: Sequence[str], size: int | None, remote_code: bool
) -> None:
    """Raise `ModelError` unless ``folder`` has the ``vocabulary``, and a config of ``size`` words if that is given."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=remote_code)
    lost = [token for token in new if vocabulary[token] not in tokenizer.encode(token, add_special_tokens=False)]
    if lost or tokenizer.get_vocab() != vocabulary:
        raise _unknown(source, f"its tokenizer does not keep {(lost or new)[0]!r}")
    text = AutoConfig.from_pretrained(folder, trust_remote_code=remote_code).get_text_config()
    if size not in (None, text.vocab_size):
        raise _unknown(source, f"the place of vocab_size in its config.json is not known, {text.vocab_size} is left")


def named_tokens(given: Sequence[str] | None, out: Path | None, *, special: bool) -> list[str]:
    """Return the tokens of the options --token, those of a file for one with an @.

    Raises `ConfigError` if the options do not belong together, or a file cannot be read.
    """
    if bool(given) != bool(out) or (special and not given):
        raise ConfigError("--add-tokens FOLDER and --token go together, and --special with both. Set or remove them.")
    found: list[str] = []
    for text in given or ():
        try:
            is_file = text.startswith("@")
            lines = Path(text[1:]).read_text(encoding="utf-8-sig").splitlines() if is_file else [text]
            found += filter(None, lines)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--token {text}: {error}. Name a file; a token with an @ goes into one.") from None
    return found


def _resized(
    source: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], size: int, trust_remote_code: bool
) -> "tuple[dict[str, Tensor], dict[str, Any]]":
    """Return the weights of ``size`` rows by their names in the files, and changes of the text's config, if needed."""
    import torch

    model: Any = build(config, str(source / "config.json"), trust_remote_code)
    layout: Any = renamed(hub_weights(model, tensors.keys()))
    before = dict(model.named_parameters(remove_duplicate=False))
    names = {name: layout.get(name, name) for name in before if layout.get(name, name) in tensors}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows, width = embedding.weight.shape
    if head is not None and head.weight.shape != (rows, width):
        raise _unknown(source, f"its head is {list(head.weight.shape)} and its embedding {[rows, width]}")
    if size <= rows:
        return {}, {}
    ends = [part for part in model.modules() if isinstance(part, torch.nn.Embedding) or part is head]
    wanted = {id(parameter) for part in ends for parameter in part.parameters()}
    with reader(tensors) as read:
        held = {name: read(names[name]) for name in names if id(before[name]) in wanted}
    model.load_state_dict(held, strict=False, assign=True)
    model.tie_weights()
    text = model.config.get_text_config()
    sizes = text.to_dict()
    torch.manual_seed(SEED)
    model.resize_token_embeddings(size)
    after = dict(model.named_parameters(remove_duplicate=False))
    made = {names[n]: after[n].detach().clone() for n in names if after[n].shape != before[n].shape}
    unused = tensors.keys() - names.values()  # those of layers for multi-token prediction, for example
    others = sorted(name for name in unused if tensors[name].shape == (rows, width))
    if others or any(tensor.is_meta for tensor in made.values()):
        raise _unknown(source, f"transformers does not resize {(others or list(made))[0]}")
    return made, {key: value for key, value in text.to_dict().items() if value != sizes.get(key)}


def _unknown(source: Path, why: str) -> ModelError:
    return ModelError(f"Cannot add tokens to {source}: {why}. Resize it with the model's own code, and save it.")
