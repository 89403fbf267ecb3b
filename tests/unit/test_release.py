"""One version everywhere, and a valid entry in the catalog of workflows."""

from pathlib import Path

import yaml
from typer.testing import CliRunner

import shardmake
from shardmake.cli import app

REPOSITORY = Path(__file__).resolve().parents[2]
NEWEST = f"## {shardmake.__version__} "


def test_the_version_is_the_same_everywhere() -> None:
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == shardmake.__version__
    headings = [line for line in (REPOSITORY / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].startswith(NEWEST)
    assert CliRunner().invoke(app, ["--version"]).stdout == f"shardmake {shardmake.__version__}\n"


def test_the_entry_in_the_catalog_of_workflows_is_valid() -> None:
    """The keys are those that the catalog reads; the profiles that it names exist."""
    entry = yaml.safe_load((REPOSITORY / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert entry.keys() == {"mandatory-flags", "software-stack-deployment", "report"}
    assert entry["mandatory-flags"].keys() == {"desc", "flags"}
    flag, profile = entry["mandatory-flags"]["flags"].split()
    assert flag == "--profile" and (REPOSITORY / "profiles" / profile / "config.yaml").exists()
    assert entry["software-stack-deployment"].keys() <= {"conda", "apptainer", "apptainer+conda", "modules"}
    assert (REPOSITORY / "workflow/Snakefile").exists() and (REPOSITORY / "config/README.md").exists()
