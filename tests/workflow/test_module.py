"""The workflow as a Snakemake module of another one: nested configuration, names and paths of its own."""

import json
import shutil
from pathlib import Path

import yaml

from tests.workflow.checkout import LOCAL, PROFILE, REPOSITORY, RUN, Checkout

SNAKEFILE = """\
configfile: "lab.yaml"


module shardmake:
    snakefile:
        {snakefile!r}
    config:
        config["training"]
    prefix:
        "tuned runs"


use rule * from shardmake as shardmake_*


use rule data_run from shardmake as shardmake_data_run with:
    message:
        "the data of {{wildcards.run}}, in the lab's words"


module other:
    snakefile:
        {snakefile!r}
    config:
        config["other"]
    prefix:
        "other"


use rule * from other as other_*


rule summary:
    default_target: True
    input:
        rules.shardmake_plan.input,
        rules.other_plan.input,
    output:
        "summary.txt",
    shell:
        "cat {{input:q}} > {{output}}"
""".format(snakefile=str(REPOSITORY / "workflow/Snakefile"))


def make_lab(root: Path, inputs: Path) -> Checkout:
    """A workflow of a lab, with a cluster file and data of its own and nothing of a clone."""
    root.mkdir()
    (root / "Snakefile").write_text(SNAKEFILE)
    (root / "cluster.yaml").write_text(yaml.safe_dump(LOCAL | {"processes_per_node": 1}))
    (root / "resources").mkdir()
    (root / "resources/demo").symlink_to(inputs)
    configs = {
        name: {"cluster": "cluster.yaml", "runs": {"demo": RUN | {"strategy": strategy}}}
        for name, strategy in (("training", "ddp"), ("other", "zero2"))
    }
    (root / "lab.yaml").write_text(yaml.safe_dump(configs))
    return Checkout(root)


def test_another_workflow_uses_the_rules_twice_with_prefixes_and_changes_one(tmp_path: Path, inputs: Path) -> None:
    """The two modules have a run of one name with different settings."""
    lab = make_lab(tmp_path / "the lab's folder", inputs)
    done = lab("snakemake", "--cores", "2")
    assert "demo: estimating memory" in done.stdout and "rerun-triggers: [mtime, params, input]" in done.stdout
    for folder, strategy in (("tuned runs", "ddp"), ("other", "zero2")):
        plan = json.loads((lab.root / folder / "runs/demo/plan/plan.json").read_text())
        assert (plan["run"], plan["choice"]["strategy"]) == ("demo", strategy)
    assert (lab.root / "summary.txt").exists() and (lab.root / "tuned runs/logs/demo/plan.log").exists()
    assert not (lab.root / "runs").exists() and not (lab.root / "logs").exists()
    assert "Nothing to be done" in lab("snakemake", "--cores", "2").stdout
    train = lab("snakemake", "--cores", "2", "-n", "shardmake_train", "other_train").stdout
    assert "the data of demo, in the lab's words" in train
    assert "/tuned runs/runs/demo/train/attempts/NNN" in train and "/other/runs/demo/train/attempts/NNN" in train
    words = ("-n", "shardmake_plan", "--config", "training={runs: {demo: {max_steps: 3, packing: false}}}")
    changed = lab("snakemake", "--cores", "2", *words).stdout
    assert "max_steps: 6 -> 3" in changed and "Code has changed" not in changed


API = """
from pathlib import Path
from snakemake.api import SnakemakeApi
from snakemake.settings.types import DAGSettings, OutputSettings, ResourceSettings
for _ in range(2):
    with SnakemakeApi(OutputSettings()) as api:
        workflow = api.workflow(resource_settings=ResourceSettings(cores=2), snakefile=Path("Snakefile"))
        workflow.dag(dag_settings=DAGSettings()).execute_workflow(executor="dryrun")
"""


def test_python_runs_the_modules_twice_in_one_process(tmp_path: Path, inputs: Path) -> None:
    assert make_lab(tmp_path / "lab", inputs)("python", "-c", API).stdout.count("This was a dry-run") == 2


def test_a_workflow_profile_in_place_of_the_default_one_logs_what_it_lacks(checkout: Checkout) -> None:
    (checkout.root / "mine").mkdir()
    (checkout.root / "mine/config.yaml").write_text("cores: 2\n")
    done = checkout("snakemake", *PROFILE, "--workflow-profile", "mine", "-n", "plan")
    assert "rerun-triggers: [mtime, params, input]" in done.stdout
    assert "max-checksum-file-size: 10GB" in done.stdout


def test_a_module_without_configuration_is_refused(tmp_path: Path, inputs: Path) -> None:
    lab = make_lab(tmp_path / "lab", inputs)
    (lab.root / "lab.yaml").write_text("training: {}\nother: {}\n")
    done = lab("snakemake", "--cores", "1", "-n", check=False)
    assert done.returncode == 1 and "Error: The module has no configuration." in done.stdout


def test_the_example_is_a_whole_project(checkout: Checkout) -> None:
    shutil.copytree(REPOSITORY / "examples", checkout.root / "examples")
    done = checkout("snakemake", *PROFILE, "-s", "examples/module/Snakefile", "-n")
    assert "shardmake_train_run" in done.stdout and "tokenizing the data of fast" in done.stdout
