"""The base model that ``--base`` names: a folder, or a model of the hub."""

from pathlib import Path

from shardmake.consolidate.aux_files import AUX_FILES
from shardmake.core.errors import ConfigError
from shardmake.core.hub import is_hub_id, translate_hub_errors, with_retries


def find_base(named: str) -> Path:
    """Return the folder that ``named`` is; a hub id (``org/name`` or ``org/name@revision``) is fetched if needed.

    Of a model that is not in the hub's local cache, only the small files are fetched. Its weights are needed for a LoRA
    adapter only, and may be hundreds of gigabytes.

    Raises:
        ConfigError: ``named`` is neither a folder nor a hub id.
        HubError: The hub did not answer or rejected the request.
    """
    path = Path(named).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"Cannot use --base {named}. It is a file. Name its folder: {path.absolute().parent}")
    repository, _, revision = named.partition("@")
    if not is_hub_id(repository):
        raise ConfigError(f"Cannot use --base {named}. There is no such folder. Name a folder or a hub id (org/name).")
    return _find_on_hub(repository, revision or None)


def _find_on_hub(repository: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        cached = None
    if cached is not None and (cached / "config.json").is_file():
        return cached
    if constants.is_offline_mode():
        raise ConfigError(
            f"Cannot use --base {repository}. It is not in the hub's local cache, and HF_HUB_OFFLINE is set. Name "
            "a folder."
        )
    advice = f"Check the name and the revision, download it with `hf download {repository}`, or name a folder."
    with translate_hub_errors(f"Fetching the base model {repository}", {}, advice):
        return Path(with_retries(lambda: snapshot_download(repository, revision=revision, allow_patterns=AUX_FILES)))
