"""The hub, and data at an address, behind a private authority, a proxy or another endpoint, on the loopback interface."""

import http.server
import json
import os
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub import WRITER, FakeHub

PROGRAM = """
import json, os
from shardmake.core import hub
from shardmake.core.errors import ShardmakeError
from shardmake.core.stores import explain_store_errors, open_store
from shardmake.doctor.login import check_hub
hub.RETRY_WAITS = (0.0,)
calls, api = [], hub.connect()
def action():
    calls.append(1)
    return api.repo_info("a/b")
try:
    with hub.translate_hub_errors("The fetch", {}, "Check the network."):
        hub.with_retries(action)
    fetched = ""
except Exception as error:
    fetched = str(error)
address = os.environ["HF_ENDPOINT"] + "/train.jsonl"
try:
    with explain_store_errors("Fetching", address, ShardmakeError, {"other": "Check the network."}):
        files, path = open_store(address)
        files.cat_file(path)
except ShardmakeError as error:
    fetched += str(error)
found = check_hub()
print(json.dumps([found.verdict.value, found.found, found.advice, fetched, len(calls)]))
"""

PUSH = """
import sys
from pathlib import Path
from shardmake.core import hub
from shardmake.core.errors import ShardmakeError
from shardmake.push.stage import push
from tests.finished_run import make_run, make_rundir
hub.RETRY_WAITS = (0.0,)
try:
    print(push(make_run(push={"to": "hub:lab/chat"}), make_rundir(Path(sys.argv[1]))).destinations[0].commit)
except ShardmakeError as error:
    print(error)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        body = json.dumps({"id": "a/b", "sha": "0" * 40, "siblings": []}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """A file with the authority that signed ``server.pem`` beside it, whose key is ``key``."""
    new, days = ["-newkey", "rsa:2048", "-nodes"], ["-days", "2"]
    by_authority = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names"]
    names = "subjectAltName=DNS:localhost\nbasicConstraints=CA:FALSE\nauthorityKeyIdentifier=keyid\n"
    (tmp_path / "names").write_text(names)
    signs = ["-addext", "keyUsage=keyCertSign"]
    for command in (
        ["req", "-x509", *new, *days, "-subj", "/CN=Lab", *signs, "-keyout", "ca.key", "-out", "ca.pem"],
        ["req", *new, "-subj", "/CN=localhost", "-keyout", "key", "-out", "request"],
        ["x509", "-req", "-in", "request", *by_authority, *days, "-out", "server.pem"],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True, cwd=tmp_path)
    return tmp_path / "ca.pem"


def run(program: str, home: Path, **variables: str) -> str:
    """Return what ``program`` prints in an environment of its own; its argument is a folder in ``home``."""
    inherited = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(home)}
    command = [sys.executable, "-c", program, tempfile.mkdtemp(dir=home)]
    return subprocess.run(command, env=inherited | variables, capture_output=True, text=True, check=True).stdout


def ask(tmp_path: Path, **variables: str) -> list[str]:
    """Return verdict, finding and advice of the doctor, errors of two fetches, and how often the first one asked."""
    return json.loads(run(PROGRAM, tmp_path, **variables).splitlines()[-1])


def speak_tls(server: http.server.ThreadingHTTPServer, authority: Path) -> str:
    """Let ``server`` answer with the certificate beside ``authority``; return its address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.with_name("server.pem"), authority.with_name("key"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return f"https://localhost:{server.server_port}"


def test_a_private_authority_is_named(tmp_path: Path, authority: Path, server: http.server.ThreadingHTTPServer) -> None:
    endpoint = speak_tls(server, authority)
    verdict, found, advice, fetched, calls = ask(tmp_path, HF_ENDPOINT=endpoint, REQUESTS_CA_BUNDLE=str(authority))
    assert (verdict, calls) == ("warning", 1) and "CERTIFICATE_VERIFY_FAILED" in found
    assert "Set SSL_CERT_FILE" in advice and fetched.count("Set SSL_CERT_FILE") == 2
    verdict, found, _, fetched, calls = ask(tmp_path, HF_ENDPOINT=endpoint, SSL_CERT_FILE=str(authority))
    assert (verdict, found, fetched, calls) == ("ok", f"{endpoint} answers", "", 1)
    verdict, found, *_ = ask(tmp_path, HF_ENDPOINT=endpoint, SSL_CERT_FILE=str(tmp_path / "none"))
    assert (verdict, found) == ("stops a run", f"SSL_CERT_FILE is {tmp_path / 'none'}, which is not a file")


@pytest.mark.parametrize("transfer", ["basic", "xet"])
def test_a_push_trusts_the_authority(tmp_path: Path, authority: Path, transfer: str) -> None:
    """Weights are uploaded, by xet's own client too, committed and read back."""
    with FakeHub(tmp_path / "hub", transfer) as hub:
        hub.url = speak_tls(hub.server, authority)
        login = {"HF_ENDPOINT": hub.url, "HF_TOKEN": WRITER, "HF_HUB_DISABLE_XET": str(int(transfer != "xet"))}
        assert "Set SSL_CERT_FILE" in run(PUSH, tmp_path, **login)
        commit = run(PUSH, tmp_path, **login, SSL_CERT_FILE=str(authority)).split()[-1]
        assert hub.repositories["lab/chat"].refs["main"] == commit
        assert hub.asked("xet-write-token" if transfer == "xet" else "PUT")


def test_a_proxy_is_used(tmp_path: Path, server: http.server.ThreadingHTTPServer) -> None:
    """No name server knows the hub: only the proxy can answer for it."""
    proxy = f"http://127.0.0.1:{server.server_port}"
    verdict, found, _, fetched, _ = ask(tmp_path, HF_ENDPOINT="http://hub.invalid", HTTP_PROXY=proxy)
    assert (verdict, found, fetched) == ("ok", "http://hub.invalid answers through HTTP_PROXY", "")
    verdict, *_ = ask(tmp_path, HF_ENDPOINT="http://hub.invalid", HTTP_PROXY="http://127.0.0.1:9")
    assert verdict == "warning"
