"""A merged model has the base model's own files, by name, and nothing else of any folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import utils

from shardmake.consolidate.aux_files import copy_aux_files, find_aux_files
from shardmake.core.errors import ModelError

PROCESSOR = [
    utils.PROCESSOR_NAME, utils.IMAGE_PROCESSOR_NAME, utils.VIDEO_PROCESSOR_NAME, utils.FEATURE_EXTRACTOR_NAME,
    utils.AUDIO_TOKENIZER_NAME,
]  # fmt: skip
"""The files of a composite's processor beside its chat template."""
PUBLISHED = {
    "tokenizer.json": '{"model": {"vocab": {"a": 0, "b": 1}, "merges": ["a b"]}, "added_tokens": []}',
    "vocab.json": '{"a": 0, "b": 1}', "merges.txt": "#version: 0.2\na b\n",
    "tokenizer_config.json": '{"chat_template": "{{ messages }}", "model_max_length": 131072}',
    "generation_config.json": '{"temperature": 0.7, "transformers_version": "4.37.0"}',
    **dict.fromkeys(PROCESSOR, "{}"), "LICENSE": "Apache", "NOTICE.txt": "by the lab", "licence.md": "terms",
}  # fmt: skip
RESAVED = {
    "tokenizer.json": '{"model": {"vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}, "added_tokens": []}',
    "tokenizer_config.json": '{"backend": "tokenizers"}',
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"transformers_version": "5.23.0"}',
}
OTHERS = ("README.md", "settings.py", "train.py", "secret.model", "notes.tiktoken", "licenses.py", ".env", "model.bin")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with ``base`` (as published) and ``trained`` (as transformers saves it again)."""
    write(tmp_path / "base", {"config.json": '{"use_cache": true}', **PUBLISHED, **dict.fromkeys(OTHERS, "x")})
    write(tmp_path / "trained", {"config.json": '{"use_cache": false}', **RESAVED, **dict.fromkeys(OTHERS, "x")})
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def copied(place: Path, *, base: bool = True, **settings: Any) -> dict[str, str]:
    target = place / "model"
    copy_aux_files(place / "base" if base else None, [place / "trained"], target, ["BF16"], **settings)
    return {str(path.relative_to(target)): path.read_text() for path in sorted(target.rglob("*")) if path.is_file()}


def test_files_are_those_of_the_base_model(place: Path) -> None:
    """As with Qwen2: transformers 5 saves neither vocab.json nor merges.txt again."""
    found = copied(place)
    assert json.loads(found.pop("config.json")) == {"use_cache": True, "dtype": "bfloat16"} and found == PUBLISHED


def test_without_a_base_model_only_the_config_is_written(place: Path) -> None:
    assert copied(place, base=False).keys() == {"config.json"}


def test_code_is_copied_only_if_it_is_trusted(place: Path) -> None:
    (place / "base" / "zero_to_fp32.py").touch()
    assert copied(place, code=True).keys() == {"config.json", *PUBLISHED, "settings.py", "train.py", "licenses.py"}


def test_adapter_gets_the_tokenizer_alone(place: Path) -> None:
    (place / "trained" / "adapter_config.json").write_text('{"r": 4}')
    found = copied(place, adapter=place / "trained" / "adapter_config.json", code=True)
    assert json.loads(found.pop("adapter_config.json")) == {"r": 4, "inference_mode": True}
    assert found.keys() == {"tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"}


CLASSIFIER = '{"architectures": ["LlamaForSequenceClassification"]}'


@pytest.mark.parametrize(("config", "base", "expected"), [
    (CLASSIFIER, "tokenizer_config.json", "</s>"), (CLASSIFIER, "special_tokens_map.json", None),
    ('{"architectures": ["LlamaForCausalLM"]}', "tokenizer_config.json", None),
], ids=["new", "base has one", "not a classifier"])  # fmt: skip
def test_a_classifier_keeps_its_padding_token(place: Path, config: str, base: str, expected: str | None) -> None:
    write(place / "trained", {"config.json": config, "tokenizer_config.json": '{"pad_token": "</s>"}'})
    write(
        place / "base", {base: '{"pad_token": {"content": "<pad>"}}' if base.startswith("special") else PUBLISHED[base]}
    )
    found = copied(place)
    assert json.loads(found["tokenizer_config.json"]).get("pad_token") == expected
    assert expected is not None or found["tokenizer_config.json"] == PUBLISHED["tokenizer_config.json"]


def test_missing_code_is_reported(place: Path) -> None:
    write(place / "trained", {"config.json": '{"auto_map": {"AutoConfig": "settings.Config"}}'})
    (change,) = copy_aux_files(place / "base", [place / "trained"], place / "model", ["BF16"])
    assert "not copied without --trust-remote-code" in change


@pytest.mark.parametrize("trained", [
    {"tokenizer.json": '{"model": {"vocab": {"a": 0, "b": 1, "c": 2}}}'},
    {"tokenizer.json": '{"model": {"vocab": {"a": 1, "b": 0}}}'},
    {"tokenizer.json": '{"model": {"vocab": [["a", -1], ["b", -2], ["c", -3]]}}'},
    {"added_tokens.json": '{"<user>": 2}'},
    {"tokenizer_config.json": '{"added_tokens_decoder": {"2": {"content": "<user>"}}}'},
    {"tokenizer.json": '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "<user>", "id": 2}]}'},
])  # fmt: skip
def test_changed_tokenizer_is_kept(place: Path, trained: dict[str, str]) -> None:
    write(place / "trained", trained)
    found = copied(place)
    assert {name: found[name] for name in RESAVED if name != "generation_config.json"} == {
        name: text for name, text in (RESAVED | trained).items() if name in RESAVED and name != "generation_config.json"
    }
    assert "vocab.json" not in found and found["generation_config.json"] == PUBLISHED["generation_config.json"]


@pytest.mark.parametrize("published", ["vocab.json", "tokenizer_config.json", "tokenizer.json"])
def test_tokens_of_the_base_model_are_found_where_they_are(place: Path, published: str) -> None:
    """A token that is not in tokenizer.json of the base model, but in another of its files, was not added."""
    if published == "vocab.json":
        (place / "base" / "tokenizer.json").unlink()
    token = '{"added_tokens_decoder": {"2": {"content": "<end>"}}}'
    write(place / "base", {published: token if published == "tokenizer_config.json" else PUBLISHED[published]})
    if published == "tokenizer_config.json":
        added = '{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "<end>", "id": 2}]}'
        write(place / "trained", {"tokenizer.json": added})
    assert copied(place)["merges.txt"] == PUBLISHED["merges.txt"]


def test_binary_vocabulary_and_another_size(place: Path) -> None:
    for name in ("tokenizer.json", "vocab.json"):
        (place / "base" / name).unlink()
    write(place / "base", {"tokenizer.model": "sentencepiece", "config.json": '{"vocab_size": 2}'})
    write(place / "trained", {"config.json": '{"vocab_size": 2}'})
    assert "tokenizer.json" not in copied(place)
    write(place / "trained", {"config.json": '{"vocab_size": 3}'})
    assert copied(place)["tokenizer.json"] == RESAVED["tokenizer.json"]


@pytest.mark.parametrize(("base", "changed"), [
    ({"tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, False),
    ({"tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "{{ messages }}"}]}'}, False),
    ({"tokenizer_config.json": "{}", "chat_template.json": '{"chat_template": "{{ messages }}"}'}, False),
    ({"tokenizer_config.json": '{"chat_template": "old"}'}, True),
    ({"tokenizer_config.json": '{"chat_template": "{{ messages }}"}', "chat_template.jinja": "old"}, True),
    ({"tokenizer_config.json": "{}"}, True),
])  # fmt: skip
def test_changed_chat_template_is_kept(place: Path, base: dict[str, str], changed: bool) -> None:
    write(place / "base", base)
    found = copied(place)
    assert found.get("chat_template.jinja") == ("{{ messages }}" if changed else base.get("chat_template.jinja"))
    assert found["tokenizer_config.json"] == base["tokenizer_config.json"]


@pytest.mark.parametrize("folder", ["base", "trained"])
@pytest.mark.parametrize(("name", "target"), [
    ("tokenizer.json", "secret"), ("config.json", "secret"), ("additional_chat_templates", "secrets"),
])  # fmt: skip
def test_no_link_is_followed_out_of_its_folder(place: Path, folder: str, name: str, target: str) -> None:
    write(place, {"secret": '{"password": "x"}', "secrets/own.jinja": "password"})
    (place / folder / name).unlink(missing_ok=True)
    (place / folder / name).symlink_to(place / target)
    if folder == "trained" and name == "additional_chat_templates":
        assert not any("password" in text for text in copied(place).values())
        return
    if folder == "base" and name == "config.json":
        (place / "trained" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"is a link to .*secret.*, outside of its folder"):
        copied(place)


def test_links_of_the_hub_cache_and_to_the_base_folder_are_followed(place: Path) -> None:
    blobs = place / "models--lab--base" / "blobs"
    snapshot = place / "models--lab--base" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (place / "base").rename(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    (place / "base").symlink_to(snapshot)
    found = copied(place)
    assert {name: found[name] for name in PUBLISHED} == PUBLISHED
    write(place, {"secret": "x"})
    (snapshot / "dict.txt").symlink_to(place / "secret")
    with pytest.raises(ModelError, match="outside of its folder"):
        copied(place)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
@pytest.mark.parametrize("text", ["", "[]", "3", "[" * 100_000, '{"model": 3}', '{"model": {"vocab": 3}}', "\x00"])
def test_damaged_json_is_an_error_or_not_needed(place: Path, name: str, text: str) -> None:
    write(place / "trained", {name: text})
    try:
        copied(place)
    except ModelError as error:
        assert str(place / "trained") in str(error)


def test_secrets_are_looked_for_in_the_code_as_well(place: Path) -> None:
    names = {path.name for path in find_aux_files(place / "base")}
    assert {"config.json", "settings.py", "tokenizer.json"} <= names and "secret.model" not in names
