import hashlib
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from shardmake.core.errors import ShardmakeError
from shardmake.push.stage import push
from shardmake.run.paths import RunDir
from shardmake.run.receipts import PushedTo
from tests.finished_run import MODEL, PLOTS, WEIGHTS, make_run, write_model
from tests.hub import READER, FakeHub

Patch = pytest.MonkeyPatch

RUN = make_run(push={"to": "hub:lab/chat"})


@pytest.fixture(params=["basic", "multipart"])
def transfer(request: pytest.FixtureRequest) -> str:
    return request.param


def contents(hub: FakeHub, revision: str = "main") -> dict[str, bytes]:
    files = hub.files("lab/chat", revision)
    return {name: hub.content("lab/chat", name, revision) for name in files if name != ".gitattributes"}


def test_the_repository_is_private_and_holds_the_model(hub: FakeHub, rundir: RunDir, transfer: str) -> None:
    hub.transfer = transfer
    receipt = push(RUN, rundir)
    assert hub.repositories["lab/chat"].private
    found = contents(hub)
    assert {name: found[name] for name in MODEL} == MODEL
    assert found.keys() - MODEL == {"README.md", *PLOTS, "SHA256SUMS"}
    commit = hub.repositories["lab/chat"].refs["main"]
    assert len(hub.repositories["lab/chat"].commits) == 2, "readers see the model with one commit after the initial one"
    assert receipt.destinations == [PushedTo(to="hub:lab/chat", url=f"{hub.url}/lab/chat/tree/{commit}", commit=commit)]


