"""The options of ``shardmake doctor``, one field each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

if TYPE_CHECKING:
    from shardmake.config.models import Slurm


@dataclass(frozen=True)
class Options:
    """The options of ``shardmake doctor``."""

    node: Annotated[bool, Option("--node", help="Check compute nodes too, with one short job.")] = False
    nodes: Annotated[int, Option(help="Nodes of that job; two also measure the network.", min=1, max=2)] = 1
    train: Annotated[
        bool, Option("--train", help="With --node: train a small model there under each library, and compare.")
    ] = False
    cluster: Annotated[Path | None, Option(help="Cluster file that describes the job and is checked.")] = None
    config: Annotated[Sequence[Path], Option(help="Configuration that names the cluster file.")] = ()
    partition: Annotated[str | None, Option(help="Without a cluster file: partition.")] = None
    account: Annotated[str | None, Option(help="Without a cluster file: account.")] = None
    qos: Annotated[str | None, Option(help="Without a cluster file: quality of service.")] = None
    constraint: Annotated[str | None, Option(help="Without a cluster file: required node features.")] = None
    gpu_type: Annotated[str | None, Option(help="Without a cluster file: GPU type as Slurm spells it.")] = None
    write: Annotated[
        Path | None,
        Option(
            help="Cluster file to write with the measured values. Default: cluster.yaml, or none if a cluster file is "
            "checked."
        ),
    ] = None
    force: Annotated[bool, Option("--force", help="Overwrite that file.")] = False
    skip_builds: Annotated[bool, Option("--skip-builds", help="Do not compile DeepSpeed's kernels.")] = False
    folder: Annotated[Path, Option(help="Folder for records and logs; nodes must see it.")] = Path("logs/doctor")

    @property
    def written(self) -> Path | None:
        """Return the cluster file to write; None if a given one is checked only."""
        return self.write or (None if self.cluster or self.config else Path("cluster.yaml"))

    @property
    def slurm(self) -> "Slurm":
        """Return the section `slurm` of a cluster without a file; empty options are left out."""
        from shardmake.config.load import parse_section
        from shardmake.config.models import Slurm

        given = {name: value for name, value in vars(self).items() if name in Slurm.model_fields and value}
        return parse_section(Slurm, given, "The options for a cluster without a file")
