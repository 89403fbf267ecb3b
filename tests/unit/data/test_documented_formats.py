"""The page of models and data names what the tables of the code have, and its examples are recognized."""

import json
import re
from pathlib import Path

import pytest

from shardmake.config.formats import COMPRESSION_SUFFIXES, DATA_SUFFIXES, FORMATS
from shardmake.config.models import Data
from shardmake.data.layout import recognize
from shardmake.memory.families import FAMILIES
from tests.mixtures import mixture_configs

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/reference/models-and-data.md").read_text()
KEYS = (ROOT / "config/README.md").read_text()
EXAMPLES = dict(re.findall(r"^\| `([\w-]+)` \| `(\{.*?\})` \|", PAGE, re.MULTILINE))


def test_every_format_has_an_example() -> None:
    assert EXAMPLES.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_recognized_by_its_columns(name: str) -> None:
    example = json.loads(EXAMPLES[name])
    objective = {"preference": "dpo", "unpaired-preference": "kto"}.get(name, "sft")
    layout = recognize(Data(train="x.jsonl"), objective, example, "x.jsonl, line 1")
    assert layout.format == name
    assert layout.standardize(example, "x.jsonl, line 1")


@pytest.mark.parametrize("word", [*FAMILIES, *mixture_configs()])
def test_the_page_names_families(word: str) -> None:
    assert f"`{word}`" in PAGE


@pytest.mark.parametrize("suffix", [*DATA_SUFFIXES, *COMPRESSION_SUFFIXES])
def test_the_page_of_keys_names_kinds_of_files(suffix: str) -> None:
    assert f"`{suffix}`" in KEYS
