"""The workflow as a Snakemake module of another one: nested configuration, names and paths of its own."""

import json
from pathlib import Path

import yaml

from tests.workflow.checkout import LOCAL, REPOSITORY, RUN, Checkout

SNAKEFILE = f"""\
configfile: "lab.yaml"


module shardmake:
    snakefile:
        {str(REPOSITORY / "workflow/Snakefile")!r}
    config:
        config["training"]
    prefix:
        "tuned runs"


use rule * from shardmake as shardmake_*


rule summary:
    default_target: True
    input:
        rules.shardmake_plan.input,
    output:
        "summary.txt",
    shell:
        "cat {{input:q}} > {{output}}"
"""


def make_lab(root: Path, inputs: Path) -> Checkout:
    """A workflow of a lab, with a cluster file and data of its own and nothing of a clone."""
    root.mkdir()
    (root / "Snakefile").write_text(SNAKEFILE)
    (root / "cluster.yaml").write_text(yaml.safe_dump(LOCAL | {"processes_per_node": 1}))
    (root / "resources").mkdir()
    (root / "resources/demo").symlink_to(inputs)
    config = {"cluster": "cluster.yaml", "runs": {"demo": RUN | {"strategy": "ddp"}}}
    (root / "lab.yaml").write_text(yaml.safe_dump({"training": config}))
    return Checkout(root)


def test_another_workflow_uses_the_rules_with_a_prefix(tmp_path: Path, inputs: Path) -> None:
    lab = make_lab(tmp_path / "the lab's folder", inputs)
    done = lab("snakemake", "--cores", "1")
    assert "demo: estimating memory" in done.stdout
    assert json.loads((lab.root / "tuned runs/runs/demo/plan/plan.json").read_text())["run"] == "demo"
    assert (lab.root / "summary.txt").exists() and (lab.root / "tuned runs/logs/demo/plan.log").exists()
    assert not (lab.root / "runs").exists() and not (lab.root / "logs").exists()
    assert "Nothing to be done" in lab("snakemake", "--cores", "1").stdout


def test_a_module_without_configuration_is_refused(tmp_path: Path, inputs: Path) -> None:
    lab = make_lab(tmp_path / "lab", inputs)
    (lab.root / "lab.yaml").write_text("training: {}\n")
    done = lab("snakemake", "--cores", "1", "-n", check=False)
    assert done.returncode == 1 and "Error: The module has no configuration." in done.stdout
