"""Digests of the settings that each stage reads."""

from collections.abc import Mapping

from shardmake.config.models import Cluster, Run
from shardmake.core.atomic import digest

# Fields that only these stages read. All other fields affect the plan and the training. A new push destination
# therefore never causes a new training.
STAGE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "fetch": ("model", "revision", "data"),
    "data": ("data", "objective", "model", "revision", "sequence_length", "packing", "seed", "trust_remote_code"),
    "consolidate": ("dtype", "max_shard_size"),
    "evaluate": ("evaluation",),
    "push": ("push",),
}
_LATE_FIELDS = {field for stage in ("consolidate", "evaluate", "push") for field in STAGE_FIELDS[stage]} | {"data"}


def stage_digest(run: Run, cluster: Cluster, stage: str) -> str:
    """Return the digest of the settings that ``stage`` reads; Snakemake reruns the stage if it changes.

    Only the plan reads the cluster file, except for the number of trainings in the queue.
    """
    values = run.model_dump()
    fields = STAGE_FIELDS.get(stage)
    if fields is None:
        fields = tuple(sorted(set(values) - _LATE_FIELDS))
        values["cluster"] = cluster.model_dump(exclude={"trainings_per_user"})
        fields += ("cluster",)
    return digest({field: values[field] for field in fields})
