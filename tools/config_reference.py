"""Write the JSON schemas and ``config/README.md`` from the configuration models: ``python -m tools.config_reference``.

Run it from the repository's root after every change of `shardmake.config.models`. A test compares the files.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from shardmake.config.inheritance import BASE, DEFAULTS, SWEEP
from shardmake.config.models import Cluster, Config, Section
from shardmake.config.schema import Schema, SchemaNode
from shardmake.core.atomic import write_text

_INTRODUCTION = """\
<!-- Written by `python -m tools.config_reference` from src/shardmake/config/models.py; edit there. -->
# Configuration

`config/config.yaml` describes the runs, and a file in `config/clusters/` the machine for all users. Shardmake
determines everything else: strategy, nodes, micro batch, memory and cores of each job; `snakemake --profile slurm plan`
shows the choice and its reason. Both files are validated before anything is queued. Editors with a YAML language server
complete keys if the first line names the schema, as in the demo's. `docs/reference/recipes.md` has complete files for
models and clusters, and `config/clusters/sites/` cluster files of ten sites.

## Your own files and values

```
snakemake plan --profile slurm --configfile ~/experiments/june.yaml
snakemake --profile slurm --configfile ~/experiments/june.yaml more.yaml        # later files override earlier ones
snakemake --profile slurm --config 'runs={docs-chat: {learning_rate: 1.0e-4}}'  # single values override files
```

Targets such as `plan` stand before `--configfile`, which takes every word after it and replaces `config/config.yaml`.
Relative paths start at the folder in which Snakemake runs; `~` and environment variables in paths are expanded.

Every stage reads what Snakemake merged, from a file in `.snakemake/shardmake` that no other invocation changes; with a
password in it, from `~/.cache/shardmake/config`, which only you can read. By hand, `shardmake STAGE NAME --config FILE`
reads FILE (may be repeated), or the file in `SHARDMAKE_CONFIG`, or else `config/config.yaml`.

## Several runs

`defaults` has the values of every run; `base` names a run whose values a run has, unless it sets them:

```yaml
cluster: config/clusters/local.yaml
defaults:
  model: resources/demo/base
  data: {train: resources/demo/train.jsonl, eval: resources/demo/eval.jsonl}
  sequence_length: 256
  global_batch_size: 8
  max_steps: 200
  learning_rate: 3.0e-3
runs:
  plain: {}
  lora:
    method: lora
    lora: {rank: 8}
  lora-long:
    base: lora
    max_steps: 1000
  rates:
    base: lora
    sweep: {learning_rate: [1.0e-3, 2.0e-3], seed: [1, 2, 3]}
```

Sections are merged key by key; a list replaces a list. `null` removes an inherited value or section, as in
`max_steps: null` beside `epochs: 3`. `shardmake config NAME` prints every value of a run and its origin.

A `sweep` makes one run for each point: here the six runs `rates-lr1e-3-s1` to `rates-lr2e-3-s3`, and no run `rates`. A
list of points takes no product: `sweep: [{learning_rate: 1.0e-3, seed: 1}, {learning_rate: 2.0e-3, seed: 2}]`. A key
inside a section is written with dots (`lora.rank`) or as a section. Adding points changes no other run.

YAML converts some values: `on`, `off`, `yes` and `no` are true or false unless quoted; `12:00:00` without quotes is
the number 43200; `5e-4` is text in YAML 1.1, which Shardmake reads as a number.
"""

_DATA = """\
## Formats of the data

`docs/reference/models-and-data.md` has an example of each. The model learns the assistant's messages (`chat`,
`sharegpt`), `output` (`alpaca`), `completion`, or all of a `text`. The format follows from the columns; if they fit
several, `format` must name one. Other names of columns go into `columns`:

```yaml
data:
  train: dialogs.json
  columns: {messages: dialog, role: speaker, content: said}
  format: sharegpt          # speakers are human and gpt; for user and assistant it is chat
```

- Roles of `sharegpt` become `user` (`human`, `user`), `assistant` (`gpt`, `assistant`, `chatgpt`), `system` and `tool`
  (`tool`, `function`, `observation`); then the tokenizer's chat template applies.
- Parquet files of a folder have the same columns, of types that Arrow unifies; files without rows are left out.
- `input` follows `instruction` after an empty line, as one message of the user.
- Cells of a `.csv` or `.tsv` file are text exactly as written. The first row names the columns.
- All files of a folder have one kind. Hidden files and descriptions such as `dataset_info.json` are skipped.
- Refused: `.txt` files, which do not state where an example ends; a JSON object that has a key twice; parts of a
  message other than text; weights of a message other than 0 and 1.
