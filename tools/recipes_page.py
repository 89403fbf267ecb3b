"""Write docs/reference/recipes.md: ``python -m tools.recipes_page``; each plan is made offline from a config.json."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.published_models import CONFIGS

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPES, PAGE = REPOSITORY / "examples/recipes", REPOSITORY / "docs/reference/recipes.md"
HEAD = """# Recipes

Runs for models and clusters that labs have, in `examples/recipes` and its folder `clusters`. Copy one, change data and
destination, and plan it: `shardmake plan NAME --offline` says why, what is cheaper, and what fits on fewer nodes. The
table is from such plans, in bf16, with a folder in place of the model that holds the config of the model on the hub or,
in *italics*, transformers' default of the type, which may have another size. "re" is gradient checkpointing, GiB are of
a GPU's tensors and allocator. None of them has been trained here. The page is made by `python -m tools.recipes_page`.

| recipe | cluster | config | strategy | nodes x ranks | micro batch | s per step | GiB per GPU | RAM per node, GiB |
|---|---|---|---|---|---|---|---|---|
"""
SIZES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": CONFIGS["Llama-3.1-8B"], "Llama-3.1-70B": CONFIGS["Llama-3.1-70B"],
    "Qwen2.5-7B": CONFIGS["Qwen2.5-7B"], "Qwen3-8B": CONFIGS["DeepSeek-R1-0528-Qwen3-8B"],
}  # fmt: skip
"""The sizes in the model's config.json on the hub, by a part of its name."""
DEFAULTS = {
    "qwen3-30b": "qwen3_moe", "qwen3.5": "qwen3_5", "gpt-oss": "gpt_oss", "gemma-3": "gemma3",
    "mistral-small": "mistral3",
}  # fmt: skip
"""Model types whose default config of transformers stands for a model, by a part of its name."""
_PLAN = re.compile(
    r": ([\w-]+), (\d+) nodes? x (\d+) ranks?, bf16, (with|without) gradient.*per node (\d+) GiB of RAM.*?"
    r"micro batch (\d+), \d+ nodes?: about ([\d.]+) s per step and (.+?) GiB per GPU", re.DOTALL,
)  # fmt: skip
"""The parts of a printed plan that the table shows."""


def config_of(model: str) -> tuple[dict[str, Any], str]:
    """Return the config.json for the plan of ``model``, and where its values come from."""
    for name, sizes in SIZES.items():
        if name in model:
            return sizes, name
    from transformers import AutoConfig

    (kind,) = (kind for part, kind in DEFAULTS.items() if part in model.lower())
    values = json.loads(AutoConfig.for_model(kind).to_json_string())
    return values, f"*{kind}*"


def plan(name: str, written: dict[str, Any], folder: Path) -> str:
    """Return what the plan prints for run ``name`` of the configuration ``written``."""
    run = written["runs"][name]
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config_of(run["model"])[0]))
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(written | {"runs": {name: run | {"model": str(model)}}}))
    command = [sys.executable, "-m", "shardmake.cli", "plan", name, "--offline", "--config", str(config)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, check=True).stdout


def row(path: Path, printed: str) -> str:
    """Return the row of the recipe in ``path``, whose plan is ``printed``."""
    text = path.read_text()
    written, about = yaml.safe_load(text), re.match(r"# (.+)\n", text)
    cluster, config = Path(written["cluster"]), config_of(written["runs"][path.stem]["model"])[1]
    found = _PLAN.search(printed)
    assert about and found, path
    strategy, nodes, ranks, recompute, ram, micro, seconds, gib = found.groups()
    cells = (
        f"`{path.stem}`: {about[1].rstrip('.')}", f"`{cluster.stem}`", config,
        strategy + ", re" * (recompute == "with"), f"{nodes} x {ranks}", micro, seconds, gib, ram,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Write the page."""
    paths = sorted(RECIPES.glob("*.yaml"))
    with tempfile.TemporaryDirectory() as folder:
        printed = [plan(path.stem, yaml.safe_load(path.read_text()), Path(folder)) for path in paths]
    PAGE.write_text(HEAD + "".join(map(row, paths, printed)))


if __name__ == "__main__":
    main()
