"""Places that fsspec reaches by a URL: object stores (``s3://bucket/prefix``, ``gs://``), ``sftp://``, ``https://``."""

import errno
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from shardmake.core.errors import ShardmakeError, nearest
from shardmake.core.hub import UNTRUSTED, first_line, is_untrusted
from shardmake.core.private_names import private
from shardmake.core.secrets import redact

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Cause = Literal["permission", "full", "missing", "other"]


def is_url(name: str) -> bool:
    """Return whether ``name`` is a URL with a protocol, and not a path or a hub id."""
    return re.match(r"[a-z][a-z0-9+.-]*://", name) is not None


def protocol_problem(url: str) -> str:
    """Return why fsspec cannot reach ``url`` from here, and what to do; empty if it can, as far as is seen offline."""
    import fsspec

    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        return (
            f"fsspec does not know the protocol {protocol}://.{nearest(protocol, fsspec.available_protocols())} "
            "Use a protocol of fsspec, such as s3://, gs:// or sftp://."
        )
    except ImportError as error:
        return f"{error}. {_missing_package(protocol)}"
    return ""


def takes_login(url: str) -> bool:
    """Return whether the file system of ``url``, whose package is installed, reads a user from the URL."""
    import fsspec

    system = fsspec.get_filesystem_class(url.partition("://")[0])
    return bool({"user", "username"} & private(system).get_kwargs_from_urls(url).keys())


def open_store(url: str) -> "tuple[AbstractFileSystem, str]":
    """Return the file system of ``url`` and the path on it; it lists what is there now."""
    import fsspec

    proxies = {"client_kwargs": {"trust_env": True}} if url.startswith("http") else {}  # s3fs reads HTTPS_PROXY itself
    files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **proxies)
    files.invalidate_cache()
    return files, root


@contextmanager
def explain_store_errors(
    action: str, url: str, kind: type[ShardmakeError], advice: Mapping[Cause, str]
) -> Iterator[None]:
    """Turn any error of an ``action`` into one of ``kind``; fsspec's file systems share no error classes.

    ``advice`` is by cause; that for ``other`` is also for a cause that it lacks.
    """
    try:
        yield
    except ShardmakeError:
        raise
    except ImportError as error:
        todo = _missing_package(url.partition("://")[0])
        raise kind(f"{action} {url} failed: {redact(first_line(error))}\n{todo}") from error
    except Exception as error:
        todo = UNTRUSTED if is_untrusted(error) else advice.get(_cause(error), advice["other"])
        raise kind(f"{action} {url} failed: {redact(first_line(error))}\n{todo}") from error


def _cause(error: Exception) -> Cause:
    text = str(error).lower()
    if isinstance(error, PermissionError) or "credentials" in text:
        return "permission"
    if "quota" in text or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return "full"
    return "missing" if isinstance(error, FileNotFoundError) else "other"


def _missing_package(protocol: str) -> str:
    return f"Install the package that fsspec needs for {protocol}:// (for s3:// it is s3fs)."
