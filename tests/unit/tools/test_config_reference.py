"""The generated files are those of the models, and what they show is true."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from shardmake.config.load import parse_config
from shardmake.config.models import Cluster, Config, Section
from tools import config_reference

ROOT = Path(__file__).parents[3]
GENERATED = ("workflow/schemas/config.schema.json", "workflow/schemas/cluster.schema.json", "config/README.md")


def test_generated_files_are_up_to_date(tmp_path: Path) -> None:
    """If this fails: python -m tools.config_reference"""
    config_reference.write(tmp_path)
    for name in GENERATED:
        assert (ROOT / name).read_text() == (tmp_path / name).read_text(), (
            f"{name} is stale: python -m tools.config_reference"
        )
    assert config_reference.write(tmp_path) == []


def sections(model: type[Section]) -> list[type[Section]]:
    inner = [
        a
        for f in model.model_fields.values()
        for a in re.findall(r"shardmake\.config\.models\.(\w+)", repr(f.annotation))
    ]
    from shardmake.config import models

    return [model, *(s for name in inner for s in sections(getattr(models, name)))]


@pytest.mark.parametrize("model", [Config, Cluster])
def test_every_key_has_a_line_and_a_description(model: type[Section]) -> None:
    text = (ROOT / "config" / "README.md").read_text()
    for section in sections(model):
        assert section.__doc__ and section.__doc__ in text
        visible = section.model_json_schema()["properties"]
        for key, node in visible.items():
            assert node["description"], f"{section.__name__}.{key}"
            words = node["description"].replace("|", chr(92) + "|")
            assert re.search(rf"^\| `{key}` \|.*{re.escape(words)} \|$", text, re.M)


def test_every_link_leads_to_a_heading() -> None:
    text = config_reference.readme_text()
    anchors = {heading.replace(".", "").lower() for heading in re.findall(r"^### `([\w.]+)`$", text, re.M)}
    links = re.findall(r"\]\(#([\w-]+)\)", text)
    assert links and set(links) <= anchors


@pytest.mark.parametrize(
    "path", [ROOT / "config" / "config.yaml", *sorted((ROOT / "config" / "clusters").glob("*.yaml"))]
)
def test_config_files_name_their_schema(path: Path) -> None:
    schema = re.match(r"# yaml-language-server: \$schema=(.+)\n", path.read_text())
    assert schema, f"{path} has no schema line"
    found = json.loads((path.parent / schema[1]).read_text())
    assert set(yaml.safe_load(path.read_text())) <= set(found["properties"])


def test_a_file_with_inheritance_and_a_sweep_fits_the_schema() -> None:
    schema = json.loads(config_reference.config_schema_text())
    text = (ROOT / "config" / "README.md").read_text()
    example = re.search(r"```yaml\n(cluster: .*?\ndefaults:.*?)```", text, re.S)
    assert example
    values = yaml.safe_load(example[1])
    jsonschema.validate(values, schema)
    with pytest.raises(jsonschema.ValidationError, match="lerning_rate"):
        jsonschema.validate(values | {"defaults": {"lerning_rate": 1}}, schema)
    parsed = parse_config(values, "README")
    assert [*parsed.runs][:4] == ["plain", "lora", "lora-long", "rates-lr1e-3-s1"] and len(parsed.runs) == 9
    assert parsed.runs["lora-long"].method == "lora" and parsed.runs["lora-long"].max_steps == 1000
