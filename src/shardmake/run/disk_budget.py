"""The disk space that a run will need, compared with the free space of the file system and the user's quota."""

from shardmake.core.disk import require_space, tree_size
from shardmake.core.units import format_bytes
from shardmake.run.paths import RunDir
from shardmake.run.plan import Choice, MemoryEstimates, Plan


def check_run(rundir: RunDir) -> None:
    """Fail if the checkpoints and the final model of the run's plan will not fit on disk."""
    check_choice(rundir, MemoryEstimates.read(rundir.memory), Plan.read(rundir.plan).choice)


def check_choice(rundir: RunDir, estimates: MemoryEstimates, choice: Choice) -> str:
    """Fail if the checkpoints and the final model of ``choice`` will not fit on disk.

    Files that exist already count as available. Return a sentence with the bytes needed and the bytes left.
    """
    terms = estimates.of(choice).disk.terms
    needed = max(0, sum(terms.values()) - tree_size(rundir.checkpoints) - tree_size(rundir.model))
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in terms.items())
    return require_space(rundir.root, needed, f"Run {rundir.name} will need {format_bytes(needed)} more ({listed})")


def checkpoint_size(rundir: RunDir, copies: int) -> int:
    """Return the estimated bytes of one checkpoint of the run's plan.

    The estimate holds ``copies`` checkpoints and the one that is being written.
    """
    choice = Plan.read(rundir.plan).choice
    return MemoryEstimates.read(rundir.memory).of(choice).disk.terms["checkpoints"] // (copies + 1)
