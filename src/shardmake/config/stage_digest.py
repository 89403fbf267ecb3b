"""Digests of the settings that each stage reads."""

from collections.abc import Mapping

from shardmake.config.models import Cluster, Run
from shardmake.core.atomic import digest

# The settings that only a later stage reads. Whatever is not listed shapes the plan and the training, so that a new
# push destination never retrains anything.
STAGE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "fetch": ("model", "revision", "data"),
    "data": ("data", "objective", "model", "revision", "sequence_length", "packing", "seed", "trust_remote_code"),
    "consolidate": ("dtype", "max_shard_size"),
    "evaluate": ("evaluation",),
    "push": ("push",),
}
_LATE_FIELDS = {field for stage in ("consolidate", "evaluate", "push") for field in STAGE_FIELDS[stage]} | {"data"}


def stage_digest(run: Run, cluster: Cluster, stage: str) -> str:
    """Digest of the settings that ``stage`` reads; Snakemake reruns the stage when it changes.

    Only the plan depends on the cluster, but for how many trainings are queued at once; what it decides from it stands
    in the rendered files.
    """
    values = run.model_dump()
    fields = STAGE_FIELDS.get(stage)
    if fields is None:
        fields = tuple(sorted(set(values) - _LATE_FIELDS))
        values["cluster"] = cluster.model_dump(exclude={"trainings_per_user"})
        fields += ("cluster",)
    return digest({field: values[field] for field in fields})
