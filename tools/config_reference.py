"""Write the JSON schemas and ``config/README.md`` from the configuration models: ``python -m tools.config_reference``.

Run it from the repository's root after every change of `shardmake.config.models`. A test compares the files.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from shardmake.config.inheritance import BASE, DEFAULTS, SWEEP
from shardmake.config.models import Cluster, Config, Section
from shardmake.config.schema import Schema, SchemaNode
from shardmake.core.atomic import write_text

A100_CLUSTER = """\
# yaml-language-server: $schema=../../workflow/schemas/cluster.schema.json
executor: slurm
accelerator: a100-80gb
max_nodes: 4
processes_per_node: 4       # GPUs per node
cpus_per_node: 64
memory_gib_per_node: 480    # a little less than the node has: the operating system needs some
nvme_path: /local/scratch
nvme_gib_per_node: 3000
inter_node_gbps: 25         # one 200 Gbit/s link
network_interface: ib0
internet_on_compute_nodes: false
scratch: /local/scratch
env:
  NCCL_IB_HCA: mlx5_0
slurm:
  partition: gpu
  account: lab-nlp
  time_limit: "1-00:00:00"
  gpu_type: a100
  cpu_partition: cpu        # data and consolidate need no GPU
  setup:
    - module load cuda/13.0
  extra:
    reservation: course
"""
A100_CONFIG = """\
# yaml-language-server: $schema=../workflow/schemas/config.schema.json
cluster: config/clusters/a100.yaml
runs:
  qwen-32b-support:                         # every weight is trained
    model: Qwen/Qwen2.5-32B-Instruct
    data:
      train: /data/support/conversations    # a folder of Parquet files with a messages column
      eval: /data/support/held-out.jsonl
    sequence_length: 8192
    global_batch_size: 64
    epochs: 2
    learning_rate: 1.0e-5
    checkpoints:
      every_steps: 50
    eval_every_steps: 50
    evaluation:
      prompts:
        - How do I reset my password?
    push:
      to: [file:/models/qwen-32b-support, hub:our-lab/qwen-32b-support]
  qwen-32b-adapters:                        # the same with adapters on one node, to compare
    base: qwen-32b-support
    learning_rate: 2.0e-4
    method: lora
    lora:
      rank: 32
      alpha: 64
    nodes: 1
    push:
      to: hub:our-lab/qwen-32b-support-lora
"""

_INTRODUCTION = """\
<!-- Written by `python -m tools.config_reference` from src/shardmake/config/models.py; edit there. -->
# Configuration

`config/config.yaml` describes the runs: model, data, training and destination. A file in `config/clusters/` describes
the machine for all users. Shardmake determines everything else: strategy, nodes, micro batch, memory and cores of
each job; `snakemake --profile slurm plan` shows the choice and its reason. Both files are validated before anything
is queued. A message names the key, the value, the allowed values and the nearest spelling. Editors with a YAML
language server complete keys if the first line names the schema, as in the demo's `config/config.yaml` and
`config/clusters/local.yaml`.

## Your own files and values

```
snakemake plan --profile slurm --configfile ~/experiments/june.yaml
snakemake --profile slurm --configfile ~/experiments/june.yaml more.yaml        # later files override earlier ones
snakemake --profile slurm --config 'runs={docs-chat: {learning_rate: 1.0e-4}}'  # single values override files
```

Targets such as `plan` stand before `--configfile`, which takes every word after it and replaces `config/config.yaml`.
Relative paths start at the folder in which Snakemake runs. `~` and environment variables in paths are expanded; an
unknown one is an error.

Every stage reads what Snakemake merged, from a file in `.snakemake/shardmake` that no other invocation changes; with a
password in the configuration, from `~/.cache/shardmake/config`, which only you can read. By hand, `shardmake STAGE NAME
--config FILE` reads FILE (may be repeated), or the file in `SHARDMAKE_CONFIG`, or else `config/config.yaml`.

## Several runs

`defaults` has the values of every run, and `base` names another run whose values a run has. A run says only what
differs:

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
`max_steps: null` beside `epochs: 3`, and `lora: null` beside `method: full`.
`shardmake config NAME` prints every value of a run and its origin.

