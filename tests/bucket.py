"""The bucket ``lab`` of an S3 that moto serves on the loopback."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import s3fs
from moto.server import ThreadedMotoServer


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The bucket, empty, as boto3 sees it."""
    login = {
        "ENDPOINT_URL": server, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    for name, value in login.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr("shardmake.core.hub.RETRY_WAITS", (0.0, 0.0))
    monkeypatch.chdir(tmp_path)
    s3fs.S3FileSystem.clear_instance_cache()
    found = boto3.resource("s3").create_bucket(Bucket="lab")
    yield found
    found.objects.all().delete()
    found.delete()
