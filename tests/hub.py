"""A Hugging Face hub on 127.0.0.1 with what its Python client uses: repositories, commits, LFS, xet, downloads.

It stores the uploads, checks digests as the real hub does, and fails on request: it refuses, cuts a transfer in the
middle, or loses a file after a commit. It records every request, so that tests can check what was not sent again.

    with FakeHub(folder) as hub:
        hub.fail("POST /api/repos/create", times=2, status=503)
        HfApi(endpoint=hub.url, token=WRITER).create_repo("lab/model")
"""

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlparse

from tests.hub_repository import Blob, Repository, git_oid, is_lfs, lfs_blob

WRITER, READER, STRANGER = "hf_writer", "hf_reader", "hf_stranger"


@dataclass
class Fault:
    """A failure of the next ``times`` requests that match; without a status the connection breaks in the middle."""

    pattern: re.Pattern[str]
    times: int
    status: int | None
    message: str
    wait: int = 0
    """Seconds of the header Retry-After."""


@dataclass(frozen=True)
class Reply:
    status: int = 200
    value: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None

    @property
    def body(self) -> bytes:
        return self.raw if self.raw is not None else json.dumps(self.value).encode()


class FakeHub:
    """The hub; a context manager. ``transfer``: how large files arrive (basic, multipart or xet)."""

    def __init__(self, folder: Path, transfer: str = "basic") -> None:
        self.folder = folder
        self.transfer = transfer
        self.tokens = {WRITER: "write", READER: "read", STRANGER: "stranger"}
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.ranges: list[str] = []
        self.received: list[tuple[str, int]] = []
        """Uploads of large files or parts of them: SHA-256 and bytes, also of those that were cut."""
        self.faults: list[Fault] = []
        self.lose: list[str] = []
        self.card_errors: list[str] = []
        self.before: Callable[[], None] = lambda: None
        self.lock = threading.RLock()
        (folder / "objects").mkdir(parents=True)

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def fail(self, pattern: str, times: int = 1, status: int = 503, message: str = "injected", wait: int = 0) -> None:
        """Answer the next ``times`` requests ("METHOD /path") that match with ``status``; 200 comes with a web page."""
        self.faults.append(Fault(re.compile(pattern), times, status, message, wait))

    def cut(self, pattern: str, times: int = 1) -> None:
        """Break the connection in the middle of the next ``times`` requests that match."""
        self.faults.append(Fault(re.compile(pattern), times, None, ""))

    def asked(self, pattern: str) -> list[str]:
        return [request for request in self.requests if re.search(pattern, request)]

    def add(self, name: str, files: Mapping[str, bytes], *, private: bool = False, gated: bool = False) -> str:
        """Put a repository here (``org/name``, or ``datasets/org/name``); return its commit."""
        blobs = {path: self.store(content, is_lfs(path, len(content))) for path, content in files.items()}
        return self.repositories.setdefault(name, Repository(private, gated)).commit("main", blobs)

    def files(self, name: str, revision: str = "main") -> dict[str, Blob]:
        repository = self.repositories[name]
        return repository.commits[repository.refs[revision]]

    def content(self, name: str, path: str, revision: str = "main") -> bytes:
        return self.object(self.files(name, revision)[path].sha256).read_bytes()

    def object(self, sha256: str) -> Path:
        return self.folder / "objects" / sha256

    def store(self, content: bytes, lfs: bool) -> Blob:
        sha256 = hashlib.sha256(content).hexdigest()
        self.object(sha256).write_bytes(content)
        return lfs_blob(sha256, len(content)) if lfs else Blob(len(content), sha256, git_oid(content), lfs=False)