A `sweep` makes one run for each point: here the six runs `rates-lr1e-3-s1` to `rates-lr2e-3-s3`, and no run `rates`. A
list of points takes no product: `sweep: [{learning_rate: 1.0e-3, seed: 1}, {learning_rate: 2.0e-3, seed: 2}]`. A key
inside a section is written with dots (`lora.rank`) or as a section. The name of a run depends on its own point alone,
so adding points changes no other run.

YAML converts some values: `on`, `off`, `yes` and `no` are true or false unless quoted; `12:00:00` without quotes is
the number 43200; `5e-4` is text in YAML 1.1, which Shardmake reads as a number.
"""

_DATA = """\
## Formats of the data

`docs/reference/models-and-data.md` has an example of each format. The model learns the assistant's messages (`chat`,
`sharegpt`), `output` (`alpaca`), `completion`, or all of a `text`. The format follows from the columns; if they fit
several formats, `format` must name one. Other names of columns go into `columns`:

```yaml
data:
  train: dialogs.json
  columns: {messages: dialog, role: speaker, content: said}
  format: sharegpt          # speakers are human and gpt; for user and assistant it is chat
```

- Conversations go through the tokenizer's chat template. Roles of `sharegpt` become `user` (`human`, `user`),
  `assistant` (`gpt`, `assistant`, `chatgpt`), `system` and `tool` (`tool`, `function`, `observation`).
- The content of a message is text, or a list of parts with `type: text`, which are joined. Other parts are refused.
- A message of the assistant with `weight: 0` is context, as with `loss_mask: 0`, `train: false` or `loss: false`, or a
  0 in a column `loss_mask` with an entry for each message. Other values than 0 and 1 are refused.
- A JSON object that has a key twice is refused, because the first value would be lost.
- Parquet files of a folder have the same columns, of types that Arrow unifies; files without rows are left out.
- `input` follows `instruction` after an empty line, as one message of the user.
- Cells of a `.csv` or `.tsv` file are text exactly as written. The first row names the columns.
- All files of a folder have one kind. Hidden files and descriptions such as `dataset_info.json` are skipped.
- `.txt` files are refused, because they do not state where an example ends.
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
    """Return ``config/README.md``: introduction, an example, a table for every section."""
    parts = [
        _INTRODUCTION,
        "## A cluster with four nodes of four A100s\n",
        *_example(A100_CONFIG, "config/clusters/a100.yaml", A100_CLUSTER),
        _DATA,
        "## Every key of `config/config.yaml`\n",
        *_tables(Schema(Config)),
        "## Every key of a cluster file\n",
        *_tables(Schema(Cluster)),
    ]
    return "\n".join(parts)


def _example(config: str, cluster_name: str, cluster: str) -> list[str]:
    return [f"`config/config.yaml`:\n\n```yaml\n{config}```\n", f"`{cluster_name}`:\n\n```yaml\n{cluster}```\n"]


def _tables(schema: Schema) -> Iterator[str]:
    shown: list[SchemaNode] = []
    for name, section in schema.sections():
        if any(section is other for other in shown):
            continue  # a section of the same kind has the table
        shown.append(section)
        if name:
            yield f"### `{name}`\n"
        yield f"{section['description']}\n"
        rows = [_row(schema, name, key, section) for key in section["properties"]]
        yield "\n".join(["| Key | Value | Default | Meaning |", "|---|---|---|---|", *rows, ""])


def _row(schema: Schema, name: str, key: str, section: SchemaNode) -> str:
    node = section["properties"][key]
    path = f"{name}.{key}" if name else key
    cells = [f"`{key}`", _value(schema, path, node), _default(key, section), node["description"]]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _value(schema: Schema, path: str, node: SchemaNode) -> str:
    """Describe the values of a key; for a section, link to its table."""
    for name, section in schema.sections():
        link = f"[keys](#{name.replace('.', '').lower()})"
        if section is schema.section(node) or name == f"{path}.NAME":
            return link
        if name == f"{path}.ENTRY":
            return f"text, or a list of {link}"
    quoted = (*schema.choices(node), "true", "false")
    return ", ".join(f"`{word}`" if word in quoted else word for word in schema.words(node))


def _default(key: str, section: SchemaNode) -> str:
    if key in section.get("required", []):
        return "**required**"
    default = section["properties"][key].get("default")
    return "" if default is None or isinstance(default, dict | list) else f"`{json.dumps(default).strip(chr(34))}`"


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
