"""The auxiliary files of a merged model: config, tokenizer, chat template, generation config, processor, licence, code.

The config comes from the checkpoint. The others are the base model's own files, byte for byte, because transformers
saves a tokenizer in other files than it was published in. A tokenizer or chat template that the training changed comes
from the checkpoint. Files are copied by name, and no link is followed out of its folder.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shardmake.checkpoint.formats.dtypes import CONVERTIBLE, ITEM_SIZE, torch_name
from shardmake.checkpoint.formats.huggingface import is_licence
from shardmake.core.atomic import write_bytes, write_json, write_text
from shardmake.core.errors import ModelError
from shardmake.core.run_folder import make_folder

_OBJECT = TypeAdapter(dict[str, Any])
_CONFIG = "config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_TEMPLATES = "additional_chat_templates"
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "tokenizer.model.v3", "tekken.json", "spiece.model", "spm.model",
    "sentencepiece.model", "sentencepiece.bpe.model", "spm_char.model", "source.spm", "target.spm", "bpe.codes",
    "dict.txt", "emoji.json", "entity_vocab.json", "normalizer.json", "target_vocab.json", "vocab-src.json",
    "vocab-tgt.json", "tiktoken.model", "qwen.tiktoken", _TEMPLATE, "chat_template.json",
)  # fmt: skip
"""Names of the vocabularies of transformers' tokenizers, and of those whose code is published with the model."""
_OTHERS = (
    "generation_config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "audio_tokenizer_config.json",
)  # fmt: skip
AUX_FILES = [_CONFIG, *_TOKENIZER, *_OTHERS, f"{_TEMPLATES}/*.jinja", "*.py", "LICEN[CS]E*", "NOTICE*", "USE_POLICY*"]
"""Patterns of all files of a model except its weights and their index."""
_TRAINING_SCRIPTS = {"zero_to_fp32.py", "zero_to_torch.py"}  # DeepSpeed writes them beside every checkpoint


def find_aux_files(folder: Path) -> list[Path]:
    """Return the config and every auxiliary file in ``folder``, the code included."""
    return [*filter(Path.is_file, [folder / _CONFIG]), *_files(folder, code=True)]


def copy_aux_files(
    base: Path | None,
    trained: Sequence[Path],
    target: Path,
    dtypes: Iterable[str],
    *,
    adapter: Path | None = None,
    code: bool = False,
    untie: bool = False,
) -> list[str]:
    """Write the config and the auxiliary files to ``target``.

    Return one sentence for each difference from the base model's files.

    Args:
        base: The base model's folder; None: write the config only.
        trained: The checkpoint's folders.
        target: The merged model's folder.
        dtypes: The types of the merged tensors; the config declares the widest floating one.
        adapter: The adapter_config.json to copy instead of a model's config, if an adapter is written alone.
        code: Copy the base model's code as well.
        untie: Declare that the model ties no weights.

    Raises:
        ModelError: No folder holds a config.json, or a file is not readable or is a link to another folder.
    """
    make_folder(target)
    if adapter is None:
        config = _config([*trained, *([base] if base else [])], dtypes)
        write_json(target / _CONFIG, _without_ties(config) if untie else config)
    else:
        write_json(target / adapter.name, {**read_object(adapter), "inference_mode": True})
    if base is None:
        return []
    tokenizer = find_changed_tokenizer(base, trained)
    for folder in (base, tokenizer) if tokenizer is not None else (base,):
        for path in _files(folder, code=code and folder == base and adapter is None):
            is_tokenizer = path.name in _TOKENIZER or path.parent != folder
            if folder == (tokenizer or base) if is_tokenizer else (folder == base and adapter is None):
                copy = target / path.relative_to(folder)
                write_bytes(copy, _own_file(folder, path).read_bytes())
    changes = [] if tokenizer is None else [f"The training added tokens: the tokenizer is that of {tokenizer}."]
    template = next((one for one in map(_template, trained) if one is not None), None)
    if template is not None and template != _template(base):
        write_text(target / _TEMPLATE, template)
        changes.append("The training changed the chat template: the model has the new one.")
    if adapter is None and (token := find_new_padding(base, trained)) is not None:
        path = target / _TOKENIZER_CONFIG
        write_json(path, {**_read_if_exists(target, path.name), "pad_token": token})
        changes.append(f"The model finds the end of a sequence by its padding: the tokenizer pads with {token!r} now.")
    if adapter is None and not code and "auto_map" in read_object(target / _CONFIG):
        changes.append("config.json names code of the base model, which is not copied without --trust-remote-code.")
    return changes


def _files(folder: Path, *, code: bool) -> Iterator[Path]:
    """Yield the auxiliary files in ``folder``, the config excepted."""
    names = {*_TOKENIZER, *_OTHERS}
    for path in sorted(folder.iterdir()):
        is_code = path.suffix == ".py" and path.name not in _TRAINING_SCRIPTS
        if (path.name in names or is_licence(path.name) or (code and is_code)) and path.is_file():
            yield path
    if (folder / _TEMPLATES).is_dir():
        yield from sorted((folder / _TEMPLATES).glob("*.jinja"))


def _own_file(folder: Path, path: Path) -> Path:
    """Return ``path``; raise `ModelError` if it is a link out of ``folder``, except to the blobs of the hub's cache."""
    root, real = folder.resolve(), path.resolve()
    is_blob = root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs"
    if real.is_relative_to(root) or is_blob:
        return real
    raise ModelError(
        f"Cannot copy {path}. It is a link to {real}, outside of its folder, and a merge publishes no such file. "
        "Replace the link by the file, or name the folder with the files themselves."
    )