class RefusedError(Exception):
    """Ends a request with an error that the client understands."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        self.reply = Reply(status, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message})


ROUTES: list[tuple[str, re.Pattern[str], Callable[..., Reply]]] = []


def route(method: str, pattern: str) -> Callable[[Callable[..., Reply]], Callable[..., Reply]]:
    """Serve requests whose whole path matches ``pattern`` with the decorated method; groups become arguments."""

    def register(function: Callable[..., Reply]) -> Callable[..., Reply]:
        ROUTES.append((method, re.compile(pattern), function))
        return function

    return register


REVISION = r"(?P<revision>refs/pr/\d+|[^/]+)"
API = r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # a reply in one piece: two writes would wait for the client's delayed acknowledgement

    def log_message(self, *_: Any) -> None:
        pass

    def serve(self) -> None:
        url = urlparse(self.path)
        path, self.query = unquote(url.path), parse_qs(url.query)
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
            fault = self._next_fault(f"{self.command} {path}")
        self.hub.before()
        if fault is not None and fault.status is None and self.command in ("POST", "PUT"):
            return self._break_off()
        self.body = self._read_body()
        self._note(self.body)
        if fault is not None and fault.status is not None:
            page = b"<!doctype html><title>Sign in to the network</title>" if fault.status == 200 else None
            return self._send(Reply(fault.status, {"error": fault.message}, {"Retry-After": str(fault.wait)}, page))
        try:
            with self.hub.lock:
                reply = self._dispatch(path)
        except RefusedError as refused:
            reply = refused.reply
        return self._send(reply, cut=fault is not None)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = serve  # noqa: N815

    def _next_fault(self, request: str) -> Fault | None:
        fault = next((f for f in self.hub.faults if f.times > 0 and f.pattern.search(request)), None)
        if fault is not None:
            fault.times -= 1
        return fault

    def _break_off(self) -> None:
        self._note(self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2))
        self.close_connection = True
        self.connection.close()

    def _note(self, content: bytes) -> None:
        if match := re.fullmatch(r"/(?:put|part)/(\w+)(?:/\d+)?", self.path):
            self.hub.received.append((match[1], len(content)))

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().strip(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send(self, reply: Reply, cut: bool = False) -> None:
        body = reply.body
        self.send_response(reply.status)
        self.send_header("Content-Type", "application/json" if reply.raw is None else "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def _dispatch(self, path: str) -> Reply:
        for method, pattern, function in ROUTES:
            if method == self.command.replace("HEAD", "GET") and (match := pattern.fullmatch(path)):
                return function(self, **match.groupdict())
        raise RefusedError(404, f"the test hub does not serve {self.command} {path}")

    # Who may do what

    def _role(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            raise RefusedError(401, "Invalid credentials in Authorization header")
        return self.hub.tokens.get(token)

    def _repository(self, kind: str, name: str) -> Repository:
        repository = self.hub.repositories.get(name if kind == "models" else f"{kind}/{name}")
        if repository is None or (repository.private and self._role() not in ("read", "write")):
            raise RefusedError(404 if self._role() else 401, "Repository not found", "RepoNotFound")
        return repository

    def _check_writer(self) -> None:
        if self._role() != "write":
            raise RefusedError(403, "You don't have the rights to write to this namespace")

    def _files(self, repository: Repository, revision: str) -> tuple[str, dict[str, Blob]]:
        commit = repository.resolve(revision)
        if commit is None:
            raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit, repository.commits[commit]

    # Repositories

    @route("GET", "/api/whoami-v2")
    def whoami(self) -> Reply:
        return Reply(value={"type": "user", "name": self._role(), "orgs": []})

    @route("POST", "/api/repos/create")
    def create_repository(self) -> Reply:
        self._check_writer()
        wanted = json.loads(self.body)
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.hub.repositories:
            raise RefusedError(409, "You already created this model repo")
        repository = Repository(private=wanted.get("visibility") == "private")
        repository.commit("main", {".gitattributes": self.hub.store(b"*.safetensors filter=lfs\n", lfs=False)})
        self.hub.repositories[name] = repository
        return Reply(value={"url": f"{self.hub.url}/{name}", "name": name, "id": "1"})

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self) -> Reply:
        errors = [{"message": message} for message in self.hub.card_errors]
        return Reply(400 if errors else 200, {"errors": errors, "warnings": []})

    @route("GET", API + "(/revision/(?P<revision>.+))?")
    def repository_info(self, kind: str, name: str, revision: str | None) -> Reply:
        repository = self._repository(kind, name)
        commit, files = self._files(repository, revision or "main")
        siblings = [{"rfilename": path} for path in files]
        return Reply(value={"id": name, "sha": commit, "private": repository.private, "siblings": siblings, "tags": []})

    @route("GET", API + "/tree/" + REVISION + "(/(?P<folder>.+))?")
    def tree(self, kind: str, name: str, revision: str, folder: str | None) -> Reply:
        _, files = self._files(self._repository(kind, name), revision)
        above = f"{folder}/" if folder else ""
        inside = {path: blob for path, blob in files.items() if path.startswith(above)}
        if self.query.get("recursive", [""])[0].lower() in ("true", "1"):
            return Reply(value=[blob.as_tree_entry(path) for path, blob in inside.items()])
        here = [blob.as_tree_entry(path) for path, blob in inside.items() if "/" not in path.removeprefix(above)]
        deeper = [path.removeprefix(above) for path in inside if "/" in path.removeprefix(above)]
        below = {above + path.partition("/")[0] for path in deeper}
        return Reply(value=here + [{"type": "directory", "path": path, "oid": "0" * 40} for path in sorted(below)])

    @route("POST", API + "/paths-info/(?P<revision>.+)")
    def paths_info(self, kind: str, name: str, revision: str) -> Reply:
        _, files = self._files(self._repository(kind, name), revision)
        paths = parse_qs(self.body.decode()).get("paths", [])
        return Reply(value=[files[path].as_tree_entry(path) for path in paths if path in files])

    @route("POST", API + "/branch/(?P<branch>.+)")
    def create_branch(self, kind: str, name: str, branch: str) -> Reply:
        self._check_writer()
        repository = self._repository(kind, name)
        if branch in repository.refs:
            raise RefusedError(409, "Reference already exists")
        repository.refs[branch] = repository.refs["main"]
        return Reply(value={})

    @route("GET", API + "/discussions")
    def discussions(self, kind: str, name: str) -> Reply:
        repository = self._repository(kind, name)
        common = {"createdAt": "2026-01-01T00:00:00.000Z", "status": "open", "isPullRequest": True}
        common |= {"repo": {"name": name, "type": "model"}}
        opened = enumerate(zip(repository.requests, repository.authors, strict=True), 1)
        found = [common | {"num": at, "title": title, "author": {"name": author}} for at, (title, author) in opened]
        return Reply(value={"discussions": found, "count": len(found), "start": 0})

    # Commits

    @route("POST", API + "/preupload/(?P<revision>.+)")
    def preupload(self, kind: str, name: str, revision: str) -> Reply:
        self._check_writer()
        _, files = self._files(self._repository(kind, name), revision)
        return Reply(value={"files": [_upload_mode(entry, files) for entry in json.loads(self.body)["files"]]})

    @route("GET", API + "/xet-(read|write)-token/(?P<revision>.+)")
    def xet_token(self, kind: str, name: str, revision: str) -> Reply:
        address, expires = f"local://{self.hub.folder}/xet", int(time.time()) + 3600
        headers = {"X-Xet-Cas-Url": address, "X-Xet-Access-Token": "t", "X-Xet-Token-Expiration": str(expires)}
        return Reply(value={"casUrl": address, "accessToken": "t", "exp": expires}, headers=headers)

    @route("POST", API + "/commit/(?P<revision>.+)")
    def commit(self, kind: str, name: str, revision: str) -> Reply:
        self._check_writer()
        repository = self._repository(kind, name)
        head, files = self._files(repository, revision)
        operations = [json.loads(line) for line in self.body.splitlines() if line]
        if operations[0]["value"].get("parentCommit") not in (None, head):
            raise RefusedError(412, "A commit has happened since. Please refresh and try again.")
        new = dict(files)
        for operation in operations[1:]:
            self._apply(operation["key"], operation["value"], new)
        for path in self.hub.lose:
            new.pop(path, None)
        self.hub.lose.clear()
        ref = revision
        if opens_request := "create_pr" in self.query:
            repository.requests.append(operations[0]["value"]["summary"])
            repository.authors.append(self._role() or "")
            ref = f"refs/pr/{len(repository.requests)}"
        oid = repository.commit(ref, new)
        reply = {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"}
        if opens_request:
            reply["pullRequestUrl"] = f"{self.hub.url}/{name}/discussions/{ref.rpartition('/')[2]}"
        return Reply(value=reply)

    def _apply(self, key: str, value: dict[str, Any], files: dict[str, Blob]) -> None:
        if key == "deletedFile":
            files.pop(value["path"])
        elif key == "file":
            files[value["path"]] = self.hub.store(base64.b64decode(value["content"]), lfs=False)
        elif key == "lfsFile":
            if self.hub.transfer != "xet" and not self.hub.object(value["oid"]).exists():
                raise RefusedError(400, f"LFS object of {value['path']} was not uploaded")
            files[value["path"]] = lfs_blob(value["oid"], value["size"])
        else:
            raise RefusedError(400, f"unknown operation {key}")

    # Large files

    @route("POST", r"/(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
    def lfs_batch(self, name: str) -> Reply:
        self._check_writer()
        wanted = json.loads(self.body)["objects"]
        return Reply(value={"transfer": self.hub.transfer, "objects": [self._lfs_action(entry) for entry in wanted]})

    def _lfs_action(self, entry: dict[str, Any]) -> dict[str, Any]:
        if self.hub.object(entry["oid"]).exists():
            return entry
        upload: dict[str, Any] = {"href": f"{self.hub.url}/put/{entry['oid']}", "header": {}}
        if self.hub.transfer == "multipart":
            chunk = 64 * 1024
            count = -(-entry["size"] // chunk)
            parts = {f"{n + 1:05d}": f"{self.hub.url}/part/{entry['oid']}/{n}" for n in range(count)}
            upload = {"href": f"{self.hub.url}/complete/{entry['oid']}", "header": {"chunk_size": str(chunk), **parts}}
        return entry | {"actions": {"upload": upload, "verify": {"href": f"{self.hub.url}/verify", "header": {}}}}

    @route("PUT", r"/put/(?P<oid>\w+)")
    def put(self, oid: str) -> Reply:
        return self._keep(oid, self.body)

    @route("PUT", r"/part/(?P<oid>\w+)/(?P<number>\d+)")
    def put_part(self, oid: str, number: str) -> Reply:
        (self.hub.folder / f"{oid}.{int(number):05d}.part").write_bytes(self.body)
        return Reply(value={}, headers={"ETag": hashlib.md5(self.body).hexdigest()})

    @route("POST", r"/complete/(?P<oid>\w+)")
    def complete(self, oid: str) -> Reply:
        parts = sorted(self.hub.folder.glob(f"{oid}.*.part"))
        return self._keep(oid, b"".join(part.read_bytes() for part in parts))

    def _keep(self, oid: str, content: bytes) -> Reply:
        if hashlib.sha256(content).hexdigest() != oid:
            raise RefusedError(400, "the content does not match its SHA-256")
        self.hub.object(oid).write_bytes(content)
        return Reply(value={})

    @route("POST", "/verify")
    def verify(self) -> Reply:
        return Reply(value={})

    # Downloads

    @route("GET", r"/((?P<kind>datasets)/)?(?P<name>[^/]+/[^/]+)/resolve/" + REVISION + "/(?P<path>.+)")
    def download(self, kind: str | None, name: str, revision: str, path: str) -> Reply:
        repository = self._repository(kind or "models", name)
        if repository.gated and self._role() not in ("read", "write"):
            status = 403 if self._role() else 401
            raise RefusedError(status, f"Access to model {name} is restricted. Visit the page and accept.", "GatedRepo")
        commit, files = self._files(repository, revision)
        if path not in files:
            raise RefusedError(404, "Entry not found", "EntryNotFound")
        blob = files[path]
        tag = f'"{blob.sha256 if blob.lfs else blob.oid}"'
        headers = {"X-Repo-Commit": commit, "ETag": tag, "Accept-Ranges": "bytes"}
        content = self.hub.object(blob.sha256).read_bytes()
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), int(match[2] or len(content) - 1)
            self.hub.ranges.append(match[0])
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            return Reply(206, headers=headers, raw=content[start : end + 1])
        return Reply(headers=headers, raw=content)


def _upload_mode(entry: dict[str, Any], files: Mapping[str, Blob]) -> dict[str, Any]:
    lfs = is_lfs(entry["path"], entry["size"])
    existing = files.get(entry["path"])
    oid = existing and (existing.sha256 if existing.lfs else existing.oid)
    return {"path": entry["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}
