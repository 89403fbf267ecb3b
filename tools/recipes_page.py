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

Runs for models and clusters that labs have, in `examples/recipes/`. Copy one, change data and destination, and plan it.
Below each is what `shardmake plan NAME --offline` prints, without fallbacks, checkpoint sizes and what is not checked:
without a network, with a folder in place of the model that holds the named config: that of the model on the hub, or
transformers' default of the type, which may have another size. None of them has been trained here. The page is made by
`python -m tools.recipes_page`.
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
_LEFT_OUT = re.compile(r"^  (less GPU memory|not checked|after an out-of-memory|a checkpoint takes|\d+ other cand)")


def config_of(model: str) -> tuple[dict[str, Any], str]:
    """Return the config.json for the plan of ``model``, and where its values come from."""
    for name, sizes in SIZES.items():
        if name in model:
            return sizes, name
    from transformers import AutoConfig

    (kind,) = (kind for part, kind in DEFAULTS.items() if part in model.lower())
    values = json.loads(AutoConfig.for_model(kind).to_json_string())
    return values, f"`{kind}`, transformers' default"


def plan(name: str, written: dict[str, Any], folder: Path) -> str:
    """Return what the plan prints for run ``name`` of the configuration ``written``."""
    run = written["runs"][name]
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config_of(run["model"])[0]))
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(written | {"runs": {name: run | {"model": str(model)}}}))
    command = [sys.executable, "-m", "shardmake.cli", "plan", name, "--offline", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    lines = done.stdout.replace(f"{folder}/", "").strip().splitlines()
    return "\n".join(line for line in lines if not _LEFT_OUT.search(line))


def section(path: Path, folder: Path) -> str:
    """Return the part of the page about the recipe in ``path``."""
    text = path.read_text()
    written, name = yaml.safe_load(text), path.stem
    run = written["runs"][name]
    cluster = Path(written["cluster"])
    about = re.match(r"# (.+)\n", text)
    assert about, f"{path} begins with a comment"
    shown = f"[{name}.yaml](../../{path.relative_to(REPOSITORY)}), [{cluster.name}](../../{cluster})"
    return (
        f"## {name}\n\n{about[1]} {shown}. Config: {config_of(run['model'])[1]}:\n\n"
        f"```\n{plan(name, written, folder)}\n```\n"
    )


def main() -> None:
    """Write the page."""
    with tempfile.TemporaryDirectory() as folder:
        parts = [section(path, Path(folder)) for path in sorted(RECIPES.glob("*.yaml"))]
    PAGE.write_text("\n".join([HEAD, *parts]))


if __name__ == "__main__":
    main()