def test_through_xet(hub: FakeHub, rundir: RunDir, monkeypatch: Patch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    hub.transfer = "xet"
    push(RUN, rundir)
    assert hub.asked("xet-write-token") and not hub.asked("info/lfs") and WEIGHTS.keys() < hub.files("lab/chat").keys()


def test_the_same_content_again_makes_no_commit_and_sends_nothing(hub: FakeHub, rundir: RunDir) -> None:
    first = push(RUN, rundir)
    hub.requests.clear()
    assert push(RUN, rundir) == first and not hub.asked("PUT|/commit/|/repos/create|lfs")


def test_only_what_changed_is_sent_and_old_files_go(hub: FakeHub, rundir: RunDir) -> None:
    push(RUN, rundir)
    hub.requests.clear()
    first = next(iter(WEIGHTS))
    write_model(rundir, {"config.json": MODEL["config.json"], first: WEIGHTS[first], "new.safetensors": b"new"})
    push(RUN, rundir)
    assert contents(hub).keys() == {"config.json", first, "new.safetensors", "README.md", *PLOTS, "SHA256SUMS"}
    assert len(hub.asked("PUT")) == 1


OVERLOADED = {"POST /api/repos/create": 3, "PUT /put/": 3, "POST .*/commit/": 3, "/tree/": 1} | {
    "POST .*/preupload/": 1,  # the client waits a second before each try of these
    "POST .*/objects/batch": 1,
}


@pytest.mark.parametrize(("request_", "fault"), [
    *((one, {"times": OVERLOADED[one], "status": status}) for one in OVERLOADED for status in (429, 503)),
    ("POST .*/commit/", {"status": 412, "message": "A commit has happened since."}),
    # storage signs addresses for hours; a slow link needs longer
    ("PUT /put/", {"status": 403, "message": "Request has expired"}),
    *((one, {"status": 200}) for one in OVERLOADED if one not in ("PUT /put/", "POST .*/objects/batch")),
])  # fmt: skip
def test_an_overloaded_hub_another_commit_an_expired_address_and_a_web_page_are_outlasted(
    hub: FakeHub, rundir: RunDir, request_: str, fault: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    hub.fail(request_, **fault)
    push(RUN, rundir)
    assert {name: contents(hub)[name] for name in MODEL} == MODEL
    assert ("not JSON but a page" in caplog.text) == (fault["status"] == 200)


@pytest.mark.parametrize("request_", ["PUT /put/", "POST .*/commit/", "GET .*/tree/"])
def test_after_a_cut_a_push_goes_on_with_what_has_not_arrived(hub: FakeHub, rundir: RunDir, request_: str) -> None:
    hub.cut(request_)
    push(RUN, rundir)
    assert {name: contents(hub)[name] for name in MODEL} == MODEL
    assert len(hub.asked("PUT /put/")) == len(WEIGHTS) + (request_ == "PUT /put/")


def sent(hub: FakeHub) -> Counter[str]:
    """Bytes that arrived at the hub since it was last asked, by SHA-256."""
    found: Counter[str] = Counter()
    for sha256, size in hub.received:
        found[sha256] += size
    hub.received.clear()
    return found


def test_a_broken_network_costs_at_most_a_file(hub: FakeHub, rundir: RunDir, transfer: str, monkeypatch: Patch) -> None:
    """Of eight shards one breaks off again and again: nobody sees anything of the others, and they are not sent again."""
    monkeypatch.setattr("shardmake.core.hub.RETRY_WAITS", ())
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    shards = {f"model-{n}.safetensors": bytes([n]) * 200_000 for n in range(8)}
    write_model(rundir, {"config.json": b"{}", **shards})
    lost = hashlib.sha256(shards["model-4.safetensors"]).hexdigest()
    hub.transfer = transfer
    hub.cut(f"P[OU][ST]T? /(put|part)/{lost}", times=99)
    with pytest.raises(ShardmakeError, match=r"The push to hub:lab/chat failed.*\nUploaded files are kept.*Push again"):
        push(RUN, rundir)
    assert not contents(hub)
    sizes = {hashlib.sha256(content).hexdigest(): len(content) for content in shards.values()}
    arrived = {sha256 for sha256 in sizes if hub.object(sha256).exists()}
    assert lost not in arrived and arrived
    sent(hub)
    hub.faults.clear()
    push(RUN, rundir)
    assert sent(hub) == {sha256: size for sha256, size in sizes.items() if sha256 not in arrived}
    assert {name: contents(hub)[name] for name in shards} == shards


def test_a_file_lost_after_the_commit_is_pushed_again(hub: FakeHub, rundir: RunDir) -> None:
    hub.lose.append(next(iter(WEIGHTS)))
    push(RUN, rundir)
    assert contents(hub).keys() > MODEL.keys()


def test_a_hub_that_keeps_losing_files_is_an_error(hub: FakeHub, rundir: RunDir, monkeypatch: Patch) -> None:
    monkeypatch.setattr("shardmake.core.hub.RETRY_WAITS", ())
    hub.lose.append("config.json")
    with pytest.raises(ShardmakeError, match=r"has no or different content for: config\.json"):
        push(RUN, rundir)
    assert not rundir.push_receipt.exists()


def test_a_branch_is_made_and_main_stays(hub: FakeHub, rundir: RunDir) -> None:
    run = make_run(push={"to": "hub:lab/chat", "revision": "try-2"})
    push(run, rundir)
    assert hub.files("lab/chat").keys() == {".gitattributes"} and contents(hub, "try-2").keys() > MODEL.keys()
    hub.requests.clear()
    push(run, rundir)
    assert not hub.asked("/commit/")


def test_a_pull_request_is_opened_once_and_kept_up_to_date(hub: FakeHub, rundir: RunDir) -> None:
    run = make_run(push={"to": "hub:lab/chat", "pull_request": True})
    first = push(run, rundir)
    assert hub.files("lab/chat").keys() == {".gitattributes"} and contents(hub, "refs/pr/1").keys() > MODEL.keys()
    assert push(run, rundir) == first
    write_model(rundir, {**MODEL, "config.json": b"{}"})
    push(run, rundir)
    assert contents(hub, "refs/pr/1")["config.json"] == b"{}"
    assert hub.repositories["lab/chat"].requests == ["Push model"]


def test_a_pull_request_of_somebody_else_stays_as_it_is(hub: FakeHub, rundir: RunDir) -> None:
    commit = hub.add("lab/chat", {".gitattributes": b""}, private=True)
    theirs = hub.repositories["lab/chat"]
    theirs.requests.append("Push model")
    theirs.authors.append("somebody")
    theirs.refs["refs/pr/1"] = commit
    run = make_run(push={"to": "hub:lab/chat", "pull_request": True})
    first = push(run, rundir)
    assert theirs.refs["refs/pr/1"] == commit and contents(hub, "refs/pr/2").keys() > MODEL.keys()
    assert push(run, rundir) == first and len(theirs.requests) == 2


def test_the_wait_that_the_hub_requests_is_kept(hub: FakeHub, rundir: RunDir, monkeypatch: Patch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("shardmake.core.hub.time.sleep", waits.append)
    hub.fail("POST /api/repos/create", status=429, wait=77)
    hub.fail("POST .*/commit/", status=503, wait=5000)
    push(RUN, rundir)
    assert 77 in waits and 600 in waits, "not for hours"
    assert {name: contents(hub)[name] for name in MODEL} == MODEL


def test_every_group_of_files_has_its_own_retries(hub: FakeHub, rundir: RunDir) -> None:
    """A push of hours is cut more often than one step is retried."""
    shards = {f"model-{n:02}.safetensors": bytes([n]) * 1000 for n in range(20)}
    write_model(rundir, {"config.json": b"{}", **shards})
    for number in (1, 6, 11, 16):
        sha256 = hashlib.sha256(shards[f"model-{number:02}.safetensors"]).hexdigest()
        hub.fail(f"PUT /put/{sha256}", times=2, status=403, message="Request has expired")
    push(RUN, rundir)
    assert {name: contents(hub)[name] for name in shards} == shards


def test_an_incomplete_listing_is_not_taken_for_another_model(hub: FakeHub, rundir: RunDir, monkeypatch: Patch) -> None:
    """Once, the listing lacks the checksums and has an old file."""
    push(RUN, rundir)
    list_tree, calls = HfApi.list_repo_tree, iter([True])

    def listed(api: HfApi, *given: Any, **options: Any) -> Any:
        found = list(list_tree(api, *given, **options))
        if next(calls, False):
            found = [entry for entry in found if entry.path != "SHA256SUMS"]
            next(entry for entry in found if entry.path == "config.json").blob_id = "0" * 40
        return found

    write_model(rundir, {**MODEL, "config.json": b"new"})
    monkeypatch.setattr(HfApi, "list_repo_tree", listed)
    push(RUN, rundir)
    assert contents(hub)["config.json"] == b"new"


def test_another_model_under_the_name_is_not_overwritten(hub: FakeHub, rundir: RunDir) -> None:
    hub.add("lab/chat", {"config.json": b"{}", "README.md": b"theirs"}, private=True)
    with pytest.raises(ShardmakeError, match=r"hub:lab/chat contains files.*config\.json.*Choose another name"):
        push(RUN, rundir)
    assert contents(hub)["config.json"] == b"{}"


def test_a_card_written_on_the_web_is_replaced(hub: FakeHub, rundir: RunDir) -> None:
    hub.add("lab/chat", {"README.md": b"made with the new-model form"}, private=True)
    push(RUN, rundir)
    assert contents(hub).keys() > MODEL.keys()


def test_a_public_repository_is_refused_where_private_was_asked(hub: FakeHub, rundir: RunDir) -> None:
    hub.add("lab/chat", {"README.md": b""})
    with pytest.raises(ShardmakeError, match=r"is public.*private: false"):
        push(RUN, rundir)
    push(make_run(push={"to": "hub:lab/chat", "private": False}), rundir)
    assert contents(hub).keys() > MODEL.keys()


def test_a_hub_that_makes_the_repository_public_gets_nothing(hub: FakeHub, rundir: RunDir, monkeypatch: Patch) -> None:
    create = HfApi.create_repo
    monkeypatch.setattr(
        HfApi, "create_repo", lambda api, name, **given: create(api, name, **given | {"private": False})
    )
    with pytest.raises(ShardmakeError, match=r"is public.*private: false"):
        push(RUN, rundir)
    assert not contents(hub).keys() & MODEL.keys()


LIBRARY = "huggingface_hub.constants."
FAILS: dict[str, tuple[Callable[[FakeHub, Patch], object], str]] = {
    "a token to read": (lambda hub, patch: patch.setenv("HF_TOKEN", READER),
        "rights to write.*\n.*Use a token with write permission, ask lab for access"),
    "a token of old": (lambda hub, patch: patch.setenv("HF_TOKEN", "hf_expired"),
        "Invalid credentials.*\n.*Create a new one with write permission and run `hf auth login`"),
    "no token": (lambda hub, patch: (patch.delenv("HF_TOKEN"), patch.setattr(LIBRARY + "HF_TOKEN_PATH", "/none")),
        r"needs a token with write permission, .*Run `hf auth login`, or set HF_TOKEN"),
    "switched off": (lambda hub, patch: patch.setattr(LIBRARY + "HF_HUB_OFFLINE", True),
        "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"),
    "a hub that is gone": (lambda hub, patch: patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9"),
        r"The push to hub:lab/chat failed: .*refused.*\nUploaded files are kept.*Push again"),
    "storage that always rejects, which the token does not explain": (
        lambda hub, patch: hub.fail("PUT /put/", times=99, status=403, message="Request has expired"),
        r"403.*\nUploaded files are kept\. Push again",
    ),
    "no xet": (
        lambda hub, patch: (patch.setattr(LIBRARY + "HF_HUB_DISABLE_XET", False), setattr(hub, "transfer", "xet"),
            hub.fail("/xet-write-token/", times=99, status=404, message="Not found")),
        r"hub:lab/chat failed.*\n.*Set HF_HUB_DISABLE_XET=1 and push again",
    ),
    "storage used up": (lambda hub, patch: hub.fail("POST .*/preupload/", status=402, message=FULL),
        r"storage limit reached.*\n.*Free some space"),
    "storage used up in the middle": (lambda hub, patch: hub.fail("POST .*/objects/batch", status=403, message=FULL),
        r"storage limit reached.*\n.*Free some space"),
    "metadata that the hub does not take": (lambda hub, patch: hub.card_errors.append('"license" must be one of ...'),
        r'Invalid metadata in README\.md\. - "license" must be.*\nThe hub rejected'),
}  # fmt: skip
FULL = "Private repository storage limit reached, please upgrade your plan"


@pytest.mark.parametrize("fault", FAILS)
def test_a_push_that_fails_says_what_to_do(hub: FakeHub, rundir: RunDir, monkeypatch: Patch, fault: str) -> None:
    arrange, advice = FAILS[fault]
    monkeypatch.setattr("shardmake.core.hub.RETRY_WAITS", ())
    arrange(hub, monkeypatch)
    with pytest.raises(ShardmakeError, match=advice) as caught:
        push(RUN, rundir)
    assert not re.search("hf_[a-z]", str(caught.value)) and not rundir.push_receipt.exists()


def test_one_destination_down_stops_no_other(hub: FakeHub, rundir: RunDir, monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(push={"to": ["hub:lab/chat", "file:published/chat"]})
    hub.fail("POST /api/repos/create", times=9, status=403, message="no right")
    with pytest.raises(ShardmakeError, match="no right"):
        push(run, rundir)
    assert Path("published/chat/config.json").exists() and not rundir.push_receipt.exists()
    hub.faults.clear()
    assert [place.to for place in push(run, rundir).destinations] == ["hub:lab/chat", "file:published/chat"]