- Examples without a token to learn are dropped; their number and first lines are in the data receipt.
"""


def schema_text(model: type[Section]) -> str:
    """Return the JSON schema of ``model`` as a file."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps({**dialect, **Schema(model).root}, indent=2) + "\n"


def config_schema_text() -> str:
    """Return the JSON schema of a configuration file, in which runs inherit values and stand for sweeps."""
    schema = json.loads(schema_text(Config))
    sections = {name: schema["$defs"][name] for name in ("Run", "Data", "Push")}
    for section in sections.values():
        section.pop("required")  # the value may be inherited
    run = {key: sections["Run"].pop(key) for key in list(sections["Run"])}
    run["properties"] |= {
        BASE: {"description": "Another run, whose values this run has unless it sets them.", "type": "string"},
        SWEEP: {
            "description": "A list of values for each key, of which the product is taken, or a list of points.",
            "anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}],
        },
    }
    sections["Run"] |= {"anyOf": [{"type": "null"}, run]}
    schema["properties"][DEFAULTS] = {"description": "Values of every run.", "$ref": "#/$defs/Run"}
    return json.dumps(schema, indent=2) + "\n"


def readme_text() -> str:
    """Return ``config/README.md``: introduction, data, a table for every section."""
    parts = [
        _INTRODUCTION,
        _DATA,
        "## Every key of `config/config.yaml`\n\nA value such as `1 to 9` is a whole number; the default is bold.\n",
        *_tables(Schema(Config)),
        "## Every key of a cluster file\n",
        *_tables(Schema(Cluster)),
    ]
    return "\n".join(parts)


def _tables(schema: Schema) -> Iterator[str]:
    shown: list[SchemaNode] = []
    tables: dict[str, dict[str, str]] = {}
    for name, section in schema.sections():
        if any(section is other for other in shown):
            continue  # a section of the same kind has the table
        shown.append(section)
        if name:
            yield f"### `{name}`\n"
        yield f"{section['description']}\n"
        rows = {key: _row(schema, name, key, section) for key in section["properties"]}
        for other, known in tables.items():
            if len(same := [key for key in rows if known.get(key) == rows[key]]) > 1:
                yield f"As in [`{other}`](#{_anchor(other)}): {', '.join(f'`{key}`' for key in same)}.\n"
                rows = {key: row for key, row in rows.items() if key not in same}
        tables[name] = rows
        if rows:
            yield "\n".join(["| Key | Value | Meaning |", "|---|---|---|", *rows.values(), ""])


def _anchor(name: str) -> str:
    return name.replace(".", "").lower()


def _row(schema: Schema, name: str, key: str, section: SchemaNode) -> str:
    node = section["properties"][key]
    words = [_value(schema, f"{name}.{key}" if name else key, node)]
    default, required = node.get("default"), key in section.get("required", [])
    mark = "" if default is None or isinstance(default, dict | list) else f"`{json.dumps(default).strip(chr(34))}`"
    if mark in (choices := words[0].split(", ")):
        words = [f"**{word}**" if word == mark else word for word in choices]
    elif mark or required:
        words.append("**required**" if required else f"**{mark}**")
    cells = [f"`{key}`", ", ".join(words), node["description"]]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _value(schema: Schema, path: str, node: SchemaNode) -> str:
    """Describe the values of a key; for a section, link to its table."""
    for name, section in schema.sections():
        link = f"[keys](#{_anchor(name)})"
        if section is schema.section(node) or name == f"{path}.NAME":
            return link
        if name == f"{path}.ENTRY":
            return f"text, or a list of {link}"
    quoted = (*schema.choices(node), "true", "false")
    words = ", ".join(f"`{word}`" if word in quoted else word for word in schema.words(node))
    return re.sub("a (?=number |list )|a whole number from ", "", words)


def write(root: Path) -> list[Path]:
    """Write all files below ``root``, the repository's root; return those that changed."""
    files = {
        root / "workflow" / "schemas" / "config.schema.json": config_schema_text(),
        root / "workflow" / "schemas" / "cluster.schema.json": schema_text(Cluster),
        root / "config" / "README.md": readme_text(),
    }
    return [path for path, text in files.items() if write_text(path, text)]


if __name__ == "__main__":
    for changed in write(Path()):
        print(changed)
