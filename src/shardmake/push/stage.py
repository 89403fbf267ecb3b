"""Bring the final model to its destinations, and prove that it arrived."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.config.models import Push, Run
from shardmake.core.atomic import write_json
from shardmake.core.errors import ShardmakeError
from shardmake.core.manifest import manifest_json
from shardmake.core.secrets import public_url
from shardmake.push.bundle import Bundle, make_bundle
from shardmake.push.folder import push_to_folder
from shardmake.push.hub import push_to_hub
from shardmake.push.object_store import push_to_store
from shardmake.run.paths import RunDir

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Tell = Callable[[str], None]


def push(run: Run, rundir: RunDir, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Push the model of ``rundir`` to every destination of ``run`` and return the receipt.

    Safe to repeat at any point: what has arrived is not sent again. All destinations are tried before an error of one
    is raised. The receipt is written last, after every destination was read back:
    ``{"destinations": [{"to", ...}], "files": {name: {"size", "sha256"}}}``, sizes in bytes.
    """
    if run.push is None:
        raise ShardmakeError(
            f"Run {rundir.name} has no push.to. Add one, such as `push: {{to: file:published/{rundir.name}}}`."
        )
    bundle = make_bundle(run, rundir)
    what = f"{len(bundle.paths)} files, {bundle.size / 1e6:,.1f} MB"
    results, complaints = [], []
    for destination in run.push.destinations:
        tell(f"Pushing {what} to {public_url(destination)}.")
        try:
            results.append({"to": public_url(destination), **_push_to(destination, run.push, bundle)})
            tell(f"{public_url(destination)} holds the model; every file was read back and compared.")
        except ShardmakeError as error:
            complaints.append(str(error))
    if complaints:
        raise ShardmakeError("\n".join(complaints))
    receipt = {"destinations": results, "files": manifest_json(bundle.manifest)}
    write_json(rundir.push_receipt, receipt)
    return receipt


def _push_to(destination: str, push: Push, bundle: Bundle) -> dict[str, Any]:
    kind, _, place = destination.partition(":")
    if kind not in ("file", "hub"):
        return push_to_store(bundle, destination)
    if kind == "file":
        push_to_folder(bundle, Path(place))
        return {}
    return push_to_hub(bundle, place, push, _connect(place))


def _connect(repository: str) -> "HfApi":
    """The hub's client with the user's token; refused where the client would not even try."""
    from huggingface_hub import HfApi, constants, get_token

    if constants.is_offline_mode():
        raise ShardmakeError(
            f"hub:{repository} cannot be reached while HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set. "
            "Unset it for the push, on a machine with internet."
        )
    if get_token() is None:
        raise ShardmakeError(
            f"hub:{repository} needs a token with write permission. "
            "Run `hf auth login`, or set HF_TOKEN, and push again."
        )
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