def find_changed_tokenizer(base: Path, trained: Sequence[Path]) -> Path | None:
    """Return the folder of ``trained`` whose tokenizer has tokens that the base model's does not have.

    If the base model's tokens are in a binary file, the tokenizer counts as changed if the vocabulary's size is.
    """
    theirs = _tokens(base)
    for folder in trained:
        ours, sizes = _tokens(folder), [_read_if_exists(it, _CONFIG).get("vocab_size") for it in (folder, base)]
        if any(theirs.get(token) != number for token, number in ours.items()) and (theirs or sizes[0] != sizes[1]):
            return folder
    return None


def _tokens(folder: Path) -> dict[str, int]:
    """Return the tokens and their numbers from the JSON files of a tokenizer; empty without such a file."""
    try:
        found: dict[str, int] = {}
        whole = _read_if_exists(folder, "tokenizer.json")
        vocabulary = (whole.get("model") or {}).get("vocab") or _read_if_exists(folder, "vocab.json")
        if isinstance(vocabulary, list):  # Unigram: pairs of a token and its score, in the order of their numbers
            found |= {entry[0]: number for number, entry in enumerate(vocabulary)}
        else:
            found |= vocabulary
        if not found:
            return {}
        found |= _read_if_exists(folder, "added_tokens.json")
        found |= {token["content"]: token["id"] for token in whole.get("added_tokens") or ()}
        added = _read_if_exists(folder, "tokenizer_config.json").get("added_tokens_decoder") or {}
        return found | {token["content"]: int(number) for number, token in added.items()}
    except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"Cannot read the tokenizer in {folder}: {error}. Copy it again.") from None


def find_new_padding(base: Path, trained: Sequence[Path]) -> str | None:
    """Return the padding token of a trained sequence classifier if the base model's tokenizer has none.

    The classifier reads its score at the last token that is not the padding token of its config.
    """
    classes = {folder: _read_if_exists(folder, _CONFIG).get("architectures") or [""] for folder in trained}
    found = (_padding(folder) for folder, names in classes.items() if names[0].endswith("ForSequenceClassification"))
    token = next((one for one in found if one is not None), None)
    return token if _padding(base) is None else None


def _padding(folder: Path) -> str | None:
    for name in (_TOKENIZER_CONFIG, "special_tokens_map.json"):
        token = _read_if_exists(folder, name).get("pad_token")
        if token is not None:
            return str(token["content"] if isinstance(token, dict) else token)
    return None


def _template(folder: Path) -> str | None:
    """Return the default chat template, from the place that transformers would take it from."""
    path = folder / _TEMPLATE
    if path.is_file():
        return _own_file(folder, path).read_text()
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = _read_if_exists(folder, name).get("chat_template")
        if isinstance(found, list):
            defaults = [one for one in found if isinstance(one, dict) and one.get("name") == "default"]
            found = defaults[0].get("template") if defaults else None
        if found is not None:
            return str(found)
    return None


def _read_if_exists(folder: Path, name: str) -> Mapping[str, Any]:
    path = folder / name
    return read_object(_own_file(folder, path)) if path.is_file() else {}


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file that others wrote; raise `ModelError` for any other content."""
    try:
        return _OBJECT.validate_json(path.read_bytes())
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ModelError(f"Cannot read {path}. It is not a JSON object: {reason}. Copy it again.") from None


def config_folder(sources: Sequence[Path | None]) -> Path:
    """Return the first of ``sources`` with a config.json."""
    return _configs(sources)[0].parent


def _configs(sources: Sequence[Path | None]) -> list[Path]:
    found = [folder / _CONFIG for folder in sources if folder is not None and (folder / _CONFIG).is_file()]
    if not found:
        searched = ", ".join(str(folder) for folder in sources if folder is not None) or "the adapter's folder"
        raise ModelError(
            f"There is no config.json in {searched}. Name the base model with --base, or write the weights alone with "
            "--raw."
        )
    return found


def _config(sources: Sequence[Path], dtypes: Iterable[str]) -> dict[str, Any]:
    found = [read_object(_own_file(path.parent, path)) for path in _configs(sources)]
    config, last = found[0], found[-1]
    _set_dtype(config, widest(dtypes))
    # The training switches the cache off. QLoRA trains in 4 bits, and the adapter is added to the base model itself.
    for key in ("use_cache", "quantization_config"):
        config.pop(key, None)
        config |= {key: last[key]} if key in last else {}
    return config


def _without_ties(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with no tied embeddings, also in the configs of sub-models."""
    models = {key for key, value in config.items() if isinstance(value, dict) and "model_type" in value}
    parts = {key: _without_ties(value) if key in models else value for key, value in config.items()}
    return {**parts, "tie_word_embeddings": False}


def widest(dtypes: Iterable[str]) -> str:
    """Return the widest floating type of ``dtypes``, float32 without one."""
    floating = CONVERTIBLE & set(dtypes)
    return max(floating, key=lambda dtype: (ITEM_SIZE[dtype], dtype), default="F32")


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Write the type as transformers 5 does, also in the configs of sub-models that declare one."""
    config.pop("torch_dtype", None)
    config["dtype"] = torch_name(dtype)
    for value in config.values():
        if isinstance(value, dict) and {"dtype", "torch_dtype"} & set(value):
            _set_dtype(value, dtype)
