"""Places that fsspec reaches by a URL: object stores (``s3://bucket/prefix``, ``gs://``), ``sftp://``, ``https://``."""

import re

from shardmake.core.errors import nearest


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
        return f"{error}. {missing_package(protocol)}"
    return ""


def takes_login(url: str) -> bool:
    """Return whether the file system of ``url``, whose package is installed, reads a user from the URL."""
    import fsspec

    system = fsspec.get_filesystem_class(url.partition("://")[0])
    return bool({"user", "username"} & system._get_kwargs_from_urls(url).keys())


def missing_package(protocol: str) -> str:
    """Return what to do if the package of ``protocol`` is not installed."""
    return f"Install the package that fsspec needs for {protocol}:// (for s3:// it is s3fs)."
