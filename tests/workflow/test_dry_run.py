"""`snakemake -n` shows what would be submitted, before the run's folder exists and after the plan exists."""

from shardmake.config.load import get_run, load_cluster, load_config
from shardmake.plan.stage import make_plan
from shardmake.run.paths import RunDir
from shardmake.run.settings import current
from tests.workflow.checkout import PROFILE, Checkout

NODES = {"accelerator": "a100-80gb", "processes_per_node": 4, "cpus_per_node": 32, "memory_gib_per_node": 256}
SLURM = {"executor": "slurm", "max_nodes": 2, "slurm": {"partition": "gpu", "account": "lab"}}


def test_a_dry_run_shows_script_command_and_environment(checkout: Checkout) -> None:
    checkout.configure(NODES | SLURM, strategy="zero3", nodes=2, micro_batch_size=1)
    text = dry_run(checkout)
    for words in (
        "#SBATCH --nodes=2", "#SBATCH --gres=gpu:4", "#SBATCH --account=lab", "shardmake demo: zero3",
        "NCCL_SOCKET_IFNAME==INTERFACE", "--machine_rank K --main_process_ip ADDRESS --main_process_port PORT",
        "shardmake render demo --show",
    ):  # fmt: skip
        assert words in text
    assert not checkout.run.exists()

    write_another_plan(checkout)
    assert "shardmake demo: zero1" in dry_run(checkout)
    checkout.configure(NODES | SLURM, strategy="zero2", nodes=2, micro_batch_size=1)
    text = dry_run(checkout)
    assert "shardmake demo: zero2" in text
    assert "# --- changed since the last plan: strategy: zero3 -> zero2\n" in text


def test_a_run_of_another_version_is_refused_by_snakemake_and_by_every_stage(checkout: Checkout) -> None:
    """A finished training would be made again otherwise, because the settings that it recorded are read differently."""
    receipt = checkout.run / "train/receipt.json"
    receipt.parent.mkdir(parents=True)
    receipt.write_text('{"steps": 60}')
    for command in (("snakemake", *PROFILE), ("shardmake", "train", "demo")):
        done = checkout(*command, check=False)
        assert done.returncode in (1, 2)
        assert "train/receipt.json was made by another version of Shardmake: it has the format 0" in done.stdout
    assert [path for path in checkout.run.rglob("*") if path.is_file()] == [receipt]


def dry_run(checkout: Checkout) -> str:
    return checkout("snakemake", "-n", "--profile", "slurm", "runs/demo/train/receipt.json").stdout


def write_another_plan(checkout: Checkout) -> None:
    config = load_config(checkout.root / "config/config.yaml")
    run, cluster = get_run(config, "demo"), load_cluster(checkout.root / config.cluster)
    current("plan", run, cluster).write(RunDir(checkout.run).stage_settings("plan"))
    run = run.model_copy(update={"strategy": "zero1", "model": str(checkout.root / run.model)})
    plan, _ = make_plan("demo", run, cluster)
    plan.write(checkout.run / "plan/plan.json")
