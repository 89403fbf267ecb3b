"""Pushes to S3, served by moto on the loopback."""

from pathlib import Path
from typing import Any

import pytest

from shardmake.core.errors import ShardmakeError
from shardmake.push import object_store
from shardmake.push.stage import push
from shardmake.run.paths import RunDir
from shardmake.run.receipts import PushedTo
from tests.finished_run import DRAWN, MODEL, PLOTS, WEIGHTS, make_run, write_model

Patch = pytest.MonkeyPatch

URL = "s3://lab/models/chat"
RUN = make_run(push={"to": URL})


def contents(bucket: Any) -> dict[str, bytes]:
    return {item.key.removeprefix("models/chat/"): item.get()["Body"].read() for item in bucket.objects.all()}


def written(bucket: Any) -> dict[str, Any]:
    return {item.key: item.last_modified for item in bucket.objects.all()}


def test_the_prefix_holds_the_model_and_its_checksums(bucket: Any, rundir: RunDir) -> None:
    receipt = push(RUN, rundir)
    found = contents(bucket)
    assert {name: found[name] for name in MODEL} == MODEL
    assert found.keys() - MODEL == {"README.md", *PLOTS, "SHA256SUMS"} and receipt.destinations == [PushedTo(to=URL)]


def test_the_same_content_again_writes_and_reads_no_model(bucket: Any, rundir: RunDir, monkeypatch: Patch) -> None:
    push(RUN, rundir)
    before = written(bucket)
    monkeypatch.setattr(object_store._Place, "digest", lambda *_: pytest.fail("read back without need"))
    push(RUN, rundir)
    assert written(bucket) == before


def test_a_prefix_with_other_files_is_refused(bucket: Any, rundir: RunDir) -> None:
    bucket.put_object(Key="models/chat/notes.txt", Body=b"mine")
    with pytest.raises(
        ShardmakeError, match=r"s3://lab/models/chat contains files .*notes\.txt.*Choose another prefix"
    ):
        push(RUN, rundir)
    assert contents(bucket) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("name", [*WEIGHTS, "config.json"])
def test_a_push_cut_short_shows_no_checksums(bucket: Any, rundir: RunDir, monkeypatch: Patch, name: str) -> None:
    push(RUN, rundir)
    write_model(rundir, {**MODEL, **dict.fromkeys(WEIGHTS, b"new"), "config.json": b"new"})
    send = object_store._send

    def cut(bundle: Any, place: Any, which: str) -> None:
        if which == name:
            raise ConnectionError("the network is gone")
        send(bundle, place, which)

    with monkeypatch.context() as patch:
        patch.setattr(object_store, "_send", cut)
        with pytest.raises(ShardmakeError, match=r"the network is gone\nUploaded files are kept.*Push again"):
            push(RUN, rundir)
    assert not {"SHA256SUMS", "config.json"} & contents(bucket).keys(), "no loader takes it for a model"
    push(RUN, rundir)
    found = contents(bucket)
    assert found["config.json"] == b"new" and "SHA256SUMS" in found and object_store.UNFINISHED not in found


def test_readers_find_a_whole_model_or_no_config_at_any_time(bucket: Any, rundir: RunDir, monkeypatch: Patch) -> None:
    """Loaders need config.json. The old and the new model have files of the same names and others."""
    old = {**MODEL, "model.safetensors.index.json": b"old", "merges.txt": b"old"}
    new = {**MODEL, **dict.fromkeys(WEIGHTS, b"new"), "config.json": b"new", "vocab.json": b"new"}
    seen = []

    def look(method: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            result = method(*given, **options)
            found = contents(bucket)
            model = {name: found[name] for name in found if name in {*old, *new}}
            assert "config.json" not in found or model in (old, new), f"mixed after {method.__name__}: {given}"
            assert "SHA256SUMS" not in found or model in (old, new)
            seen.append("config.json" in found)
            return result

        return call

    write_model(rundir, old)
    push(RUN, rundir)
    files = object_store._open(URL).files  # the one that the push gets from fsspec's cache
    for name in ("put_file", "pipe_file", "rm_file"):
        monkeypatch.setattr(files, name, look(getattr(files, name)))
    write_model(rundir, new)
    push(RUN, rundir)
    assert {False, True} == {*seen} and len(seen) > len(WEIGHTS)
    assert contents(bucket).keys() == {*new, "README.md", *PLOTS, "SHA256SUMS"}, "nothing of the old model"


def test_a_new_card_leaves_the_model_in_place(bucket: Any, rundir: RunDir, monkeypatch: Patch) -> None:
    push(RUN, rundir)
    before = written(bucket)
    monkeypatch.setattr("shardmake.push.bundle.card_plots", lambda *_: {**DRAWN, "plots/loss.png": b"new"})
    push(RUN, rundir)
    changed = {key.removeprefix("models/chat/") for key, when in written(bucket).items() if before[key] != when}
    assert contents(bucket)["plots/loss.png"] == b"new" and not changed & MODEL.keys()


def test_a_damaged_upload_is_noticed(bucket: Any, rundir: RunDir, monkeypatch: Patch) -> None:
    monkeypatch.setattr(object_store._Place, "digest", lambda *_: "0" * 64)
    with pytest.raises(ShardmakeError, match="differs from what was sent when read back"):
        push(RUN, rundir)
    assert "SHA256SUMS" not in contents(bucket) and not rundir.push_receipt.exists()


def test_the_receipt_holds_the_versions_that_the_bucket_keeps(bucket: Any, rundir: RunDir) -> None:
    bucket.Versioning().enable()
    receipt = push(RUN, rundir)
    (place,) = receipt.destinations
    assert (place.versions or {}).keys() == receipt.files.keys()
    kept = {name: bucket.Object(f"models/chat/{name}").version_id for name in MODEL}
    assert kept == {name: (place.versions or {})[name] for name in MODEL}
    assert push(RUN, rundir) == receipt, "and makes no new ones"
    bucket.object_versions.delete()


def test_without_credentials(bucket: Any, rundir: RunDir, monkeypatch: Patch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(
        ShardmakeError, match=r"credentials.*\nProvide credentials with permission to list, .* run `aws configure`"
    ):
        push(RUN, rundir)


@pytest.mark.parametrize(("error", "advice"), [
    (PermissionError("Access Denied"), "Provide credentials with permission to list, read, write and delete"),
    (OSError("QuotaExceeded: the bucket's quota is reached"), "The store is full. Free some space there"),
    (OSError(28, "No space left on device"), "The store is full. Free some space there"),
    (ConnectionError("Connection reset by peer"), "Uploaded files are kept. Push again."),
])  # fmt: skip
def test_what_a_store_refuses(bucket: Any, rundir: RunDir, monkeypatch: Patch, error: Exception, advice: str) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(object_store, "_send", refuse)
    with pytest.raises(ShardmakeError, match=rf"The push to s3://lab/models/chat failed: .*\n{advice}"):
        push(RUN, rundir)


@pytest.mark.parametrize(("to", "message"), [
    ("s3://other/chat", r"The push to s3://other/chat failed.*\nCreate the bucket first"),
    ("gs://lab/chat", "Install the package that fsspec needs for gs://"),
])  # fmt: skip
def test_a_bucket_or_a_package_that_is_not_there(bucket: Any, rundir: RunDir, to: str, message: str) -> None:
    with pytest.raises(ShardmakeError, match=message):
        push(make_run(push={"to": to}), rundir)
