"""Push the final model to its destinations and verify what arrived."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmake.config.models import Run
from shardmake.core.errors import ConfigError, PushError, ShardmakeError
from shardmake.core.secrets import public_url
from shardmake.push.bundle import make_bundle
from shardmake.push.folder import push_to_folder
from shardmake.push.hub import connect, push_to_hub
from shardmake.push.object_store import push_to_store
from shardmake.run.paths import RunDir
from shardmake.run.receipts import PushedTo, PushReceipt

logger = logging.getLogger(__name__)


def push(run: Run, rundir: RunDir) -> PushReceipt:
    """Push the model of ``rundir`` to every destination of ``run`` and return the receipt.

    Safe to repeat: files that arrived are not sent again. All destinations are tried before an error is raised. The
    receipt is written last, after every destination was read back:
    the destinations, size and SHA-256 of each pushed file, and the files of the model as the merge listed them.
    """
    if run.push is None:
        raise ConfigError(
            f"Nothing to push: run {rundir.name} has no push.to. "
            f"Add one, such as `push: {{to: file:published/{rundir.name}}}`."
        )
    bundle = make_bundle(run, rundir)
    what = f"{len(bundle.paths)} files, {bundle.size / 1e6:,.1f} MB"
    results, problems = [], []
    for destination in run.push.destinations:
        logger.info("Pushing %s to %s.", what, public_url(destination))
        try:
            kind, _, place = destination.partition(":")
            found: Mapping[str, Any] = {}
            if kind == "file":
                push_to_folder(bundle, Path(place))
            elif kind == "hub":
                found = push_to_hub(bundle, place, run.push, connect(place))
            else:
                found = push_to_store(bundle, destination)
            results.append(PushedTo(to=public_url(destination), **found))
            logger.info("%s has the model; every file was read back and compared.", public_url(destination))
        except ShardmakeError as error:
            problems.append(str(error))
    if problems:
        raise PushError("\n".join(problems))
    receipt = PushReceipt(destinations=results, files=dict(bundle.manifest), model=dict(bundle.model))
    receipt.write(rundir.push_receipt)
    return receipt
